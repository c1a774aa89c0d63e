"""What the rebalancer knows of a pool at one moment: each replica's figures, each with the time it was read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheaware_api import wire
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.metrics_page import PageUnreadable, TierPage, read_page
from cacheaware_operator.reuse_curves import ReuseCounts


@dataclass(frozen=True, slots=True)
class TierReading:
    """Counters are cumulative, since the sidecar or its engine started."""

    reuse: ReuseCounts | None = None
    prefill_seconds_per_block: float | None = None
    held_blocks: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    requests: int = 0  # in the last five minutes, as is the percentile
    time_to_first_token_p95: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    name: str
    at: float  # when it was read; seconds of the clock that the rebalancer is told the time by
    capacity: int  # blocks
    applied: wire.Revision | None  # acknowledged by the engine
    tiers: Mapping[str, TierReading]


@dataclass(frozen=True, slots=True)
class Readings:
    """`replicas` has the readings that there are; a replica that is ready and has none keeps everything where it is."""

    view: wire.View | None = None  # the view last handed out
    ready: tuple[str, ...] = ()  # names
    replicas: tuple[ReplicaReading, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)  # by replica: why there is no reading

    @property
    def effective(self) -> dict[str, int]:
        """The shares that were last handed out."""
        return {} if self.view is None else {tier.name: tier.effective_percent for tier in self.view.tiers}

    @property
    def acknowledged(self) -> bool:
        """The engine of every ready replica has applied the view last handed out."""
        if self.view is None:
            return False
        applied = {reading.name: reading.applied for reading in self.replicas}
        return all(applied.get(name) == self.view.revision for name in self.ready)


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page of one sidecar, and when it came."""

    text: str
    at: float


def readings_of(snapshot: Snapshot, pages: Mapping[str, Page]) -> Readings:
    """From what the fleet shows, and the pages that were scraped of it, by replica. An old page is an old reading."""
    replicas: list[ReplicaReading] = []
    problems: dict[str, str] = {}
    for replica in snapshot.replicas:
        page = pages.get(replica.name)
        try:
            tiers = {} if page is None else read_page(page.text)
        except PageUnreadable as error:
            problems[replica.name] = str(error)
            continue
        if page is None or replica.status is None:
            problems[replica.name] = "the sidecar does not answer"
        elif replica.status.ledger is None:
            problems[replica.name] = "its engine has not told its accounts"
        else:
            replicas.append(_reading(replica, replica.status, replica.status.ledger, tiers, page.at))
    ready = tuple(replica.name for replica in snapshot.replicas if replica.ready)
    return Readings(snapshot.view, ready, tuple(replicas), problems)


def _reading(
    replica: ReplicaSnapshot,
    status: wire.PoolStatus,
    ledger: wire.Ledger,
    pages: Mapping[str, TierPage],
    at: float,
) -> ReplicaReading:
    tiers: dict[str, TierReading] = {}
    for name, account in ledger.tiers.items():
        page = pages.get(name, TierPage())
        figures = status.tiers.get(name)
        tiers[name] = TierReading(
            reuse=page.reuse,
            prefill_seconds_per_block=page.prefill_seconds_per_block,
            held_blocks=account.held,
            hit_tokens=account.hit_tokens_total,
            query_tokens=account.query_tokens_total,
            requests=0 if figures is None else figures.requests,
            time_to_first_token_p95=None if figures is None else figures.time_to_first_token_p95,
        )
    return ReplicaReading(replica.name, at, ledger.capacity, status.applied, tiers)
