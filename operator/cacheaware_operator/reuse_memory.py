"""What is remembered of the replicas between two looks: recent reuse counts, and recent hits. Pure.

Recent means faded: what was counted half a minute ago weighs four fifths of what is counted now, so that a curve
follows the traffic within a few minutes and still has enough to go by. Counters that started anew are noticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cacheaware_operator.readings import Readings, ReplicaReading, TierReading
from cacheaware_operator.reuse_curves import ReuseCounts, hits

FADING = 0.8
FADING_SECONDS = 30.0
PERCENT = range(101)


@dataclass(frozen=True, slots=True)
class HitCount:
    """Tokens of prompts, and those of them that were cached."""

    hits: float = 0.0
    queries: float = 0.0

    def faded(self, factor: float) -> HitCount:
        return HitCount(self.hits * factor, self.queries * factor)

    def plus(self, other: HitCount) -> HitCount:
        return HitCount(self.hits + other.hits, self.queries + other.queries)

    def less(self, other: HitCount) -> HitCount:
        return HitCount(self.hits - other.hits, self.queries - other.queries)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """One tier on one replica."""

    last: TierReading
    recent: ReuseCounts | None = None  # None: nothing to compare the first counters with
    recent_hits: HitCount = HitCount()


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    at: float
    capacity: int
    tiers: Mapping[str, TierMemory]


@dataclass(frozen=True, slots=True)
class Memory:
    replicas: Mapping[str, ReplicaMemory] = field(default_factory=dict)

    def references(self, tier: str) -> float:
        """Block references of late, over all replicas."""
        return sum(counts.references for _, counts in self._recent(tier))

    def hits(self, tier: str) -> list[float]:
        """References that the tier would hit with 0, 1, … 100 percent of every replica's cache."""
        table = [0.0] * len(PERCENT)
        for capacity, counts in self._recent(tier):
            sizes = [capacity * percent / 100 for percent in PERCENT]
            table = [sum_ + more for sum_, more in zip(table, hits(counts, sizes), strict=True)]
        return table

    def hit_ratio(self, tier: str) -> float | None:
        """The part of prompt tokens that was cached, as the engines counted it; None without requests."""
        counts = [replica.tiers[tier].recent_hits for replica in self.replicas.values() if tier in replica.tiers]
        queries = sum(count.queries for count in counts)
        return sum(count.hits for count in counts) / queries if queries >= 1 else None

    def since(self, earlier: Memory) -> Memory:
        """What was counted after `earlier`, and nothing that it had already, faded as it has since."""
        return Memory(
            {
                name: _replica_since(replica, earlier.replicas[name]) if name in earlier.replicas else replica
                for name, replica in self.replicas.items()
            }
        )

    def prefill_seconds_per_block(self, tier: str) -> float | None:
        """A replica counts by the references that it saw."""
        known = [
            (memory.recent.references, memory.last.prefill_seconds_per_block)
            for replica in self.replicas.values()
            if (memory := replica.tiers.get(tier)) is not None
            and memory.recent is not None
            and memory.last.prefill_seconds_per_block is not None
        ]
        weight = sum(references for references, _ in known)
        return sum(references * pace for references, pace in known) / weight if weight > 0 else None

    def _recent(self, tier: str) -> Iterator[tuple[int, ReuseCounts]]:
        for replica in self.replicas.values():
            memory = replica.tiers.get(tier)
            if memory is not None and memory.recent is not None:
                yield replica.capacity, memory.recent


def remembered(memory: Memory, readings: Readings, tiers: frozenset[str]) -> Memory:
    """The memory after these readings; replicas and tiers that are gone are forgotten. An old reading adds nothing."""
    replicas = {name: memory.replicas[name] for name in readings.ready if name in memory.replicas}
    for reading in readings.replicas:
        before = memory.replicas.get(reading.name)
        if before is None or reading.at > before.at:
            replicas[reading.name] = _replica(before, reading, tiers)
    return Memory(replicas)


def _fading(seconds: float) -> float:
    return math.pow(FADING, seconds / FADING_SECONDS)


def _replica(before: ReplicaMemory | None, reading: ReplicaReading, tiers: frozenset[str]) -> ReplicaMemory:
    known: Mapping[str, TierMemory] = {} if before is None else before.tiers
    fading = 1.0 if before is None else _fading(reading.at - before.at)
    return ReplicaMemory(
        reading.at,
        reading.capacity,
        {name: _tier(known.get(name), tier, fading) for name, tier in reading.tiers.items() if name in tiers},
    )


def _tier(before: TierMemory | None, reading: TierReading, fading: float) -> TierMemory:
    if before is None:
        return TierMemory(reading)
    hit_count = before.recent_hits.faded(fading).plus(_hits_since(before.last, reading))
    if before.last.reuse is None or reading.reuse is None:
        return TierMemory(reading, before.recent, hit_count)
    counted = reading.reuse.since(before.last.reuse)
    recent = counted if before.recent is None else before.recent.faded(fading).plus(counted)
    return TierMemory(reading, recent, hit_count)


def _hits_since(before: TierReading, now: TierReading) -> HitCount:
    if now.query_tokens < before.query_tokens or now.hit_tokens < before.hit_tokens:  # the engine started anew
        return HitCount(now.hit_tokens, now.query_tokens)
    return HitCount(now.hit_tokens - before.hit_tokens, now.query_tokens - before.query_tokens)


def _replica_since(replica: ReplicaMemory, earlier: ReplicaMemory) -> ReplicaMemory:
    fading = _fading(replica.at - earlier.at)
    return replace(
        replica,
        tiers={
            name: _tier_since(tier, earlier.tiers[name], fading) if name in earlier.tiers else tier
            for name, tier in replica.tiers.items()
        },
    )


def _tier_since(tier: TierMemory, earlier: TierMemory, fading: float) -> TierMemory:
    recent = tier.recent
    if recent is not None and earlier.recent is not None:
        recent = recent.since(earlier.recent.faded(fading))
    return replace(tier, recent=recent, recent_hits=tier.recent_hits.less(earlier.recent_hits.faded(fading)))
