"""vLLM's requests as the block pool knows them: keys, tables and what each has of them.

Here the two worlds meet without importing vLLM: a request of vLLM is read through `EngineRequest`, its blocks are
numbers. Who is charged and who gives way is decided by the pool; carrying it out in vLLM is `scheduler.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from cacheaware_engine.blocks import (
    ROOT,
    Admission,
    Admitted,
    BlockId,
    BlockKey,
    BlockPool,
    Ended,
    Growth,
    Request,
    Stage,
    Waiting,
    WaitReason,
    next_key,
)

DEFAULT_TIER = "default"
"""Whom a request without a tier is charged to. No tier of a pool can have this name, so quotas refuse such requests."""

REFUSALS_OF_A_TIER = 4  # in one step: then its other waiters need not be asked about
_KEY_BYTES = len(ROOT)


class EngineRequest(Protocol):
    """What the accounts read of a request of vLLM."""

    request_id: str
    block_hashes: list[bytes]
    max_tokens: int
    num_prompt_tokens: int
    skip_reading_prefix_cache: bool
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    sampling_params: Any
    all_token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int: ...


@dataclass(eq=False, slots=True)
class Record:
    """One request in both worlds."""

    request: Any  # vLLM's, an EngineRequest
    account: Request  # the pool's
    keys: list[BlockKey] = field(default_factory=list)  # of its full blocks so far
    public: frozenset[BlockKey] = frozenset()  # the public keys that `keys` were made with
    taken: int = 0  # leading blocks of its table that vLLM has been given
    hits: int = 0  # of these, blocks that were there when it was admitted
    equals: list[BlockId] = field(default_factory=list)  # blocks it holds because what it computed was there already
    copies: dict[int, BlockId] = field(default_factory=dict)  # by index: what vLLM has where the table has an equal one
    wants_preemption: bool = False  # it was told to wait because others would have to give way
    ending: bool = False  # no block will come: it ends with the tokens that are under way

    @property
    def table(self) -> list[BlockId]:
        return self.account.tables[0]

    @property
    def running(self) -> bool:
        return self.account.stage is Stage.RUNNING

    def lost_blocks(self) -> None:
        self.taken = self.hits = 0
        self.equals, self.copies = [], {}


class Accounts:
    """The records of all requests, on one block pool."""

    def __init__(
        self,
        capacity: int,
        block_size: int,
        max_sequences: int,
        *,
        max_model_len: int,
        bytes_per_token: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(
            capacity, block_size, max_sequences, bytes_per_token=bytes_per_token, clock=clock, adjacent=False
        )  # fmt: skip
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._records: dict[str, Record] = {}
        self._refusals: dict[str, int] = {}  # by tier, in this step
        self._barred: set[str] = set()  # requests that are not offered room in this step

    def of(self, request_id: str) -> Record | None:
        return self._records.get(request_id)

    def records(self) -> Iterable[Record]:
        return self._records.values()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    # -- a request's life ---------------------------------------------------------------------------------------------

    def arrive(self, request: EngineRequest) -> Record:
        """From now on it waits. Raises `UnknownTier` or `NeverFits`; then it is not known here."""
        most = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        blocks = self.blocks_for(request.num_tokens)
        account = Request(
            id=request.request_id,
            tier=tier_of(request),
            sequences=1,
            keys=[[]],
            blocks=[blocks],
            max_blocks=max(blocks, self.blocks_for(most)),
            prompt_blocks=0,
            # A request that may not read the cache is neither a hit nor a miss.
            prompt_tokens=0 if request.skip_reading_prefix_cache else request.num_prompt_tokens,
        )
        record = Record(request, account)
        account.keys = [self._hittable(record)]
        self.pool.submit(account)
        self._records[request.request_id] = record
        return record

    def finish(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            self.pool.release(record.account)

    def lost(self, record: Record) -> None:
        """vLLM has taken its blocks away: the pool said so, or vLLM did by itself."""
        record.lost_blocks()
        self._barred.add(record.account.id)  # not to come back in the step in which it left
        if record.running:
            self.pool.preempt(record.account)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        self._refusals.clear()
        self._barred.clear()

    def offer(self, record: Record, *, preempt: bool = False, idle: bool = False) -> Admission:
        """Room for a waiter, if the rules let it have some."""
        account = record.account
        account.blocks = [self.blocks_for(record.request.num_tokens)]
        account.max_blocks = max(account.max_blocks, account.blocks[0])
        account.keys = [self._hittable(record)]
        answer = self.pool.admit(account, idle=idle, preempt=preempt)
        if isinstance(answer, Admitted):
            record.hits = answer.hit_blocks[0]
            record.taken = 0
        else:
            self._refusals[account.tier] = self._refusals.get(account.tier, 0) + 1
        record.wants_preemption = isinstance(answer, Waiting) and answer.reason is WaitReason.PREEMPTION
        return answer

    def in_turn(self, record: Record) -> list[Record]:
        """Whom to offer room now that it is this waiter's turn in vLLM: the oldest of its tier first.

        A tier whose oldest waiter got nothing may have a smaller one that is entitled; a few are looked at.
        """
        tier = record.account.tier
        if record.account.id in self._barred or self._refusals.get(tier, 0) >= REFUSALS_OF_A_TIER:
            return []
        if tier in self._refusals:
            return [record]
        oldest = next(each for each in self.pool.waiting if each.tier == tier)
        if oldest is record.account or oldest.id in self._barred:
            return [record]
        return [self._records[oldest.id], record]

    def reclaimers(self) -> list[Record]:
        """Waiters for whom others may have to give way before the step begins."""
        no_slot = self.pool.free_slots == 0
        waiters = [self._records[account.id] for account in self.pool.under_nominal]
        return [record for record in waiters if no_slot or record.wants_preemption]

    # -- running ------------------------------------------------------------------------------------------------------

    def grow(self, record: Record) -> Growth:
        return self.pool.grow(record.account, 0)

    def take(self, record: Record, count: int) -> list[BlockId]:
        """The next blocks of its table, for vLLM to use."""
        ids = record.table[record.taken : record.taken + count]
        assert len(ids) == count, f"{record.account.id}: {count} blocks wanted, {len(ids)} left of its table"
        record.taken += count
        return ids

    def fill(self, record: Record, first: int, end: int) -> list[BlockId]:
        """Blocks first … end-1 are computed. Returns blocks that the request now holds besides: equal ones."""
        keys = self._keys(record)
        equals = []
        for index in range(first, end):
            own = record.table[index]
            found = self.pool.fill(record.account, 0, index, keys[index], movable=False)
            if found != own:
                equals.append(found)
                record.equals.append(found)
                record.copies[index] = own
        return equals

    def physical(self, record: Record) -> list[BlockId]:
        """The blocks that vLLM has for it, in order."""
        return [record.copies.get(index, block) for index, block in enumerate(record.table[: record.taken])]

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _hittable(self, record: Record) -> list[BlockKey]:
        """Keys that it may hit: one token at least is left to compute."""
        if record.request.skip_reading_prefix_cache:
            return []
        return self._keys(record)[: (record.request.num_tokens - 1) // self._block_size]

    def _keys(self, record: Record) -> list[BlockKey]:
        """What vLLM hashes (tokens, salt, adapter, images), chained anew behind public blocks, which have no salt."""
        if record.public is not self.pool.public_keys and not record.running:
            record.public, record.keys = self.pool.public_keys, []
        keys, request = record.keys, record.request
        may_be_public = bool(record.public) and _is_plain(request)
        for index in range(len(keys), len(request.block_hashes)):
            parent = keys[-1] if keys else ROOT
            key = None
            if may_be_public and (parent == ROOT or parent in record.public):
                start = index * self._block_size
                key = next_key(parent, request.all_token_ids[start : start + self._block_size], b"", record.public)
            if key is None or key not in record.public:
                key = blake2b(parent + request.block_hashes[index], digest_size=_KEY_BYTES, person=b"vllm").digest()
            keys.append(key)
        return keys


def tier_of(request: EngineRequest) -> str:
    """The tier that the sidecar wrote into `vllm_xargs`, which arrive as extra arguments of sampling."""
    arguments: Mapping[str, Any] | None = getattr(request.sampling_params, "extra_args", None)
    tier = (arguments or {}).get("cacheaware_tier")
    return tier if isinstance(tier, str) and tier else DEFAULT_TIER


def _is_plain(request: EngineRequest) -> bool:
    """Nothing but tokens decides its KV, so a public prefix of the same tokens is the same."""
    return request.lora_request is None and not request.mm_features and request.prompt_embeds is None


__all__ = ["DEFAULT_TIER", "Accounts", "Ended", "EngineRequest", "Record", "tier_of"]
