"""When rounds are due, and that one look which a replica missed is no reason to stop."""

from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.readings import Page
from cacheaware_operator.rebalance_rounds import RebalanceRounds
from cacheaware_operator.rebalance_terms import Terms, terms_of
from cacheaware_operator.rebalance_values import Skip
from cacheaware_operator.testing_rebalance import loop, reuse_page


@pytest.fixture
def make_terms(make_wanted: Callable[..., Wanted], spec: dict[str, Any]) -> Callable[..., Terms]:
    def make(mode: str, interval: str = "10s") -> Terms:
        return terms_of(make_wanted({**spec, "rebalancing": {"mode": mode, "interval": interval}}).spec)

    return make


def page(at: float) -> Page:
    return Page(reuse_page("gold", loop(100 * at, 65)), at)


def test_a_round_is_due_once_an_interval_and_never_with_mode_off(make_terms: Callable[..., Terms]) -> None:
    rounds, auto = RebalanceRounds(), make_terms("Auto")
    assert rounds.due(auto, 0)
    rounds.hold(auto, Snapshot(), {}, 0)
    assert [rounds.due(auto, now) for now in (1, 9, 10)] == [False, False, True]
    assert not rounds.due(make_terms("Off"), 20)
    assert rounds.due(auto, 21)


def test_a_shorter_interval_counts_from_the_last_round(make_terms: Callable[..., Terms]) -> None:
    rounds = RebalanceRounds()
    rounds.hold(make_terms("Auto", "10m"), Snapshot(), {}, 0)
    assert not rounds.due(make_terms("Auto", "10m"), 20)
    assert rounds.due(make_terms("Auto", "10s"), 20)


@pytest.mark.parametrize(
    ("missed", "skipped"),
    [pytest.param(1, None, id="one look"), pytest.param(3, Skip.STALE_METRICS, id="three looks")],
)
def test_figures_are_stale_by_their_age_and_not_for_one_look_that_was_missed(
    make_terms: Callable[..., Terms], make_replica: Callable[..., ReplicaSnapshot], missed: int, skipped: Skip | None
) -> None:
    rounds, terms = RebalanceRounds(), make_terms("Auto")
    snapshot = Snapshot(replicas=(make_replica("chat-0"), make_replica("chat-1")))
    rounds.hold(terms, snapshot, {"chat-0": page(0), "chat-1": page(0)}, 0)
    for look in range(1, missed + 1):
        decision = rounds.hold(terms, snapshot, {"chat-0": page(10 * look)}, 10 * look)
    assert (decision.skipped is Skip.STALE_METRICS) == (skipped is Skip.STALE_METRICS)


def test_a_replica_that_is_gone_is_waited_for_by_nobody(
    make_terms: Callable[..., Terms], make_replica: Callable[..., ReplicaSnapshot]
) -> None:
    rounds, terms = RebalanceRounds(), make_terms("Auto")
    both = Snapshot(replicas=(make_replica("chat-0"), make_replica("chat-1")))
    rounds.hold(terms, both, {"chat-0": page(0), "chat-1": page(0)}, 0)
    one = Snapshot(replicas=(make_replica("chat-0"),))
    decision = rounds.hold(terms, one, {"chat-0": page(100)}, 100)
    assert decision.skipped is not Skip.STALE_METRICS
