"""The block pool: KV blocks of one engine, given to requests by the rules of quota.

Decisions are made elsewhere and carried out here: `admission` says whether a request may enter, `victims` who gives
way, `hits` who pays for a shared block, `quotas` which quotas are accepted; `residents` keeps the blocks. The pool
knows no tokens, tensors or threads: one caller at a time, and the clock is read once in each call.

An admission is carried out as one change: if the room that the rules grant cannot be made after all (blocks that
running requests of other tiers share can stand in the way), everything is taken back and the request has changed
nothing.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from cacheaware_api import wire

from . import quotas as rules
from .admission import Plan, Shape, plan, shape, verdict
from .errors import NeverFits, QuotaRefused, UnknownTier
from .hits import owner_after_hit
from .integrity import check
from .keys import BlockId, BlockKey
from .ledger import Figures, ledger_of
from .owners import PUBLIC, Account, most_an_account_can_hold
from .requests import Admission, Admitted, Ended, Grown, Growth, Request, Stage, Waiting, WaitReason, Yielded
from .residents import Block, Residents
from .victims import Ask, Evict, Victim, most_owing, next_victim, victim_at_limit


class BlockPool:
    """`capacity` blocks of `block_size` tokens, and at most `max_sequences` running sequences."""

    def __init__(
        self,
        capacity: int,
        block_size: int,
        max_sequences: int,
        *,
        bytes_per_token: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("capacity", capacity), ("block_size", block_size), ("max_sequences", max_sequences)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.capacity = capacity
        self.block_size = block_size
        self.max_sequences = max_sequences
        self.bytes_per_token = bytes_per_token
        self.sequence = 0  # grows with every change that the ledger shows
        self.public_keys: frozenset[BlockKey] = frozenset()
        self._clock = clock
        self._residents = Residents(capacity)
        self._public = Account(PUBLIC)
        self._public.set_share(0)
        self._by_name = {PUBLIC: self._public}
        self._accounts: list[Account] = []  # by name, the public one last
        self._quotas: wire.Quotas | None = None
        self._prefixes: dict[str, tuple[BlockKey, ...]] = {}
        self._arrivals = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._order_accounts()

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that wait, in arrival order."""
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that run, in arrival order."""
        return tuple(self._running)

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
                running=len(self._running),
                waiting=len(self._waiting),
            ),
            self._quotas,
            self._accounts,
            self._public,
            self._prefixes,
            self._residents,
        )

    def check_integrity(self) -> None:
        """Works every account out anew and asserts that it is right. O(blocks)."""
        check(self)

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
            self._account(quota.name).set_quota(quota, self.capacity, slots[quota.name])
        for account in self._tiers():
            if account.name not in slots:
                account.drain()
        self._public.set_share(quotas.public)
        self._quotas = quotas
        self._residents.reschedule(set(self._accounts))
        self._trim()
        self._forget_drained()
        self.sequence += 1

    def set_public(self, prefixes: Mapping[str, Sequence[BlockKey]]) -> None:
        """Which prefixes are public: the keys of their full blocks, by name. Raises `QuotaRefused` if they do not fit.

        Blocks of prefixes that are public no more go as soon as nobody holds them: nobody asks for their keys again.
        """
        keys = frozenset(key for prefix in prefixes.values() for key in prefix)
        if len(keys) > self._public.limit:
            raise QuotaRefused(
                f"prefixes: they need {len(keys)} blocks and the public share is {self._public.limit}; "
                f"raise publicPercent or shorten them"
            )
        self._read_clock()
        self.public_keys = keys
        self._prefixes = {name: tuple(prefix) for name, prefix in prefixes.items()}
        self._evict_retired(list(self._residents.blocks()))
        for prefix in self._prefixes.values():
            for block in self._residents.path(prefix):
                if block.owner is not self._public and self._public_has_room():
                    self._residents.charge(block, self._public, self._tier)
        self._trim()
        self.sequence += 1

    # -- a request's life ---------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """From now on it waits. Raises `UnknownTier` or `NeverFits`; then nothing changed."""
        _check_shape(request)
        if request.stage is not Stage.NEW:
            raise ValueError(f"request {request.id} was submitted before")
        known = self._by_name.get(request.tier)
        if self._quotas is not None and (known is None or known.draining):
            raise UnknownTier(request.tier, (account.name for account in self._tiers() if not account.draining))
        account = known or self._account(request.tier)
        if request.sequences > self.max_sequences:
            raise NeverFits(
                f"n = {request.sequences} sequences, but the engine runs at most {self.max_sequences} at once; "
                f"ask for fewer"
            )
        if why := self._never_fits(request, shape(request), account):
            raise NeverFits(why)
        self._read_clock()
        self._arrivals += 1
        request.number = self._arrivals
        self._enqueue(request)
        self.sequence += 1

    def admit(self, request: Request, *, idle: bool = False) -> Admission:
        """Let a waiting request run with all its blocks, or say why not; then nothing changed. O(its blocks).

        `idle` is for an engine in which nothing runs and nothing else can be admitted: lending is set aside and any
        cached block may go. While something runs it means nothing.
        """
        if request.stage is not Stage.WAITING:
            raise ValueError(f"request {request.id} is {request.stage}, not waiting")
        _check_shape(request)
        self._read_clock()
        tier = self._tier(request)
        form = shape(request)
        if why := self._never_fits(request, form, tier):
            return Ended(why=why)
        idle = idle and not self._running
        change = plan(request, tier, self._residents, self._public, self.public_keys, self._tier)
        decision = verdict(
            change, request, tier, self._accounts, self._public, self.capacity,
            self._residents.free, self._free_slots(), idle=idle,
        )  # fmt: skip
        if decision.reason is not None:
            return Waiting(decision.reason)
        ask = Ask(tier, _number(request), growth=False, entitled=decision.entitled, any_cached=idle)
        self._residents.begin()
        preempted: list[Request] = []
        if (tables := self._take_up(request, change, ask, preempted)) is None:
            self._residents.roll_back()
            return Waiting(WaitReason.ROOM)
        self._residents.commit()
        hits = change.hit_blocks(request)
        self._start(request, tier, tables, hits)
        return Admitted(hits, preempted)

    def grow(self, request: Request, sequence: int) -> Growth:
        """One more block for a running sequence; where there is none the request yields, or the sequence ends."""
        table = self._table(request, sequence)
        if len(table) >= request.max_blocks:
            return Ended(why=f"it has the {request.max_blocks} blocks that it may ever have")
        self._read_clock()
        self.sequence += 1
        tier = self._tier(request)
        ask = Ask(tier, _number(request), growth=True, entitled=True, any_cached=True)
        preempted: list[Request] = []
        if self._make_room(ask, preempted):
            block = self._residents.allocate(tier, len(table), request, 1, tier)
            table.append(block.id)
            return Grown(block.id, preempted)
        at_limit = tier.used >= tier.limit
        if len(self._running) == 1:
            return Ended(why="nothing else runs and no block can be freed", preempted=preempted)
        if at_limit and all(other is request or self._tier(other) is not tier for other in self._running):
            return Ended(why=f"tier {tier.name} is at its limit of {tier.limit} blocks", preempted=preempted)
        self._preempt(request)
        return Yielded(preempted)

    def fill(self, request: Request, sequence: int, index: int, key: BlockKey) -> BlockId:
        """Block `index` of the sequence is full and computed: from now on it can be hit. Returns what is in its place.

        Blocks are filled in order. If an equal block is resident, every sequence of the request that held this one is
        moved onto that: a hit as to who pays, not in the counters.
        """
        table = self._table(request, sequence)
        block = self._residents.at(table[index])
        if block.key is not None:
            if block.key != key:
                raise ValueError(f"block {index} of request {request.id} was filled with another key")
            return block.id
        parent = self._residents.at(table[index - 1]) if index else None
        if parent is not None and parent.key is None:
            raise ValueError(f"block {index} of request {request.id} cannot be filled before block {index - 1}")
        equal = self._residents.index.get(key)
        if equal is not None and equal.parent is not parent:
            raise ValueError(f"the key of block {index} of request {request.id} does not follow from its parent's")
        self._read_clock()
        self.sequence += 1
        if equal is None:
            self._residents.name(block, key, parent)
            self._settle_filled(block, self._tier(request))
            return block.id
        self._move_onto(equal, block, request, index)
        return equal.id

    def finish_sequence(self, request: Request, sequence: int) -> None:
        """A sequence ended before its siblings; with the last one the request ends. A second call does nothing."""
        if request.stage not in (Stage.WAITING, Stage.RUNNING) or sequence in request.finished:
            return
        if len(request.live) == 1:
            self.release(request)
            return
        self._read_clock()
        request.finished.add(sequence)
        if request.stage is Stage.RUNNING:
            self._let_go(request, [request.tables[sequence]])
            request.tables[sequence] = []
            self._tier(request).running -= 1
        self.sequence += 1

    def release(self, request: Request) -> None:
        """It finished or was aborted, waiting or running. A second call does nothing."""
        if request.stage not in (Stage.WAITING, Stage.RUNNING):
            return
        self._read_clock()
        tier = self._tier(request)
        if request.stage is Stage.WAITING:
            self._waiting.remove(request)
            tier.waiting.remove(request)
        else:
            self._running.remove(request)
            tier.running -= len(request.live)
            self._let_go(request, request.tables)
            request.tables = [[] for _ in range(request.sequences)]
        request.stage = Stage.GONE
        self._forget_drained()
        self.sequence += 1

    # -- carrying out an admission ------------------------------------------------------------------------------------

    def _take_up(
        self, request: Request, change: Plan, ask: Ask, preempted: list[Request]
    ) -> dict[int, list[BlockId]] | None:
        """Hold what is there and allocate the rest; None: some room could not be made."""
        residents, tier, form = self._residents, ask.account, change.shape
        for block, sequences in change.holds.items():
            residents.hold(block, request, sequences, tier)
        for block, owner in change.owners.items():
            if owner is self._public and not self._public_has_room():
                return None  # `plan` counted on it
            residents.charge(block, owner, self._tier)
        while self._free_slots() < len(form.live):
            if not self._free_a_slot(tier, preempted):
                return None
        public_left = change.allocate_public
        lead = [block.id for block in change.path]
        for depth in range(len(lead), form.lead):
            owner = self._public if public_left else tier
            public_left -= owner is self._public and tier is not self._public
            shared = self._allocate(request, ask, owner, depth, len(form.live), preempted)
            if shared is None:
                return None
            lead.append(shared.id)
        tables: dict[int, list[BlockId]] = {}
        for index in form.live:
            tables[index] = lead + [block.id for block in change.tails[index]]
            for depth in range(len(tables[index]), form.widths[index]):
                own = self._allocate(request, ask, tier, depth, 1, preempted)
                if own is None:
                    return None
                tables[index].append(own.id)
        return tables

    def _allocate(
        self, request: Request, ask: Ask, owner: Account, depth: int, sequences: int, preempted: list[Request]
    ) -> Block | None:
        if owner is self._public and owner is not ask.account and not self._public_has_room():
            return None
        if not self._make_room(ask, preempted, charged=owner):
            return None
        return self._residents.allocate(owner, depth, request, sequences, ask.account)

    def _start(self, request: Request, tier: Account, tables: Mapping[int, list[BlockId]], hits: list[int]) -> None:
        self._waiting.remove(request)
        tier.waiting.remove(request)
        insort(self._running, request, key=_number)
        tier.running += len(tables)
        for index, table in tables.items():
            request.tables[index] = table
        request.stage = Stage.RUNNING
        if not request.started:
            request.started = True
            tokens = request.prompt_tokens
            tier.totals.query_tokens += tokens if tokens is not None else request.blocks[0] * self.block_size
            tier.totals.hit_tokens += hits[0] * self.block_size
        self.sequence += 1

    # -- making room --------------------------------------------------------------------------------------------------

    def _make_room(self, ask: Ask, preempted: list[Request], charged: Account | None = None) -> bool:
        """Until a block is free and the account to be charged (the asker's own if None) is below its limit."""
        own = charged is None or charged is ask.account
        while True:
            if own and ask.account.used >= ask.account.limit:
                victim = victim_at_limit(ask, self._running, self._tier)
            elif self._residents.free:
                return True
            else:
                victim = next_victim(ask, self._accounts, self._residents, self._running, self._tier)
            if victim is None:
                return False
            self._give_way(victim, preempted)

    def _give_way(self, victim: Victim, preempted: list[Request]) -> None:
        if isinstance(victim, Evict):
            self._evict(victim.block, reclaim=victim.reclaim)
        else:
            self._preempt(victim.request, reclaim=victim.reclaim)
            preempted.append(victim.request)

    def _free_a_slot(self, tier: Account, preempted: list[Request]) -> bool:
        """A tier under its slots gets one back from those that run more than theirs."""
        excess = {
            account: account.running - account.slots
            for account in self._accounts
            if account is not tier and account.running > account.slots
        }
        request = most_owing(self._running, self._tier, excess)
        if request is None:
            return False
        self._preempt(request, reclaim=True)
        preempted.append(request)
        return True

    def _public_has_room(self) -> bool:
        """Whether the public share can take a block, once idle ones in it have made room."""
        public = self._public
        while public.used >= public.limit and (idle := public.idle.first()):
            self._evict(idle)
        return public.used < public.limit

    def _evict(self, block: Block, *, reclaim: bool = False) -> None:
        """An idle block goes, with what is below it."""
        for member in self._residents.idle_tree(block):
            self._residents.remove(member)
            self._count(member.owner, evicted=1, reclaimed=int(reclaim and member is block))

    def _preempt(self, request: Request, *, reclaim: bool = False) -> None:
        """A running request waits again, under its old number; its full blocks stay cached."""
        tier, tables, sequences = self._tier(request), request.tables, len(request.live)
        freed = self._let_go(request, tables)
        self._count(tier, preempted=1, reclaimed=freed if reclaim else 0)
        request.tables = [[] for _ in range(request.sequences)]
        self._running.remove(request)
        tier.running -= sequences
        request.reclaims += reclaim
        self._enqueue(request)

        def undo() -> None:
            self._waiting.remove(request)
            tier.waiting.remove(request)
            insort(self._running, request, key=_number)
            tier.running += sequences
            request.reclaims -= reclaim
            request.tables, request.stage = tables, Stage.RUNNING

        self._residents.log(undo)

    def _let_go(self, request: Request, tables: Sequence[Sequence[BlockId]]) -> int:
        """The request holds these tables no more, tails first. Returns how many partial blocks that freed."""
        residents, tier = self._residents, self._tier(request)
        counts: dict[BlockId, int] = {}
        for table in tables:
            for block_id in reversed(table):
                counts[block_id] = counts.get(block_id, 0) + 1
        blocks = [(residents.at(block_id), count) for block_id, count in counts.items()]
        for block, count in blocks:
            residents.let_go(block, request, count, tier)
        freed = sum(not residents.is_resident(block) for block, _ in blocks)
        self._evict_retired([block for block, _ in blocks])
        self._trim()
        return freed

    def _evict_retired(self, blocks: Iterable[Block]) -> None:
        """Of these, idle blocks of prefixes that are public no more go."""
        for block in blocks:
            if block.owner is self._public and not block.holders and block.key not in self.public_keys:
                if self._residents.is_resident(block):  # it may have gone with one above it
                    self._evict(block)

    def _trim(self) -> None:
        """No owner keeps cached blocks beyond its limit."""
        for account in self._accounts:
            while account.used > account.limit and (idle := account.idle.first()):
                self._evict(idle)

    # -- filled blocks ------------------------------------------------------------------------------------------------

    def _move_onto(self, equal: Block, block: Block, request: Request, index: int) -> None:
        """The request's sequences that hold `block` hold `equal` instead."""
        sequences, tier = block.holders[request], self._tier(request)
        for table in request.tables:
            if index < len(table) and table[index] == block.id:
                table[index] = equal.id
        is_hit = request not in equal.holders
        self._residents.let_go(block, request, sequences, tier)
        self._residents.hold(equal, request, sequences, tier)
        if is_hit and (owner := self._owner_after_hit(equal, tier)) is not equal.owner:
            self._residents.charge(equal, owner, self._tier)

    def _owner_after_hit(self, block: Block, tier: Account) -> Account:
        def has_room(account: Account) -> bool:
            return self._public_has_room() if account is self._public else account.used < account.limit

        return owner_after_hit(
            block, tier, public=self._public, public_keys=self.public_keys, has_room=has_room, tiers=self._tier
        )

    def _settle_filled(self, block: Block, tier: Account) -> None:
        """Public blocks are the public share's as far as it has room; what it only expected goes back to the tier."""
        if block.key in self.public_keys:
            if block.owner is not self._public and self._public_has_room():
                self._residents.charge(block, self._public, self._tier)
        elif block.owner is self._public and tier.used < tier.limit:
            self._residents.charge(block, tier, self._tier)

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _never_fits(self, request: Request, form: Shape, tier: Account) -> str | None:
        """The arithmetic, if the request could not even run alone."""
        public = 0 if tier is self._public else min(form.public_blocks(self.public_keys), self._public.limit)
        needed = form.whole - public
        bound = most_an_account_can_hold(tier, self._accounts, self.capacity)
        if needed <= bound:
            return None
        kept = self.capacity - sum(other.kept_from_others() for other in self._accounts if other is not tier)
        copies = f" for each of {len(form.live)} sequences" if len(form.live) > 1 else ""
        besides = f", {public} of its {form.whole} being public" if public else ""
        return (
            f"tier {tier.name}: the request needs {needed} blocks of {self.block_size} tokens at once{besides} (what "
            f"it has and one to grow into{copies}), but can get at most {bound}: the tier's limit is {tier.limit}, and "
            f"of {self.capacity} blocks the other tiers and the public share leave it {kept}; shorten it or raise the "
            f"limit"
        )

    def _enqueue(self, request: Request) -> None:
        request.stage = Stage.WAITING
        insort(self._waiting, request, key=_number)
        insort(self._tier(request).waiting, request, key=_number)

    def _table(self, request: Request, sequence: int) -> list[BlockId]:
        if request.stage is not Stage.RUNNING or sequence in request.finished:
            raise ValueError(f"sequence {sequence} of request {request.id} does not run")
        return request.tables[sequence]

    def _free_slots(self) -> int:
        return self.max_sequences - sum(account.running for account in self._accounts)

    def _count(self, account: Account, *, evicted: int = 0, reclaimed: int = 0, preempted: int = 0) -> None:
        totals = account.totals
        totals.evicted += evicted
        totals.reclaimed += reclaimed
        totals.preempted += preempted

        def undo() -> None:
            totals.evicted -= evicted
            totals.reclaimed -= reclaimed
            totals.preempted -= preempted

        self._residents.log(undo)

    def _tier(self, request: Request) -> Account:
        return self._by_name[request.tier]

    def _tiers(self) -> list[Account]:
        return self._accounts[:-1]

    def _account(self, name: str) -> Account:
        """A tier's account; a new one is open to anything until it gets a quota."""
        account = self._by_name.get(name)
        if account is None:
            account = self._by_name[name] = Account(name)
            account.open(self.capacity)
            self._order_accounts()
        return account

    def _order_accounts(self) -> None:
        tiers = sorted((account for account in self._by_name.values() if account is not self._public), key=_name)
        self._accounts = [*tiers, self._public]

    def _forget_drained(self) -> None:
        for account in self._tiers():
            if account.draining and account.empty:
                del self._by_name[account.name]
        self._order_accounts()

    def _read_clock(self) -> None:
        self.sequence += self._residents.advance(self._clock())


def _number(request: Request) -> int:
    assert request.number is not None, "it was submitted"
    return request.number


def _name(account: Account) -> str:
    return account.name


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
