"""How many KV blocks the admitted requests hold, by estimate, and who may have more of them. Pure.

In front of an engine that keeps no account of tiers this bounds what each tier has inside it. A chunk of a prompt that
several admitted requests start with is counted once, as an engine with prefix caching holds it once: it is charged to
the tier that brought it, until the last of them leaves. Idle cached blocks are nobody's here; the engine drops them as
it needs, so they are never in the way.

What an estimate can keep of the rules of quota: limits, lending, and that a request within its tier's nominal goes at
once. What it cannot: to take back what a running request holds. Where others have borrowed, the engine makes an
entitled request wait until one of them ends, or preempts by priority.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum

from cacheaware_api import wire


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What one request will hold, in tokens, by estimate."""

    prompt: int
    output: int  # of one sequence
    sequences: int = 1
    chunks: tuple[bytes, ...] = ()  # of the prefix key: what it may share with others
    chunk_tokens: int = 0

    @property
    def tail(self) -> int:
        """Tokens of the prompt after its last full chunk."""
        return max(0, self.prompt - len(self.chunks) * self.chunk_tokens)


class Fit(StrEnum):
    """How a request stands to its tier's quota now."""

    ENTITLED = "entitled"  # within nominal: it goes, whoever holds what
    BORROWS = "borrows"  # beyond nominal, and there is room that nobody is promised
    NO_ROOM = "no-room"  # beyond nominal, and there is none
    AT_LIMIT = "at-limit"


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """An engine's KV cache and its shares."""

    capacity: int
    block_size: int
    quotas: wire.Quotas

    def tier(self, name: str) -> wire.TierQuota:
        """A tier that was left out has nothing until it is drained."""
        known = next((tier for tier in self.quotas.tiers if tier.name == name), None)
        return known or wire.TierQuota(name, priority=0, weight=1, nominal=0, effective=0, limit=0, lending=0)

    def most(self, name: str) -> int:
        """Most blocks that a request of this tier can ever have: what others do not lend stays out of reach."""
        kept = sum(tier.nominal - tier.lending for tier in self.quotas.tiers if tier.name != name)
        return max(0, min(self.tier(name).limit, self.capacity - self.quotas.public - kept))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


@dataclasses.dataclass(slots=True)
class _Chunk:
    owner: str
    tokens: int
    holders: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    tier: str
    chunks: tuple[bytes, ...]
    private: int  # blocks


Admits = Callable[[str, Demand | None], bool]


class BlockBudget:
    """Until it is given a cache it bounds nothing, and counts nothing."""

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._requests: dict[str, _Held] = {}
        self._chunks: dict[bytes, _Chunk] = {}
        self._shared: dict[str, int] = {}  # tokens of chunks, by owner
        self._private: dict[str, int] = {}  # blocks, by tier
        self._unseen = 0
        self.caution = 1.0  # what an estimate of output is multiplied by

    @property
    def cache(self) -> Cache | None:
        return self._cache

    def set_cache(self, cache: Cache | None) -> None:
        """What is held stays held; only requests that come later have to fit. None: its size is not known."""
        if cache is None or (self._cache is not None and cache.block_size != self._cache.block_size):
            self._requests.clear()  # counted in other units; their release then does nothing
            self._chunks.clear()
            self._shared.clear()
            self._private.clear()
        self._cache = cache

    def measured(self, held: int | None) -> None:
        """The engine told how many blocks running requests hold in all. What the estimates miss of it counts as held
        by nobody in particular: it is not lent out.
        """
        self._unseen = 0 if held is None else max(0, held - sum(self.held().values()))

    # -- asking --------------------------------------------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """Blocks by tier; those of tiers that are gone and not drained yet too."""
        return {name: self.held_by(name) for name in self._shared.keys() | self._private.keys()}

    def held_by(self, tier: str) -> int:
        if self._cache is None:
            return 0
        return self._cache.blocks(self._shared.get(tier, 0)) + self._private.get(tier, 0)

    def whole(self, demand: Demand) -> int:
        """Blocks that a prompt needs if nothing of it is shared, and one to grow into; 0 while the size of a block is
        not known.
        """
        return 0 if self._cache is None else self._cache.blocks(max(1, demand.prompt)) + 1

    def fit(self, tier: str, demand: Demand) -> Fit:
        cache = self._cache
        if cache is None:
            return Fit.ENTITLED
        quota = cache.tier(tier)
        most = cache.most(tier)
        # An estimate refuses nobody: what seems too large for its tier goes when there is as much room as it can get.
        need = min(self._need(cache, tier, demand)[0], most)
        wanted = self.held_by(tier) + need
        if wanted > quota.limit or most == 0:
            return Fit.AT_LIMIT
        if wanted <= quota.nominal:
            return Fit.ENTITLED
        held = self.held()
        kept = {other.name: other.nominal - other.lending for other in cache.quotas.tiers}
        others = (held.keys() | kept.keys()) - {tier}
        taken = max(wanted, kept.get(tier, 0)) + sum(max(held.get(o, 0), kept.get(o, 0)) for o in others)
        # Where nothing runs, what nobody lends is no reason to wait: an idle cache never idles the engine.
        return Fit.BORROWS if taken + self._unseen <= cache.capacity or not self._requests else Fit.NO_ROOM

    def admission(self) -> Admits:
        """Who may go in this round. Once a request beyond nominal finds no room, no later one borrows either: it would
        be overtaken for ever by smaller ones.
        """
        shut = False

        def admits(tier: str, demand: Demand | None) -> bool:
            nonlocal shut
            if demand is None:
                return True
            match self.fit(tier, demand):
                case Fit.ENTITLED:
                    return True
                case Fit.BORROWS:
                    return not shut
                case Fit.NO_ROOM:
                    shut = True
            return False

        return admits

    # -- holding -------------------------------------------------------------------------------------------------------

    def hold(self, request_id: str, tier: str, demand: Demand) -> None:
        """The request goes to the engine now."""
        cache = self._cache
        if cache is None:
            return
        if request_id in self._requests:
            raise ValueError(f"request {request_id} holds blocks already")
        _, private = self._need(cache, tier, demand)
        for key in demand.chunks:
            chunk = self._chunks.get(key)
            if chunk is not None:
                chunk.holders += 1
                continue
            self._chunks[key] = _Chunk(tier, demand.chunk_tokens)
            _add(self._shared, tier, demand.chunk_tokens)
        _add(self._private, tier, private)
        self._requests[request_id] = _Held(tier, demand.chunks, private)

    def release(self, request_id: str) -> bool:
        """The request has left the engine. False if it holds nothing (any more)."""
        held = self._requests.pop(request_id, None)
        if held is None:
            return False
        for key in held.chunks:
            chunk = self._chunks[key]
            chunk.holders -= 1
            if not chunk.holders:
                del self._chunks[key]
                _add(self._shared, chunk.owner, -chunk.tokens)
        _add(self._private, held.tier, -held.private)
        return True

    def check_integrity(self) -> None:
        shared: dict[str, int] = {}
        for chunk in self._chunks.values():
            _add(shared, chunk.owner, chunk.tokens)
        assert shared == self._shared
        holders: dict[bytes, int] = {}
        private: dict[str, int] = {}
        for held in self._requests.values():
            _add(private, held.tier, held.private)
            for key in held.chunks:
                holders[key] = holders.get(key, 0) + 1
        assert private == self._private
        assert holders == {key: chunk.holders for key, chunk in self._chunks.items()}

    def _need(self, cache: Cache, tier: str, demand: Demand) -> tuple[int, int]:
        """Blocks that the tier would hold more of, and how many of them are the request's own. Output that could never
        fit is not waited for: such a request ends early, as it would in any engine.
        """
        before = self._shared.get(tier, 0)
        new = sum(key not in self._chunks for key in demand.chunks) * demand.chunk_tokens
        shared = cache.blocks(before + new) - cache.blocks(before)
        growing = cache.blocks(max(1, round(demand.output * self.caution)))
        private = cache.blocks(demand.tail) + growing * demand.sequences
        private = min(private, max(0, cache.most(tier) - cache.blocks(new)))
        return shared + private, private


def _add(account: dict[str, int], name: str, amount: int) -> None:
    left = account.get(name, 0) + amount
    if left:
        account[name] = left
    else:
        account.pop(name, None)
