"""A pool's status for people: tiers against their quotas, conditions, parts. Rendering only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cacheaware.pool_status import condition
from cacheaware.state_file import State
from cacheaware_api.conditions import ConditionType
from cacheaware_api.status import CacheAwarePoolStatus, LastRebalance

_NOTHING = "-"


def render(pool: str, status: CacheAwarePoolStatus, state: State | None = None) -> Iterator[RenderableType]:
    """`pool` is its namespace and name; `state` tells of the processes of a pool on this machine."""
    yield _summary(pool, status)
    yield ""
    yield _tiers(status)
    yield ""
    if status.last_rebalance is not None:
        yield _moves(status.last_rebalance)
        yield ""
    yield _conditions(status)
    if state is not None:
        yield ""
        yield _parts(state)


def _summary(pool: str, status: CacheAwarePoolStatus) -> Text:
    ready = condition(status, ConditionType.READY)
    capacity = status.capacity
    if capacity is None:
        blocks = "capacity not known yet"
    else:
        span = f"{capacity.min_blocks}"
        if capacity.max_blocks != capacity.min_blocks:
            span += f" to {capacity.max_blocks}"
        blocks = f"{span} KV blocks of {capacity.block_size} tokens per replica"
    hits = "" if status.hit_percent is None else f", {status.hit_percent} % of prompt tokens from the cache"
    return Text(
        f"{pool}: Ready {ready}, "
        f"{status.ready_replicas} of {status.replicas} replicas, revision {status.revision}, {blocks}{hits}"
    )


def _tiers(status: CacheAwarePoolStatus) -> Table:
    table = _table("TIER", "NOMINAL", "EFFECTIVE", "HELD", "CACHED", "BORROWED", "LENT", "HIT", "TTFT P95", "SLA MET")
    for tier in status.tiers:
        table.add_row(
            tier.name,
            f"{tier.nominal_percent} %",
            f"{tier.effective_percent} %",
            *(_shown(each) for each in (tier.held_blocks, tier.cached_blocks, tier.borrowed_blocks, tier.lent_blocks)),
            _percent(tier.hit_percent),
            _shown(tier.time_to_first_token_p95),
            _percent(tier.attainment_percent),
        )
    return table


def _moves(last: LastRebalance) -> Table:
    table = _table("LAST MOVES OF QUOTA", "FROM", "TO", "PERCENT", "GAIN", "REASON")
    for move in last.moves:
        gain = _NOTHING if move.gain_percent is None else f"{move.gain_percent} %"
        table.add_row(last.time, move.from_, move.to, f"{move.percent} %", gain, move.reason)
    return table


def _conditions(status: CacheAwarePoolStatus) -> Table:
    table = _table("CONDITION", "STATUS", "REASON", "MESSAGE")
    for each in status.conditions:
        table.add_row(each.type, each.status, each.reason, each.message)
    return table


def _parts(state: State) -> Table:
    table = _table("REPLICA", "PART", "STATE", "RESTARTS", "PID", "URL", "LOG")
    urls = {address.name: address for address in state.replicas}
    for part in state.parts:
        address = urls.get(part.replica)
        url = None if address is None else {"engine": address.engine_url, "sidecar": address.url}.get(part.name)
        table.add_row(
            part.replica, part.name, part.state, str(part.restarts), _shown(part.pid), _shown(url), _shown(part.log)
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", min_width=len(heading))
    return table


def _shown(value: Any) -> str:
    return _NOTHING if value is None else str(value)


def _percent(value: int | None) -> str:
    return _NOTHING if value is None else f"{value} %"
