"""The books of a pool: its accounts, its blocks and its queues, and the changes that keep the three in step.

Here is how a request gets a block and who gives way for it, how blocks are let go of and evicted, and which owners are
known. What a request may have is decided in `admission` and `victims`; `pool` asks them and writes it here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence

from .keys import BlockId, BlockKey
from .owners import PUBLIC, Account
from .requests import Request, Stage
from .residents import Block, Residents
from .victims import Ask, Evict, Preempt, Victim, most_owing, next_victim, victim_at_limit


class Books:
    """Everything that an admission changes; changes since `residents.begin` can be taken back."""

    def __init__(self, capacity: int, max_sequences: int, *, adjacent: bool = True) -> None:
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.residents = Residents(capacity, adjacent=adjacent)
        self.public = Account(PUBLIC)
        self.public.set_share(0)
        self.public_keys: frozenset[BlockKey] = frozenset()
        self.by_name = {PUBLIC: self.public}
        self.accounts = [self.public]  # by name, the public one last
        self.waiting: list[Request] = []  # in arrival order, as is `running`
        self.running: list[Request] = []

    # -- accounts -----------------------------------------------------------------------------------------------------

    def tier(self, request: Request) -> Account:
        return self.by_name[request.tier]

    def tiers(self) -> list[Account]:
        return self.accounts[:-1]

    def account(self, name: str) -> Account:
        """A tier's account; a new one is open to anything until it gets a quota."""
        account = self.by_name.get(name)
        if account is None:
            account = self.by_name[name] = self.open_account(name)
            self.order_accounts()
        return account

    def open_account(self, name: str) -> Account:
        """What a tier without a quota would have; it is not entered."""
        account = Account(name)
        account.open(self.capacity)
        return account

    def order_accounts(self) -> None:
        tiers = sorted((account for account in self.by_name.values() if account is not self.public), key=_name)
        self.accounts = [*tiers, self.public]

    def forget_drained(self) -> None:
        for account in self.tiers():
            if account.draining and account.empty:
                del self.by_name[account.name]
        self.order_accounts()

    # -- requests -----------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        request.stage = Stage.WAITING
        insort(self.waiting, request, key=number_of)
        insort(self.tier(request).waiting, request, key=number_of)

    def free_slots(self) -> int:
        return self.max_sequences - sum(account.running for account in self.accounts)

    def start(self, request: Request, tables: Mapping[int, list[BlockId]]) -> None:
        """A waiting request runs, with a table for each of its live sequences."""
        tier = self.tier(request)
        self.waiting.remove(request)
        tier.waiting.remove(request)
        insort(self.running, request, key=number_of)
        tier.running += len(tables)
        for index, table in tables.items():
            request.tables[index] = table
        request.stage = Stage.RUNNING

    def preempt(self, request: Request, *, reclaim: bool = False) -> None:
        """A running request waits again, under its old number; its full blocks stay cached."""
        tier, tables, copies, sequences = self.tier(request), request.tables, request.copies, len(request.live)
        freed = self.let_go(request, [*tables, *copies])
        self._count(tier, preempted=1, reclaimed=freed if reclaim else 0)
        request.tables = [[] for _ in range(request.sequences)]
        request.copies = [[] for _ in range(request.sequences)]
        self.running.remove(request)
        tier.running -= sequences
        request.reclaims += reclaim
        self.enqueue(request)

        def undo() -> None:
            self.waiting.remove(request)
            tier.waiting.remove(request)
            insort(self.running, request, key=number_of)
            tier.running += sequences
            request.reclaims -= reclaim
            request.tables, request.copies, request.stage = tables, copies, Stage.RUNNING

        self.residents.log(undo)

    def finish_sequence(self, request: Request, sequence: int) -> None:
        """One sequence of several is over."""
        request.finished.add(sequence)
        if request.stage is Stage.RUNNING:
            self.let_go(request, [request.tables[sequence], request.copies[sequence]])
            request.tables[sequence], request.copies[sequence] = [], []
            self.tier(request).running -= 1

    def remove(self, request: Request) -> None:
        """It is over, waiting or running."""
        tier = self.tier(request)
        if request.stage is Stage.WAITING:
            self.waiting.remove(request)
            tier.waiting.remove(request)
        else:
            self.running.remove(request)
            tier.running -= len(request.live)
            self.let_go(request, [*request.tables, *request.copies])
            request.tables = [[] for _ in range(request.sequences)]
            request.copies = [[] for _ in range(request.sequences)]
        request.stage = Stage.GONE

    def let_go(self, request: Request, tables: Sequence[Sequence[BlockId]]) -> int:
        """The request holds these tables no more, tails first. Returns how many partial blocks that freed."""
        residents, tier = self.residents, self.tier(request)
        counts: dict[BlockId, int] = {}
        for table in tables:
            for block_id in reversed(table):
                counts[block_id] = counts.get(block_id, 0) + 1
        blocks = [(residents.at(block_id), count) for block_id, count in counts.items()]
        for block, count in blocks:
            residents.let_go(block, request, count, tier)
        freed = sum(not residents.is_resident(block) for block, _ in blocks)
        self.evict_retired([block for block, _ in blocks])
        self.trim()
        return freed

    # -- making room --------------------------------------------------------------------------------------------------

    def make_room(self, ask: Ask, preempted: list[Request], charged: Account | None = None) -> bool:
        """Until a block is free and the account to be charged (the asker's own if None) is below its limit."""
        own = charged is None or charged is ask.account
        while True:
            if own and ask.account.used >= ask.account.limit:
                victim = victim_at_limit(ask, self.running, self.tier)
            elif self.residents.free:
                return True
            else:
                victim = next_victim(ask, self.accounts, self.residents, self.running, self.tier)
            if victim is None or (isinstance(victim, Preempt) and not ask.preempts):
                return False
            self._give_way(victim, preempted)

    def _give_way(self, victim: Victim, preempted: list[Request]) -> None:
        if isinstance(victim, Evict):
            self.evict(victim.block, reclaim=victim.reclaim)
        else:
            self.preempt(victim.request, reclaim=victim.reclaim)
            preempted.append(victim.request)

    def free_a_slot(self, tier: Account, preempted: list[Request]) -> bool:
        """A tier under its slots gets one back from those that run more than theirs."""
        excess = {
            account: account.running - account.slots
            for account in self.accounts
            if account is not tier and account.running > account.slots
        }
        request = most_owing(self.running, self.tier, excess)
        if request is None:
            return False
        self.preempt(request, reclaim=True)
        preempted.append(request)
        return True

    # -- eviction -----------------------------------------------------------------------------------------------------

    def public_has_room(self) -> bool:
        """Whether the public share can take a block, once idle ones in it have made room."""
        public = self.public
        while public.used >= public.limit and (idle := public.idle.first()):
            self.evict(idle)
        return public.used < public.limit

    def evict(self, block: Block, *, reclaim: bool = False) -> None:
        """An idle block goes, with what is below it."""
        for member in self.residents.idle_tree(block):
            self.residents.remove(member)
            self._count(member.owner, evicted=1, reclaimed=int(reclaim and member is block))

    def evict_idle(self) -> None:
        """Every idle block goes."""
        for account in self.accounts:
            while idle := account.idle.first():
                self.evict(idle)

    def evict_retired(self, blocks: Iterable[Block]) -> None:
        """Of these, idle blocks of prefixes that are public no more go."""
        for block in blocks:
            if block.owner is self.public and not block.holders and block.key not in self.public_keys:
                if self.residents.is_resident(block):  # it may have gone with one above it
                    self.evict(block)

    def trim(self) -> None:
        """No owner keeps cached blocks beyond its limit."""
        for account in self.accounts:
            while account.used > account.limit and (idle := account.idle.first()):
                self.evict(idle)

    def _count(self, account: Account, *, evicted: int = 0, reclaimed: int = 0, preempted: int = 0) -> None:
        totals = account.totals
        totals.evicted += evicted
        totals.reclaimed += reclaimed
        totals.preempted += preempted

        def undo() -> None:
            totals.evicted -= evicted
            totals.reclaimed -= reclaimed
            totals.preempted -= preempted

        self.residents.log(undo)


def number_of(request: Request) -> int:
    """A submitted request's place in the order of arrival."""
    assert request.number is not None
    return request.number


def _name(account: Account) -> str:
    return account.name
