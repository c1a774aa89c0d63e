"""Why a promise was not kept: where most of the time went, and the field of the pool that decides that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheaware.__main__ import app
from cacheaware.replay.causes import Cause, Missed, missed
from cacheaware.replay.measures import Served
from cacheaware.replay.requests import Request
from cacheaware_api import wire
from cacheaware_engine.blocks import WaitReason
from cacheaware_sidecar.tiers import Promise

BLOCK, CAPACITY = 100, 100
PROMISES = {"gold": Promise(1.0, 0.1), "bronze": Promise()}
QUOTAS = wire.Quotas(
    wire.Revision("uid", 1),
    (
        wire.TierQuota("gold", 10, 1, nominal=40, effective=40, limit=60, lending=10),
        wire.TierQuota("bronze", 0, 1, nominal=30, effective=30, limit=100, lending=5),
    ),
    public=0,
)
REQUEST = Request("r1", 0.0, "gold", "acme", 1000, 11, tuple(bytes([n]) for n in range(10)))
IN_TIME = Served(REQUEST, 0.1, first_token_at=0.5, ended_at=1.0, output_tokens=11, admitted_at=0.2)


def causes(*served: Served) -> list[Missed]:
    return list(missed(served, PROMISES, QUOTAS, BLOCK, CAPACITY))


def late(sent_at: float, admitted_at: float, first_token_at: float, **changes: object) -> Served:
    return replace(
        IN_TIME, sent_at=sent_at, admitted_at=admitted_at, first_token_at=first_token_at, ended_at=first_token_at + 0.5,
        **changes,  # type: ignore[arg-type]  # fields of Served
    )  # fmt: skip


@pytest.mark.parametrize(
    ("served", "cause", "tier", "field"),
    [
        pytest.param(late(1.5, 1.6, 2.0), Cause.SHARE, "gold", ("weight",), id="the queue"),
        pytest.param(late(1.5, 1.6, 2.0, held=1.2), Cause.WINDOW, "gold", ("batchingWindow",), id="a hold"),
        pytest.param(
            late(0.1, 1.6, 2.0, waited_for=WaitReason.LIMIT), Cause.LIMIT, "gold", ("quota", "borrowingLimitPercent"),
            id="the limit",
        ),
        pytest.param(
            late(0.1, 1.6, 2.0, waited_for=WaitReason.LENDING), Cause.LENDING, "bronze",
            ("quota", "lendingLimitPercent"), id="what another tier keeps",
        ),
        pytest.param(
            late(0.1, 1.6, 2.0, waited_for=WaitReason.ROOM), Cause.ROOM, "gold", ("quota", "nominalPercent"),
            id="blocks",
        ),
        pytest.param(late(0.1, 1.6, 2.0), Cause.ENGINE, "gold", None, id="prompts ahead of it"),
        pytest.param(late(0.1, 0.2, 2.0), Cause.PROMPT, "gold", ("sla", "timeToFirstToken"), id="its own prompt"),
        pytest.param(replace(IN_TIME, ended_at=9.0), Cause.PACE, "gold", ("sla", "timePerOutputToken"), id="pace"),
        pytest.param(
            replace(IN_TIME, first_token_at=None, refused=True), Cause.LIMIT_REFUSES, "gold",
            ("quota", "borrowingLimitPercent"), id="too large for its tier",
        ),
    ],
)  # fmt: skip
def test_is_where_most_of_the_time_went(served: Served, cause: Cause, tier: str, field: tuple[str, ...] | None) -> None:
    (found,) = causes(served)
    assert (found.tier, found.requests) == ("gold", 1)
    assert (found.reason.cause, found.reason.tier, found.reason.field) == (cause, tier, field)


def test_a_prompt_that_an_endless_cache_would_have_had_was_evicted() -> None:
    (found,) = causes(IN_TIME, late(0.1, 0.2, 2.0))
    assert found.reason.cause is Cause.EVICTED
    assert found.reason.field == ("quota", "nominalPercent")


def test_where_the_others_keep_more_than_the_tiers_limit_they_are_what_refuses() -> None:
    quotas = replace(QUOTAS, tiers=(QUOTAS.tiers[0], replace(QUOTAS.tiers[1], nominal=60, lending=0)))
    served = replace(IN_TIME, first_token_at=None, refused=True)
    (found,) = missed([served], PROMISES, quotas, BLOCK, CAPACITY - 10)
    assert (found.reason.cause, found.reason.tier) == (Cause.LENDING_REFUSES, "bronze")


def test_what_was_kept_or_never_promised_has_no_cause() -> None:
    bronze = replace(REQUEST, tier="bronze")
    assert causes(IN_TIME, replace(late(5.0, 6.0, 9.0), request=bronze)) == []


def test_causes_are_counted_the_most_frequent_first() -> None:
    found = causes(late(0.1, 1.6, 2.0), late(1.5, 1.6, 2.0), late(2.5, 2.6, 3.0))
    assert [(each.reason.cause, each.requests, each.seconds) for each in found] == [
        (Cause.SHARE, 2, 2.5),
        (Cause.ENGINE, 1, 1.5),
    ]


# -- the command ------------------------------------------------------------------------------------------------------

POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  model: {name: tiny, source: "file:///models/tiny"}
  engine: {type: Torch}
  tiers:
  - name: gold
    priority: 10
    quota: {nominalPercent: 50, borrowingLimitPercent: 0}
    sla: {timeToFirstToken: 200ms}
  defaultTier: gold
  identity: {type: Open}
"""


def explain(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pool.yaml").write_text(POOL)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "pool.yaml"


def test_the_command_names_the_line_of_the_file(pool: Path) -> None:
    code, said = explain("--trace", "@templated", "-f", "pool.yaml", "--capacity", "24k", "--until", "30")
    assert code == 0, said
    assert "pool.yaml:10 quota.borrowingLimitPercent: 0" in said
    assert "its tier held all blocks that it may" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("--trace", "@templated"), 2, "--trace needs the pool's file and its cache", id="no pool"),
        pytest.param(
            ("--trace", "gone.jsonl", "-f", "pool.yaml", "--capacity", "1M"), 1, "gone.jsonl: there is no such file",
            id="no trace",
        ),
    ],
)  # fmt: skip
def test_the_command_says_what_it_lacks(pool: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, output = explain(*arguments)
    assert found == code
    assert said in output
