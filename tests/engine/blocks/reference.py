"""The rules of KV quota once more, slow and obvious: what `BlockPool` is compared with.

Every question is answered by looking at every block and every request, and an admission is tried on a copy of the whole
state, so there are no counters, no heaps and nothing to take back. Where the rules leave a choice between equals, both
take the same: least recent, deepest, first allocated; among owners the less important, then by name, the public share
last.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PUBLIC = "<public>"


@dataclass
class Tier:
    nominal: int = 0
    effective: int = 0
    limit: int = 0
    lending: int = 0
    priority: float = 0
    retention: float | None = 0
    slots: int = 0
    draining: bool = False
    evicted: int = 0
    reclaimed: int = 0
    preempted: int = 0
    hits: int = 0
    queries: int = 0


@dataclass(eq=False)
class Block:
    serial: int
    depth: int
    owner: str
    touched: float
    kept: float
    key: bytes | None = None
    parent: Block | None = None
    holders: Counter[str] = field(default_factory=Counter)

    @property
    def order(self) -> tuple[float, int, int]:
        return (self.touched, -self.depth, self.serial)


@dataclass(eq=False)
class Request:
    id: str
    tier: str
    keys: list[list[bytes]]
    blocks: list[int]
    max_blocks: int
    prompt_blocks: int
    number: int
    tables: list[list[Block]] = field(default_factory=list)
    running: bool = False
    started: bool = False
    reclaims: int = 0
    finished: set[int] = field(default_factory=set)

    @property
    def live(self) -> list[int]:
        return [index for index in range(len(self.keys)) if index not in self.finished]

    @property
    def lead(self) -> int:
        """Leading blocks that all its live sequences share."""
        return self.prompt_blocks if len(self.live) > 1 else self.width(self.live[0])

    @property
    def lead_keys(self) -> list[bytes]:
        return max((self.keys[index] for index in self.live), key=len)[: self.lead]

    def width(self, index: int) -> int:
        return min(self.blocks[index] + 1, self.max_blocks)

    @property
    def whole(self) -> int:
        return self.lead + sum(self.width(index) - self.lead for index in self.live)


@dataclass(frozen=True)
class Answer:
    """What an operation did, in the words of both."""

    what: str
    hits: tuple[int, ...] = ()
    preempted: tuple[str, ...] = ()
    granted: bool = field(default=False, compare=False)  # the rules let it in, but the room could not be made


class Reference:
    def __init__(self, capacity: int, max_sequences: int) -> None:
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.now = 0.0
        self.serial = 0
        self.number = 0
        self.tiers: dict[str, Tier] = {PUBLIC: Tier(retention=None, priority=math.inf)}
        self.closed = False  # quotas were set
        self.public_keys: frozenset[bytes] = frozenset()
        self.blocks: list[Block] = []
        self.requests: dict[str, Request] = {}

    # -- accounts -----------------------------------------------------------------------------------------------------

    @property
    def owners(self) -> list[str]:
        return [*sorted(name for name in self.tiers if name != PUBLIC), PUBLIC]

    def used(self, owner: str) -> int:
        return sum(block.owner == owner for block in self.blocks)

    def held(self, owner: str) -> int:
        return sum(block.owner == owner and bool(block.holders) for block in self.blocks)

    def free(self) -> int:
        return self.capacity - len(self.blocks)

    def waiting(self) -> list[Request]:
        return sorted((r for r in self.requests.values() if not r.running), key=lambda r: r.number)

    def running(self) -> list[Request]:
        return sorted((r for r in self.requests.values() if r.running), key=lambda r: r.number)

    def sequences(self, owner: str | None = None) -> int:
        return sum(len(r.live) for r in self.running() if owner in (None, r.tier))

    def held_by_owner(self, block: Block) -> bool:
        return any(self.requests[holder].tier == block.owner for holder in block.holders)

    def lapsed(self, block: Block) -> bool:
        retention = self.tiers[block.owner].retention
        return retention is not None and not self.held_by_owner(block) and block.kept + retention <= self.now

    def idle(self) -> list[Block]:
        return [block for block in self.blocks if not block.holders]

    def children(self, block: Block) -> list[Block]:
        return [child for child in self.blocks if child.parent is block]

    def leaves(self) -> list[Block]:
        return [block for block in self.idle() if not self.children(block)]

    def find(self, key: bytes) -> Block | None:
        return next((block for block in self.blocks if block.key == key), None)

    def path(self, keys: Iterable[bytes]) -> list[Block]:
        found = []
        for key in keys:
            if (block := self.find(key)) is None:
                break
            found.append(block)
        return found

    # -- settings -----------------------------------------------------------------------------------------------------

    def set_quotas(self, tiers: Mapping[str, Tier], share: int) -> None:
        for name, wanted in tiers.items():
            present = self.tiers.setdefault(name, Tier())
            for what in ("nominal", "effective", "limit", "lending", "priority", "retention", "slots"):
                setattr(present, what, getattr(wanted, what))
            present.draining = False
        for name in self.owners:
            tier = self.tiers[name]
            if name == PUBLIC:
                tier.nominal = tier.effective = tier.limit = share
            elif name not in tiers:
                tier.nominal = tier.effective = tier.limit = tier.lending = tier.slots = 0
                tier.priority, tier.draining = -math.inf, True
        self.closed = True
        self.trim()
        self.forget()

    def set_public(self, prefixes: Sequence[Sequence[bytes]]) -> None:
        self.public_keys = frozenset(key for prefix in prefixes for key in prefix)
        self.evict_retired()
        for prefix in prefixes:
            for block in self.path(prefix):
                if block.owner != PUBLIC and self.public_room():
                    self.charge(block, PUBLIC)
        self.trim()

    def forget(self) -> None:
        for name in self.owners:
            if self.tiers[name].draining and not self.used(name):
                if not any(request.tier == name for request in self.requests.values()):
                    del self.tiers[name]

    # -- blocks -------------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, owner: str, depth: int, sequences: int) -> Block:
        self.serial += 1
        block = Block(self.serial, depth, owner, self.now, self.now)
        block.holders[request.id] = sequences
        self.blocks.append(block)
        return block

    def hold(self, block: Block, request: Request, sequences: int) -> None:
        block.holders[request.id] += sequences
        block.touched = self.now
        if request.tier == block.owner:
            block.kept = self.now

    def let_go(self, request: Request, tables: Sequence[Sequence[Block]]) -> int:
        """Returns how many partial blocks that freed."""
        freed = 0
        counts = Counter(block for table in tables for block in table)
        for block, count in counts.items():
            block.holders[request.id] -= count
            if block.holders[request.id]:
                continue
            del block.holders[request.id]
            block.touched = self.now
            if request.tier == block.owner:
                block.kept = self.now
            if block.key is None:
                self.blocks.remove(block)
                freed += 1
        self.evict_retired()
        self.trim()
        return freed

    def charge(self, block: Block, owner: str) -> None:
        block.owner = owner
        block.kept = self.now

    def evict(self, block: Block, reclaim: bool = False) -> None:
        assert not block.holders
        for child in self.children(block):
            self.evict(child)
        self.blocks.remove(block)
        self.tiers[block.owner].evicted += 1
        self.tiers[block.owner].reclaimed += reclaim

    def evict_retired(self) -> None:
        while retired := [b for b in self.idle() if b.owner == PUBLIC and b.key not in self.public_keys]:
            self.evict(retired[0])

    def trim(self) -> None:
        for owner in self.owners:
            while self.used(owner) > self.tiers[owner].limit and (idle := self.oldest(self.idle(), {owner})):
                self.evict(idle)

    def oldest(self, blocks: Iterable[Block], owners: Iterable[str]) -> Block | None:
        owners = set(owners)
        return min((b for b in blocks if b.owner in owners), key=lambda b: b.order, default=None)

    def public_room(self) -> bool:
        share = self.tiers[PUBLIC].limit
        while self.used(PUBLIC) >= share and (idle := self.oldest(self.idle(), {PUBLIC})):
            self.evict(idle)
        return self.used(PUBLIC) < share

    # -- owner --------------------------------------------------------------------------------------------------------

    def owner_after_hit(self, block: Block, tier: str, public_full: bool) -> str:
        if block.owner == PUBLIC:
            return PUBLIC
        if block.key in self.public_keys and not public_full:
            return PUBLIC
        if tier in (PUBLIC, block.owner):
            return block.owner
        priority = {name: state.priority for name, state in self.tiers.items()}
        if priority[tier] > priority[block.owner]:
            target = tier
        elif self.lapsed(block):
            holders = sorted((self.requests[name] for name in block.holders), key=lambda r: r.number)
            target = max([tier, *(r.tier for r in holders if r.tier != PUBLIC)], key=lambda name: priority[name])
        else:
            return block.owner
        return target if self.used(target) < self.tiers[target].limit else block.owner

    # -- admission ----------------------------------------------------------------------------------------------------

    def bound(self, tier: str) -> int:
        others = sum(state.nominal - state.lending for name, state in self.tiers.items() if name != tier)
        return min(self.tiers[tier].limit, self.capacity - others)

    def never_fits(self, request: Request) -> bool:
        public = 0
        while public < len(request.lead_keys) and request.lead_keys[public] in self.public_keys:
            public += 1
        excepted = 0 if request.tier == PUBLIC else min(public, self.tiers[PUBLIC].limit)
        return request.whole - excepted > self.bound(request.tier)

    def submit(self, request: Request) -> bool:
        if is_new := request.tier not in self.tiers:
            self.tiers[request.tier] = Tier(limit=self.capacity)
        if len(request.keys) > self.max_sequences or self.never_fits(request):
            if is_new:
                del self.tiers[request.tier]
            return False
        self.number += 1
        request.number = self.number
        self.requests[request.id] = request
        return True

    def admit(self, name: str, idle: bool = False) -> Answer:
        request = self.requests[name]
        if self.never_fits(request):
            return Answer("ended")
        trial = copy.deepcopy(self)
        answer = trial.try_admit(trial.requests[name], before=self, idle=idle and not self.running())
        if answer.what == "admitted":
            self.__dict__ = trial.__dict__
        return answer

    def try_admit(self, request: Request, before: Reference, idle: bool) -> Answer:
        tier = request.tier
        quota, share = self.tiers[tier], self.tiers[PUBLIC].limit
        live, lead = request.live, request.lead

        path = self.path(request.lead_keys)
        tails = {i: self.path(request.keys[i][lead:]) if len(path) == lead else [] for i in live}
        for block in path:
            self.hold(block, request, len(live))
        for tail in tails.values():
            for block in tail:
                self.hold(block, request, 1)
        for block in dict.fromkeys([*path, *(block for tail in tails.values() for block in tail)]):
            owner = self.owner_after_hit(block, tier, public_full=self.held(PUBLIC) >= share)
            if owner != block.owner:
                self.charge(block, owner)

        allocate = request.whole - len(path) - sum(map(len, tails.values()))
        missing = request.lead_keys[len(path) :]
        public = 0
        while tier != PUBLIC and public < len(missing) and missing[public] in self.public_keys:
            public += 1
        public = min(public, max(0, share - self.held(PUBLIC)))

        held_after = self.held(tier) + allocate - public
        entitled = held_after <= quota.nominal
        free_slots = self.max_sequences - self.sequences()
        if len(live) > free_slots and not (entitled and self.sequences(tier) + len(live) <= quota.slots):
            return Answer("slots")
        if not entitled and not idle:
            if any(other.tier == tier and other.number < request.number for other in before.waiting()):
                return Answer("older")
            if held_after > quota.limit:
                return Answer("limit")
            committed = held_after if tier == PUBLIC else max(held_after, quota.nominal - quota.lending)
            for owner, state in self.tiers.items():
                if owner == PUBLIC and tier != PUBLIC:
                    committed += self.held(PUBLIC) + public
                elif owner != tier:
                    committed += max(self.held(owner), state.nominal - state.lending)
            if sum(map(self.held, self.tiers)) + allocate > self.capacity:
                return Answer("room")
            if committed > self.capacity:
                return Answer("lending")
            room = self.free()
            for owner, state in self.tiers.items():
                cached = [block for block in self.idle() if block.owner == owner]
                lapsed = sum(map(self.lapsed, cached))
                if owner == tier:
                    room += len(cached)
                else:
                    used = self.used(owner) + (public if owner == PUBLIC else 0)
                    room += lapsed + min(len(cached) - lapsed, max(0, used - lapsed - state.effective))
            if room < allocate:
                return Answer("room")

        while self.used(PUBLIC) > share and (oldest := self.oldest(self.idle(), {PUBLIC})):
            self.evict(oldest)
        preempted: list[str] = []
        while self.max_sequences - self.sequences() < len(live):
            lending = {o: self.sequences(o) - self.tiers[o].slots for o in self.tiers if o != tier}
            lent = self.reclaim({owner: over for owner, over in lending.items() if over > 0}, preempted)
            assert lent, "theorem: below its slots with none free, somebody runs more than theirs"
        leading = list(path)
        while len(leading) < lead:
            owner = PUBLIC if public else tier
            public -= owner == PUBLIC != tier
            if owner == PUBLIC != tier and not self.public_room():
                return Answer("room", granted=True)
            if not self.make_room(request, preempted, growth=False, entitled=entitled, anything=idle, charged=owner):
                return Answer("room", granted=True)
            leading.append(self.allocate(request, owner, len(leading), len(live)))
        request.tables = [[] for _ in request.keys]
        for i in live:
            table = request.tables[i] = leading + tails[i]
            while len(table) < request.width(i):
                if not self.make_room(request, preempted, growth=False, entitled=entitled, anything=idle):
                    return Answer("room", granted=True)
                table.append(self.allocate(request, tier, len(table), 1))

        hits = [0] * len(request.keys)
        for i in live:
            hits[i] = min(len(path), len(request.keys[i])) + len(tails[i])
        if not request.started:
            quota.queries += request.blocks[0]
            quota.hits += hits[0]
        request.started = request.running = True
        return Answer("admitted", tuple(hits), tuple(preempted))

    # -- making room --------------------------------------------------------------------------------------------------

    def make_room(
        self,
        request: Request,
        preempted: list[str],
        *,
        growth: bool,
        entitled: bool,
        anything: bool,
        charged: str | None = None,
    ) -> bool:
        tier = request.tier
        while True:
            if charged in (None, tier) and self.used(tier) >= self.tiers[tier].limit:
                own = self.oldest(self.idle(), {tier})
                younger = [r for r in self.running() if r.tier == tier and r.number > request.number]
                if own:
                    self.evict(own)
                elif growth and younger:
                    self.stop(younger[-1], preempted)
                else:
                    return False
            elif self.free():
                return True
            elif not self.victim(request, preempted, growth, entitled, anything):
                return False

    def victim(self, request: Request, preempted: list[str], growth: bool, entitled: bool, anything: bool) -> bool:
        tier, leaves = request.tier, self.leaves()
        # 1. lapsed
        if lapsed := self.oldest((block for block in leaves if self.lapsed(block)), self.tiers):
            self.evict(lapsed)
            return True
        # 2. the owner furthest over its effective quota
        over = {o: self.used(o) + (o == tier) - self.tiers[o].effective for o in self.owners}
        owners = [o for o in self.owners if over[o] > 0 and any(block.owner == o for block in self.idle())]
        if owners:
            worst = max(owners, key=lambda o: (over[o], -self.tiers[o].priority))
            oldest = self.oldest(leaves, {worst}) or self.oldest(self.idle(), {worst})
            assert oldest
            self.evict(oldest)
            return True
        # 3. reclaim
        below = (growth or entitled) and self.used(tier) < self.tiers[tier].nominal
        owing = {o: self.used(o) - self.tiers[o].nominal for o in self.owners}
        owing = {o: excess for o, excess in owing.items() if excess > 0}
        if below:
            assert owing, "theorem: below its nominal with nothing free, somebody is over"
            if cached := self.oldest(leaves, owing) or self.oldest(self.idle(), owing):
                self.evict(cached, reclaim=True)
                return True
            if self.reclaim(owing, preempted):
                return True
        # 4. its own
        if own := self.oldest(leaves, {tier}) or self.oldest(self.idle(), {tier}):
            self.evict(own)
            return True
        # 5. any
        if anything and (cached := self.oldest(leaves, self.tiers)):
            self.evict(cached)
            return True
        # 6. the youngest yields
        if growth or below:
            giving = [r for r in self.running() if r.tier == tier or r.tier in owing]
            if giving and giving[-1].number > request.number:
                self.stop(giving[-1], preempted)
                return True
        return False

    def reclaim(self, owing: Mapping[str, int], preempted: list[str]) -> bool:
        candidates = [r for r in self.running() if r.tier in owing]
        if not candidates:
            return False

        def rank(r: Request) -> tuple[bool, int, float, int]:
            state = self.tiers[r.tier]
            return (r.reclaims < 2 or state.nominal == 0, owing[r.tier], -state.priority, r.number)

        victim = max(candidates, key=rank)
        victim.reclaims += 1
        self.tiers[victim.tier].reclaimed += self.stop(victim, preempted)
        return True

    def stop(self, request: Request, preempted: list[str] | None) -> int:
        tables, request.tables, request.running = request.tables, [], False
        self.tiers[request.tier].preempted += 1
        if preempted is not None:
            preempted.append(request.id)
        return self.let_go(request, tables)

    # -- a running request --------------------------------------------------------------------------------------------

    def grow(self, name: str, sequence: int) -> Answer:
        request = self.requests[name]
        table, tier = request.tables[sequence], request.tier
        if len(table) >= request.max_blocks:
            return Answer("ended")
        preempted: list[str] = []
        if self.make_room(request, preempted, growth=True, entitled=True, anything=True):
            table.append(self.allocate(request, tier, len(table), 1))
            return Answer("grown", preempted=tuple(preempted))
        alone = [r for r in self.running() if r is not request] == []
        alone_in_tier = all(r is request or r.tier != tier for r in self.running())
        if alone or (self.used(tier) >= self.tiers[tier].limit and alone_in_tier):
            return Answer("ended", preempted=tuple(preempted))
        self.stop(request, None)
        return Answer("yielded", preempted=tuple(preempted))

    def fill(self, name: str, sequence: int, index: int, key: bytes) -> None:
        request = self.requests[name]
        block = request.tables[sequence][index]
        if block.key is not None:
            return
        equal = self.find(key)
        if equal is None:
            block.key = key
            block.parent = request.tables[sequence][index - 1] if index else None
            if key in self.public_keys:
                if block.owner != PUBLIC and self.public_room():
                    self.charge(block, PUBLIC)
            elif block.owner == PUBLIC and self.used(request.tier) < self.tiers[request.tier].limit:
                self.charge(block, request.tier)
            return
        for table in request.tables:
            if index < len(table) and table[index] is block:
                table[index] = equal
        is_hit = request.id not in equal.holders
        sequences = block.holders[request.id]
        self.blocks.remove(block)
        self.hold(equal, request, sequences)
        if is_hit:
            wants_public = equal.key in self.public_keys and equal.owner != PUBLIC
            owner = self.owner_after_hit(equal, request.tier, public_full=wants_public and not self.public_room())
            if owner != equal.owner:
                self.charge(equal, owner)

    def finish_sequence(self, name: str, sequence: int) -> None:
        request = self.requests[name]
        if len(request.live) == 1:
            self.release(name)
            return
        request.finished.add(sequence)
        if request.running:
            table, request.tables[sequence] = request.tables[sequence], []
            self.let_go(request, [table])

    def release(self, name: str) -> None:
        request = self.requests[name]
        tables, request.tables = request.tables, []
        self.let_go(request, tables)  # while it is known: whose tier lets go matters
        del self.requests[name]
        self.forget()
