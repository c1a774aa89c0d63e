"""What is remembered of the replicas between two looks: recent reuse counts, and recent hits. Pure.

Recent means faded: what was counted half a minute ago weighs four fifths of what is counted now, so that a curve
follows the traffic within a few minutes and still has enough to go by. Counters that started anew are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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

    @property
    def ratio(self) -> float | None:
        return self.hits / self.queries if self.queries > 0 else None

    def plus(self, other: HitCount, factor: float = 1.0) -> HitCount:
        return HitCount(self.hits * factor + other.hits, self.queries * factor + other.queries)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """One tier on one replica."""

    last: TierReading
    recent: ReuseCounts | None = None  # None: nothing to compare the first counters with


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    at: float
    capacity: int
    tiers: Mapping[str, TierMemory]


@dataclass(frozen=True, slots=True)
class Memory:
    replicas: Mapping[str, ReplicaMemory] = field(default_factory=dict)
    recent_hits: Mapping[str, HitCount] = field(default_factory=dict)  # by tier, faded
    all_hits: Mapping[str, HitCount] = field(default_factory=dict)  # by tier, since we look

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
    seen: dict[str, HitCount] = {}
    elapsed = 0.0
    for reading in readings.replicas:
        before = memory.replicas.get(reading.name)
        if before is not None and reading.at <= before.at:
            replicas[reading.name] = before
            continue
        if before is not None:
            elapsed = max(elapsed, reading.at - before.at)
            for name in tiers & reading.tiers.keys() & before.tiers.keys():
                seen[name] = seen.get(name, HitCount()).plus(_hits_since(before.tiers[name].last, reading.tiers[name]))
        replicas[reading.name] = _replica(before, reading, tiers)
    fading = FADING ** (elapsed / FADING_SECONDS)
    return Memory(
        replicas,
        {name: memory.recent_hits.get(name, HitCount()).plus(seen.get(name, HitCount()), fading) for name in tiers},
        {name: memory.all_hits.get(name, HitCount()).plus(seen.get(name, HitCount())) for name in tiers},
    )


def _replica(before: ReplicaMemory | None, reading: ReplicaReading, tiers: frozenset[str]) -> ReplicaMemory:
    known: Mapping[str, TierMemory] = {} if before is None else before.tiers
    fading = 1.0 if before is None else FADING ** ((reading.at - before.at) / FADING_SECONDS)
    return ReplicaMemory(
        reading.at,
        reading.capacity,
        {name: _tier(known.get(name), tier, fading) for name, tier in reading.tiers.items() if name in tiers},
    )


def _tier(before: TierMemory | None, reading: TierReading, fading: float) -> TierMemory:
    if before is None or before.last.reuse is None or reading.reuse is None:
        return TierMemory(reading, None if before is None else before.recent)
    counted = reading.reuse.since(before.last.reuse)
    return TierMemory(reading, counted if before.recent is None else before.recent.faded(fading).plus(counted))


def _hits_since(before: TierReading, now: TierReading) -> HitCount:
    if now.query_tokens < before.query_tokens or now.hit_tokens < before.hit_tokens:  # the engine started anew
        return HitCount(now.hit_tokens, now.query_tokens)
    return HitCount(now.hit_tokens - before.hit_tokens, now.query_tokens - before.query_tokens)
