"""Events: what is worth telling of conditions and moves, and what they look like."""

from datetime import UTC, datetime

import pytest

from cacheaware_api.conditions import ConditionStatus
from cacheaware_api.status import CacheAwarePoolStatus, Condition
from cacheaware_operator.events import PoolEvent, build_event, of_conditions, of_moves
from cacheaware_operator.rebalance_values import Move, MoveReason


def status(**conditions: tuple[str, str]) -> CacheAwarePoolStatus:
    return CacheAwarePoolStatus(
        conditions=tuple(
            Condition(type=type_, status=ConditionStatus(value), reason=reason, message="words")
            for type_, (value, reason) in conditions.items()
        )
    )


READY, UNREADY = ("True", "AllReplicasReady"), ("False", "ReplicasNotReady")
STALLED = ("True", "FieldConflict")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param(None, status(Ready=UNREADY), [], id="a pool begins"),
        pytest.param(status(Ready=UNREADY), status(Ready=READY), [(False, "AllReplicasReady")], id="it is ready"),
        pytest.param(status(Ready=READY), status(Ready=UNREADY), [(True, "ReplicasNotReady")], id="no longer"),
        pytest.param(status(Ready=READY), status(Ready=READY), [], id="nothing changed"),
        pytest.param(status(), status(Stalled=STALLED), [(True, "FieldConflict")], id="it is stalled"),
        pytest.param(
            status(Stalled=STALLED),
            status(Stalled=("True", "SecretNotFound")),
            [(True, "SecretNotFound")],
            id="another reason",
        ),
        pytest.param(status(Stalled=STALLED), status(), [], id="no longer stalled"),
        pytest.param(
            status(SLAMet=("Unknown", "NoTraffic")), status(SLAMet=("True", "AllTiersMet")), [], id="it became known"
        ),
        pytest.param(
            status(SLAMet=("True", "AllTiersMet")),
            status(SLAMet=("False", "TiersMissed")),
            [(True, "TiersMissed")],
            id="a promise is broken",
        ),
        pytest.param(
            status(SLAMet=("True", "AllTiersMet")), status(SLAMet=("Unknown", "NoTraffic")), [], id="it is not known"
        ),
        pytest.param(
            status(Reconciling=("True", "Scaling")), status(Reconciling=("True", "Starting")), [], id="on its way"
        ),
    ],
)
def test_only_what_became_good_or_bad_is_told(
    before: CacheAwarePoolStatus | None, after: CacheAwarePoolStatus, told: list[tuple[bool, str]]
) -> None:
    assert [(event.warning, event.reason) for event in of_conditions(before, after)] == told


def test_a_move_tells_from_whom_to_whom_how_much_and_why() -> None:
    (event,) = of_moves([Move("bronze", "gold", 5, MoveReason.MORE_HITS, "gold gains 3 %", 3.0)])
    assert event == PoolEvent(False, "QuotaMoved", "5 % of the cache from bronze to gold: MoreHits: gold gains 3 %")


def test_an_event_names_its_pool_and_is_never_too_long() -> None:
    pool = {"metadata": {"name": "chat", "namespace": "default", "uid": "u"}}
    built = build_event(pool, PoolEvent(True, "FieldConflict", "x" * 5000), datetime(2026, 1, 1, tzinfo=UTC))
    assert built["metadata"] == {"generateName": "chat.", "namespace": "default"}
    assert (built["involvedObject"]["uid"], built["type"], built["reason"]) == ("u", "Warning", "FieldConflict")
    assert built["firstTimestamp"] == "2026-01-01T00:00:00Z"
    assert len(built["message"]) == 1024
