"""The ledger of an engine that keeps none: what its tiers hold by the sidecar's own estimate. Pure.

It has the shape of an engine's, so that everybody reads one kind. Only held blocks, slots and hits are known; idle
cached blocks and what was evicted or preempted are not, and are 0 in it. Who shows a ledger leaves those out where
`enforcement` is EstimateOnly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cacheaware_api import quota, wire
from cacheaware_sidecar.block_budget import Cache
from cacheaware_sidecar.metering import Usage


@dataclasses.dataclass(frozen=True, slots=True)
class Hits:
    """Prompt tokens since the sidecar started, as the engine counted them."""

    hit: int = 0
    query: int = 0


class HitCounts:
    def __init__(self) -> None:
        self._tiers: dict[str, Hits] = {}

    def note(self, tier: str, usage: Usage) -> None:
        if usage.cached_tokens is not None:
            known = self.of(tier)
            self._tiers[tier] = Hits(known.hit + usage.cached_tokens, known.query + usage.prompt_tokens)

    def of(self, tier: str) -> Hits:
        return self._tiers.get(tier, Hits())


@dataclasses.dataclass(frozen=True, slots=True)
class Sequences:
    """How many the engine runs at once, and what of them each tier may always have."""

    most: int
    nominal: Mapping[str, int]


def sequences_of(cache: Cache, most: int) -> Sequences:
    """Raises `ValueError` where a tier with a nominal quota would get none."""
    nominal = {tier.name: tier.nominal for tier in cache.quotas.tiers}
    unassigned = cache.capacity - sum(nominal.values())  # the public share too: nobody runs in it
    return Sequences(most, quota.apportion_slots(most, nominal, unassigned))


def build_ledger(
    cache: Cache,
    held: Mapping[str, int],
    hits: HitCounts,
    sequences: Sequences,
    in_flight: Callable[[str], int],
    *,
    sequence: int,
    requests: int,
) -> wire.Ledger:
    """`held` is by tier, `in_flight` tells a tier's sequences in the engine. Estimates that exceed the cache are cut
    down in proportion: that much of what was admitted waits in the engine.
    """
    if sum(held.values()) > cache.capacity:
        held = quota.largest_remainder(cache.capacity, held)
    shares = {tier.name: tier for tier in cache.quotas.tiers}
    names = sorted(shares.keys() | held.keys(), key=lambda name: (-cache.tier(name).priority, name))
    used = {name: held.get(name, 0) for name in names}
    nominal = {name: cache.tier(name).nominal for name in names}
    public = cache.quotas.public
    lent = quota.lent_blocks(
        used, nominal, unassigned=cache.capacity - sum(nominal.values()) - public, public_idle=public
    )
    return wire.Ledger(
        sequence=sequence,
        revision=cache.quotas.revision,
        block_size=cache.block_size,
        bytes_per_token=None,
        capacity=cache.capacity,
        free=cache.capacity - sum(used.values()),
        public=wire.PublicLedger(share=public, held=0, cached=0, prefixes={}),
        tiers={
            name: wire.TierLedger(
                nominal=nominal[name],
                effective=cache.tier(name).effective,
                limit=cache.tier(name).limit,
                held=used[name],
                cached=0,
                lapsed=0,
                borrowed=quota.borrowed_blocks(used[name], nominal[name]),
                lent=lent[name],
                slots=wire.Slots(sequences.nominal.get(name, 0), in_flight(name)),
                evicted_total=0,
                reclaimed_total=0,
                preempted_total=0,
                hit_tokens_total=hits.of(name).hit,
                query_tokens_total=hits.of(name).query,
            )
            for name in names
        },
        running=requests,
        waiting=0,
        max_sequences=sequences.most,
    )
