"""A comparison as tables for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cacheaware.replay.comparison import Comparison, Limits
from cacheaware.replay.measures import Percentiles, TierMeasures
from cacheaware.replay.simulation import Outcome
from cacheaware_operator.rebalance_values import Move

MOST_MOVES = 12  # shown; the JSON has all


def render(comparison: Comparison) -> RenderableType:
    parts: list[RenderableType] = [_summary(comparison), _tiers(comparison)]
    parts += [Text("\n".join(lines)) for outcome in comparison.outcomes if (lines := _moves(outcome))]
    return Group(*parts)


def _summary(comparison: Comparison) -> Table:
    limits = comparison.limits
    bound = limits.belady_hit_percent
    table = _table(f"All requests; {_capacity(comparison)}", "policy")
    for column in (
        "hit %",
        "of best",
        "prefill ×",
        "good req/s",
        "good tok/s",
        "SLA %",
        "TTFT p50",
        "p95",
        "p99",
        "yields",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in comparison.outcomes:
        every = outcome.everything
        table.add_row(
            outcome.policy,
            f"{every.hit_percent:.1f}",
            f"{100 * every.hit_percent / bound:.0f} %" if bound else "",
            f"{outcome.computed_tokens / limits.unique_tokens:.2f}" if limits.unique_tokens else "",
            f"{every.good_requests_per_second:.2f}",
            f"{every.good_tokens_per_second:.0f}",
            f"{every.attainment_percent:.1f}",
            *_seconds(every.time_to_first_token),
            str(outcome.preempted),
        )
    if bound is not None:
        table.add_row("belady", f"{bound:.1f}", "100 %", *[""] * 8)
    table.add_row("endless cache", f"{limits.infinite_hit_percent:.1f}", "", "1.00", *[""] * 7)
    return table


def _tiers(comparison: Comparison) -> Table:
    table = _table("By tier", "tier", "policy")
    for column in ("share %", "hit %", "good req/s", "SLA %", "TTFT p50", "p95", "p99", "held", "hold p95", "refused"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("let go because", overflow="fold")
    names = [tier.name for tier in comparison.setup.spec.tiers]
    for name in names:
        for outcome in comparison.outcomes:
            tier = outcome.tiers[name]
            table.add_row(
                name if outcome is comparison.outcomes[0] else "",
                outcome.policy,
                "" if outcome.effective is None else str(outcome.effective[name]),
                f"{tier.hit_percent:.1f}",
                f"{tier.good_requests_per_second:.2f}",
                f"{tier.attainment_percent:.1f}",
                *_seconds(tier.time_to_first_token),
                str(tier.held_requests) if tier.held is not None else "",
                f"{1000 * tier.held.p95:.0f} ms" if tier.held is not None else "",
                str(tier.refused),
                _reasons(tier),
                end_section=outcome is comparison.outcomes[-1],
            )
    return table


def _reasons(tier: TierMeasures) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in tier.flush_reasons.items())


def _moves(outcome: Outcome) -> list[str]:
    moves = [(each.at, move) for each in outcome.rounds for move in each.moves]
    if not outcome.rounds:
        return []
    lines = [f"{outcome.policy}: {len(moves)} moves of quota in {len(outcome.rounds)} rounds"]
    lines += [f"  {at:7.0f} s  {_in_words(move)}" for at, move in moves[:MOST_MOVES]]
    if len(moves) > MOST_MOVES:
        lines.append(f"  … and {len(moves) - MOST_MOVES} more")
    return [*lines, ""]


def _in_words(move: Move) -> str:
    return f"{move.percent} % from {move.from_} to {move.to}: {move.reason} ({move.why})"


def _capacity(comparison: Comparison) -> str:
    setup = comparison.setup
    return f"{setup.capacity} blocks of {setup.block_size} tokens"


def _seconds(found: Percentiles | None) -> Sequence[str]:
    return [""] * 3 if found is None else [_duration(value) for value in (found.p50, found.p95, found.p99)]


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_json(comparison: Comparison, described: dict[str, Any]) -> dict[str, Any]:
    """`described` is what the caller knows of the inputs."""
    setup = comparison.setup
    return described | {
        "capacityBlocks": setup.capacity,
        "blockSize": setup.block_size,
        "engine": dataclasses.asdict(setup.cost),
        "limits": _limits(comparison.limits),
        "bestStaticShares": None if comparison.best_shares is None else dict(comparison.best_shares),
        "policies": [_outcome(outcome, comparison.limits) for outcome in comparison.outcomes],
    }


def _limits(limits: Limits) -> dict[str, Any]:
    return {
        "promptTokens": limits.prompt_tokens,
        "uniqueTokens": limits.unique_tokens,
        "infiniteHitPercent": limits.infinite_hit_percent,
        "beladyHitPercent": limits.belady_hit_percent,
        "beladyHitTokens": None if limits.belady_hits is None else dict(limits.belady_hits),
    }


def _outcome(outcome: Outcome, limits: Limits) -> dict[str, Any]:
    return {
        "policy": str(outcome.policy),
        "seconds": outcome.seconds,
        "prefillAmplification": outcome.computed_tokens / limits.unique_tokens if limits.unique_tokens else None,
        "preempted": outcome.preempted,
        "effectivePercent": None if outcome.effective is None else dict(outcome.effective),
        "all": _measures(outcome.everything),
        "tiers": {name: _measures(tier) for name, tier in outcome.tiers.items()},
        "rounds": [
            {
                "at": each.at,
                "effectivePercent": dict(each.effective),
                "skipped": None if each.skipped is None else str(each.skipped),
                "moves": [dataclasses.asdict(move) for move in each.moves],
            }
            for each in outcome.rounds
        ],
        "usage": [{"at": each.at, "blocks": dict(each.blocks)} for each in outcome.usage],
    }


def _measures(tier: TierMeasures) -> dict[str, Any]:
    return {
        "requests": tier.requests,
        "refused": tier.refused,
        "promptTokens": tier.prompt_tokens,
        "hitTokens": tier.hit_tokens,
        "hitPercent": tier.hit_percent,
        "outputTokens": tier.output_tokens,
        "attainmentPercent": tier.attainment_percent,
        "goodRequestsPerSecond": tier.good_requests_per_second,
        "goodTokensPerSecond": tier.good_tokens_per_second,
        "timeToFirstToken": _percentiles(tier.time_to_first_token),
        "timePerOutputToken": _percentiles(tier.time_per_output_token),
        "holdSeconds": _percentiles(tier.held),
        "heldRequests": tier.held_requests,
        "flushReasons": dict(tier.flush_reasons),
    }


def _percentiles(found: Percentiles | None) -> dict[str, float] | None:
    return None if found is None else dataclasses.asdict(found)
