"""The block pool: KV blocks of one engine, given to requests by the rules of quota.

Decisions are made elsewhere and carried out here: `admission` says whether a request may enter, `victims` who gives
way, `hits` who pays for a shared block, `quotas` which quotas are accepted; `books` keeps accounts, blocks and queues.
The pool knows no tokens, tensors or threads: one caller at a time, and the clock is read once in each call.

An admission is carried out as one change: if the room that the rules grant cannot be made after all (blocks that
running requests of other tiers share can stand in the way), everything is taken back and the request has changed
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cacheaware_api import wire

from . import quotas as rules
from .admission import Plan, Shape, lacks_slots, plan, shape, verdict
from .books import Books, number_of
from .errors import NeverFits, QuotaRefused, UnknownTier
from .hits import owner_after_hit
from .integrity import check
from .keys import BlockId, BlockKey
from .ledger import Figures, ledger_of
from .owners import Account, most_an_account_can_hold
from .requests import Admission, Admitted, Ended, Grown, Growth, Request, Stage, Waiting, WaitReason, Yielded
from .residents import Block
from .victims import Ask

HINTED_PART = 10  # hints set aside at most one block in so many


@dataclass(frozen=True, slots=True)
class Layout:
    """How the blocks of running sequences and the free ones lie."""

    sequences: int
    extents: int  # stretches of neighbouring blocks, over all sequences
    free: int
    longest_free: int
    set_aside: int
    unused_ratio: float = 0.0  # part of the held blocks' slots that hold no token yet


class BlockPool:
    """`capacity` blocks of `block_size` tokens, and at most `max_sequences` running sequences.

    `adjacent`: a sequence's blocks lie side by side where they can. An engine to which that means nothing does without:
    it costs a fifth of what accounting for a block does.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        max_sequences: int,
        *,
        bytes_per_token: int = 0,
        clock: Callable[[], float] = time.monotonic,
        adjacent: bool = True,
    ) -> None:
        for name, value in (("capacity", capacity), ("block_size", block_size), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.capacity = capacity
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.bytes_per_token = bytes_per_token
        self.sequence = 0  # grows with every change that the ledger shows
        self._clock = clock
        self._books = Books(capacity, max_sequences, adjacent=adjacent)
        self._quotas: wire.Quotas | None = None
        self._prefixes: dict[str, tuple[BlockKey, ...]] = {}
        self._arrivals = 0

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that wait, in arrival order."""
        return tuple(self._books.waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that run, in arrival order."""
        return tuple(self._books.running)

    @property
    def free_slots(self) -> int:
        """Sequences that could start without another giving way."""
        return self._books.free_slots()

    @property
    def held(self) -> int:
        """Blocks that running requests hold."""
        return sum(account.held for account in self._books.accounts)

    @property
    def under_nominal(self) -> Sequence[Request]:
        """The oldest waiter of each tier that holds less than its nominal: for whom others may have to give way."""
        tiers = self._books.tiers()
        return [account.waiting[0] for account in tiers if account.waiting and account.held < account.nominal]

    def is_resident(self, key: BlockKey) -> bool:
        """Whether a full block with this key is in the cache, held or not."""
        return key in self._books.residents.index

    @property
    def public_keys(self) -> frozenset[BlockKey]:
        """Keys of the public prefixes' blocks."""
        return self._books.public_keys

    @property
    def quotas(self) -> wire.Quotas | None:
        """The quotas in force; None: none were set, all tiers share one LRU."""
        return self._quotas

    def ledger(self) -> wire.Ledger:
        self._read_clock()
        return ledger_of(
            Figures(
                sequence=self.sequence,
                block_size=self.block_size,
                bytes_per_token=self.bytes_per_token,
                capacity=self.capacity,
                max_sequences=self.max_sequences,
                running=len(self._books.running),
                waiting=len(self._books.waiting),
            ),
            self._quotas,
            self._books.accounts,
            self._books.public,
            self._prefixes,
            self._books.residents,
        )

    def resident(self, keys: Sequence[BlockKey]) -> int:
        """How many of the leading blocks with these keys could be hit now."""
        return len(self._books.residents.path(keys))

    def check_integrity(self) -> None:
        """Works every account out anew and asserts that it is right. O(blocks)."""
        check(self._books)

    # -- quotas -------------------------------------------------------------------------------------------------------

    def set_quotas(self, quotas: wire.Quotas) -> None:
        """Put quotas in force. Raises `StaleRevision` or `QuotaRefused`; then nothing changed. O(blocks).

        Where a limit falls below what is used, cached blocks go at once and held ones when they are let go of. A public
        share that falls below its prefixes keeps what fits.
        """
        if not rules.check_revision(quotas, self._quotas):
            return
        rules.check_sums(quotas, self.capacity)
        slots = rules.slots(quotas, self.capacity, self.max_sequences)
        self._read_clock()
        for quota in quotas.tiers:
            self._books.account(quota.name).set_quota(quota, self.capacity, slots[quota.name])
        for account in self._books.tiers():
            if account.name not in slots:
                account.drain()
        self._books.public.set_share(quotas.public)
        self._quotas = quotas
        self._books.residents.reschedule(set(self._books.accounts))
        self._books.trim()
        self._books.forget_drained()
        self.sequence += 1

    def set_public(self, prefixes: Mapping[str, Sequence[BlockKey]]) -> None:
        """Which prefixes are public: the keys of their full blocks, by name. Raises `QuotaRefused` if they do not fit.

        Blocks of prefixes that are public no more go as soon as nobody holds them: nobody asks for their keys again.
        """
        keys = frozenset(key for prefix in prefixes.values() for key in prefix)
        if len(keys) > self._books.public.limit:
            raise QuotaRefused(
                f"prefixes: they need {len(keys)} blocks and the public share is {self._books.public.limit}; "
                f"raise publicPercent or shorten them"
            )
        self._read_clock()
        self._books.public_keys = keys
        self._prefixes = {name: tuple(prefix) for name, prefix in prefixes.items()}
        self._books.evict_retired(list(self._books.residents.blocks()))
        for prefix in self._prefixes.values():
            for block in self._books.residents.path(prefix):
                if block.owner is not self._books.public and self._books.public_has_room():
                    self._books.residents.charge(block, self._books.public, self._books.tier)
        self._books.trim()
        self.sequence += 1

    def set_hints(self, hints: wire.Hints) -> Mapping[str, int]:
        """Set blocks aside for groups that are expected to grow, at most a tenth of all; the blocks of each now.

        A hint replaces the group's last one; 0 blocks takes it back. Nobody is charged and nothing is evicted: it is
        an order of free blocks.
        """
        self._read_clock()
        free = self._books.residents.free_blocks
        for group, hint in hints.groups.items():
            others = sum(blocks for name, blocks in free.set_aside.items() if name != group)
            room = max(0, self.capacity // HINTED_PART - others)
            free.reserve(group, min(hint.expected_blocks, room), self._books.residents.now + hint.ttl_s)
        return free.set_aside

    def layout(self, tokens: int | None = None) -> Layout:
        """How blocks lie, if running sequences have computed so many tokens: for metrics. O(blocks held)."""
        tables = [table for request in self._books.running for table in request.tables if table]
        slots = sum(map(len, tables)) * self.block_size
        free = self._books.residents.free_blocks
        return Layout(
            sequences=len(tables),
            extents=sum(1 + sum(after != block + 1 for block, after in pairwise(table)) for table in tables),
            free=len(free),
            longest_free=free.longest,
            set_aside=sum(free.set_aside.values()),
            unused_ratio=1 - tokens / slots if tokens is not None and slots else 0.0,
        )

    # -- a request's life ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """From now on it waits. Raises `UnknownTier` or `NeverFits`; then nothing changed."""
        _check_shape(request)
        if request.stage is not Stage.NEW:
            raise ValueError(f"request {request.id} was submitted before")
        known = self._books.by_name.get(request.tier)
        if self._quotas is not None and (known is None or known.draining):
            raise UnknownTier(request.tier, (account.name for account in self._books.tiers() if not account.draining))
        account = known or self._books.open_account(request.tier)
        if request.sequences > self.max_sequences:
            raise NeverFits(
                f"n = {request.sequences} sequences, but the engine runs at most {self.max_sequences} at once; "
                f"ask for fewer"
            )
        if why := self._never_fits(request, shape(request), account):
            raise NeverFits(why)
        self._read_clock()
        self._books.account(request.tier)
        self._arrivals += 1
        request.number = self._arrivals
        self._books.enqueue(request)
        self.sequence += 1

    def admit(self, request: Request, *, idle: bool = False, preempt: bool = True) -> Admission:
        """Let a waiting request run with all its blocks, or say why not; then nothing changed. O(its blocks).

        `idle` is for an engine in which nothing runs and nothing else can be admitted: lending is set aside and any
        cached block may go. While something runs it means nothing. Without `preempt` a request for which others would
        have to give way waits for `PREEMPTION`: for a caller in the middle of a step.
        """
        if request.stage is not Stage.WAITING:
            raise ValueError(f"request {request.id} is {request.stage}, not waiting")
        _check_shape(request)
        self._read_clock()
        books, form = self._books, shape(request)
        tier = books.tier(request)
        if why := self._never_fits(request, form, tier):
            return Ended(why=why)
        if lacks_slots(len(form.live), tier, books.free_slots()):
            return Waiting(WaitReason.SLOTS)  # known before its blocks are looked up: most of a long queue
        idle = idle and not books.running
        change = plan(request, tier, books.residents, books.public, books.public_keys, books.tier)
        decision = verdict(
            change, request, tier, books.accounts, books.public, self.capacity,
            books.residents.free, books.free_slots(), idle=idle,
        )  # fmt: skip
        if decision.reason is not None:
            return Waiting(decision.reason)
        ask = Ask(
            tier, number_of(request), growth=False, entitled=decision.entitled, any_cached=idle, preempts=preempt
        )  # fmt: skip
        preempted: list[Request] = []
        books.residents.begin()
        try:
            tables = self._take_up(request, change, ask, preempted)
        except BaseException:
            books.residents.roll_back()
            raise
        if tables is None:
            books.residents.roll_back()
            return Waiting(WaitReason.ROOM if preempt else WaitReason.PREEMPTION)
        books.residents.commit()
        hits = change.hit_blocks(request)
        self._start(request, tier, self._laid_out(request, change, tables), hits)
        return Admitted(hits, preempted)

    def grow(self, request: Request, sequence: int) -> Growth:
        """One more block for a running sequence; where there is none the request yields, or the sequence ends."""
        table = self._table(request, sequence)
        if len(table) >= request.max_blocks:
            return Ended(why=f"it has the {request.max_blocks} blocks that it may ever have")
        self._read_clock()
        self.sequence += 1
        tier = self._books.tier(request)
        ask = Ask(tier, number_of(request), growth=True, entitled=True, any_cached=True)
        preempted: list[Request] = []
        if self._books.make_room(ask, preempted):
            block = self._books.residents.allocate(tier, len(table), request, 1, tier, after=table[-1])
            table.append(block.id)
            return Grown(block.id, preempted)
        at_limit = tier.used >= tier.limit
        if len(self._books.running) == 1:
            return Ended(why="nothing else runs and no block can be freed", preempted=preempted)
        if at_limit and all(other is request or self._books.tier(other) is not tier for other in self._books.running):
            return Ended(why=f"tier {tier.name} is at its limit of {tier.limit} blocks", preempted=preempted)
        self._books.preempt(request)
        return Yielded(preempted)

    def fill(
        self, request: Request, sequence: int, index: int, key: BlockKey, *, movable: bool = True
    ) -> BlockId:  # fmt: skip
        """Block `index` of the sequence is full and computed: from now on it can be hit. Returns what is in its place.

        Blocks are filled in order. If an equal block is resident, every sequence of the request that held this one is
        moved onto that: a hit as to who pays, not in the counters. Where the engine cannot move a running sequence
        (not `movable`) it holds both: the equal one, behind which what follows can be found, and its own as a copy.
        """
        table = self._table(request, sequence)
        block = self._books.residents.at(table[index])
        if block.key is not None:
            if block.key != key:
                raise ValueError(f"block {index} of request {request.id} was filled with another key")
            return block.id
        parent = self._books.residents.at(table[index - 1]) if index else None
        if parent is not None and parent.key is None:
            raise ValueError(f"block {index} of request {request.id} cannot be filled before block {index - 1}")
        equal = self._books.residents.index.get(key)
        if equal is not None and equal.parent is not parent:
            raise ValueError(f"the key of block {index} of request {request.id} does not follow from its parent's")
        self._read_clock()
        self.sequence += 1
        if equal is None:
            self._books.residents.name(block, key, parent)
            self._settle_filled(block, self._books.tier(request))
            return block.id
        self._move_onto(equal, block, request, index, keeps_copy=not movable)
        return equal.id

    def finish_sequence(self, request: Request, sequence: int) -> None:
        """A sequence ended before its siblings; with the last one the request ends. A second call does nothing."""
        if request.stage not in (Stage.WAITING, Stage.RUNNING) or sequence in request.finished:
            return
        if len(request.live) == 1:
            self.release(request)
            return
        self._read_clock()
        self._books.finish_sequence(request, sequence)
        self.sequence += 1

    def release(self, request: Request) -> None:
        """It finished or was aborted, waiting or running. A second call does nothing."""
        if request.stage not in (Stage.WAITING, Stage.RUNNING):
            return
        self._read_clock()
        self._books.remove(request)
        self._books.forget_drained()
        self.sequence += 1

    def preempt(self, request: Request) -> None:
        """The engine took a running request's blocks away by itself: it waits again, under its old number."""
        if request.stage is not Stage.RUNNING:
            raise ValueError(f"request {request.id} is {request.stage}, not running")
        self._read_clock()
        self._books.preempt(request)
        self.sequence += 1

    def evict_cached(self) -> None:
        """What nobody holds goes: the engine has forgotten what it computed."""
        self._read_clock()
        self._books.evict_idle()
        self._books.forget_drained()
        self.sequence += 1

    # -- carrying out an admission ------------------------------------------------------------------------------------

    def _take_up(
        self, request: Request, change: Plan, ask: Ask, preempted: list[Request]
    ) -> dict[int, list[Block]] | None:
        """Hold what is there and allocate the rest; None: some room could not be made."""
        residents, tier, form = self._books.residents, ask.account, change.shape
        for block, sequences in change.holds.items():
            residents.hold(block, request, sequences, tier)
        for block, owner in change.owners.items():
            if owner is self._books.public and not self._books.public_has_room():
                return None  # `plan` counted on it
            residents.charge(block, owner, self._books.tier)
        while self._books.free_slots() < len(form.live):
            if not ask.preempts or not self._books.free_a_slot(tier, preempted):
                return None
        public_left = change.allocate_public
        lead = list(change.path)
        for depth in range(len(lead), form.lead):
            owner = self._books.public if public_left else tier
            public_left -= owner is self._books.public and tier is not self._books.public
            after, more = (lead[-1].id if lead else None), form.lead - depth
            shared = self._allocate(request, ask, owner, depth, len(form.live), preempted, after, more)
            if shared is None:
                return None
            lead.append(shared)
        tables: dict[int, list[Block]] = {}
        for index in form.live:
            tables[index] = lead + change.tails[index]
            for depth in range(len(tables[index]), form.widths[index]):
                table = tables[index]
                after, more = (table[-1].id if table else None), form.widths[index] - depth
                own = self._allocate(request, ask, tier, depth, 1, preempted, after, more)
                if own is None:
                    return None
                tables[index].append(own)
        return tables

    def _laid_out(
        self, request: Request, change: Plan, tables: Mapping[int, list[Block]]
    ) -> dict[int, list[BlockId]]:  # fmt: skip
        """The tables' numbers, once its fresh blocks lie side by side as far as may be."""
        residents, lead, known = self._books.residents, change.shape.lead, len(change.path)
        for number, (index, table) in enumerate(tables.items()):
            parts = [(lead + len(change.tails[index]), len(table))]
            if number == 0:
                parts.insert(0, (known, lead))
            for first, last in parts:
                if first < last:
                    after = table[first - 1].id if first else None
                    residents.lay_out(table[first:last], after, request.group)
        return {index: [block.id for block in table] for index, table in tables.items()}

    def _allocate(
        self,
        request: Request,
        ask: Ask,
        owner: Account,
        depth: int,
        sequences: int,
        preempted: list[Request],
        after: BlockId | None,
        more: int,
    ) -> Block | None:
        if owner is self._books.public and owner is not ask.account and not self._books.public_has_room():
            return None
        if not self._books.make_room(ask, preempted, charged=owner):
            return None
        return self._books.residents.allocate(owner, depth, request, sequences, ask.account, after, more)

    def _start(self, request: Request, tier: Account, tables: Mapping[int, list[BlockId]], hits: list[int]) -> None:
        self._books.start(request, tables)
        if not request.started:
            request.started = True
            tokens = request.prompt_tokens
            tier.totals.query_tokens += tokens if tokens is not None else request.blocks[0] * self.block_size
            tier.totals.hit_tokens += hits[0] * self.block_size
        self.sequence += 1

    # -- filled blocks ------------------------------------------------------------------------------------------------

    def _move_onto(self, equal: Block, block: Block, request: Request, index: int, *, keeps_copy: bool) -> None:
        """The request's sequences that hold `block` hold `equal` instead, or as well."""
        sequences, tier = block.holders[request], self._books.tier(request)
        for table, copies in zip(request.tables, request.copies, strict=True):
            if index < len(table) and table[index] == block.id:
                table[index] = equal.id
                if keeps_copy:
                    copies.append(block.id)
        is_hit = request not in equal.holders
        if not keeps_copy:
            self._books.residents.let_go(block, request, sequences, tier)
        self._books.residents.hold(equal, request, sequences, tier)
        if is_hit and (owner := self._owner_after_hit(equal, tier)) is not equal.owner:
            self._books.residents.charge(equal, owner, self._books.tier)

    def _owner_after_hit(self, block: Block, tier: Account) -> Account:
        books = self._books

        def has_room(account: Account) -> bool:
            return books.public_has_room() if account is books.public else account.used < account.limit

        return owner_after_hit(
            block, tier, public=books.public, public_keys=books.public_keys, has_room=has_room, tiers=books.tier
        )

    def _settle_filled(self, block: Block, tier: Account) -> None:
        """Public blocks are the public share's as far as it has room; what it only expected goes back to the tier."""
        if block.key in self._books.public_keys:
            if block.owner is not self._books.public and self._books.public_has_room():
                self._books.residents.charge(block, self._books.public, self._books.tier)
        elif block.owner is self._books.public and tier.used < tier.limit:
            self._books.residents.charge(block, tier, self._books.tier)

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _never_fits(self, request: Request, form: Shape, tier: Account) -> str | None:
        """The arithmetic, if the request could not even run alone."""
        share = self._books.public
        public = 0 if tier is share else min(form.public_blocks(self._books.public_keys), share.limit)
        needed = form.whole - public
        bound = most_an_account_can_hold(tier, self._books.accounts, self.capacity)
        if needed <= bound:
            return None
        kept = self.capacity - sum(other.kept_from_others() for other in self._books.accounts if other is not tier)
        copies = f" for each of {len(form.live)} sequences" if len(form.live) > 1 else ""
        besides = f", {public} of its {form.whole} being public" if public else ""
        return (
            f"tier {tier.name}: the request needs {needed} blocks of {self.block_size} tokens at once{besides} (what "
            f"it has and one to grow into{copies}), but can get at most {bound}: the tier's limit is {tier.limit}, and "
            f"of {self.capacity} blocks the other tiers and the public share leave it {kept}; shorten it or raise the "
            f"limit"
        )

    def _table(self, request: Request, sequence: int) -> list[BlockId]:
        if request.stage is not Stage.RUNNING or sequence in request.finished:
            raise ValueError(f"sequence {sequence} of request {request.id} does not run")
        return request.tables[sequence]

    def _read_clock(self) -> None:
        self.sequence += self._books.residents.advance(self._clock())


def _check_shape(request: Request) -> None:
    """Refuse a request whose parts contradict each other: a fault of the caller."""
    if request.sequences < 1 or not len(request.keys) == len(request.blocks) == request.sequences:
        raise ValueError(f"request {request.id}: keys and blocks are needed for each of {request.sequences} sequences")
    for index in request.live:
        blocks, keys = request.blocks[index], request.keys[index]
        if not max(1, request.prompt_blocks) <= blocks <= request.max_blocks:
            raise ValueError(
                f"request {request.id}: blocks[{index}] is {blocks}, not between "
                f"{max(1, request.prompt_blocks)} and max_blocks {request.max_blocks}"
            )
        if len(keys) > blocks:
            raise ValueError(f"request {request.id}: sequence {index} has {len(keys)} keys for {blocks} blocks")
