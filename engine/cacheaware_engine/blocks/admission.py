"""What an admission would change, and whether the rules allow it. Pure: it reads the accounts and changes nothing.

`plan` looks up the request's blocks and works out every account as it would be afterwards; `verdict` applies the rules
of quota to that. Making the room that a verdict grants is `pool`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from .hits import owner_after_hit
from .keys import BlockKey
from .owners import Account
from .requests import Request, WaitReason
from .residents import Block, Residents


@dataclass(frozen=True, slots=True)
class Shape:
    """The blocks that a request must be admitted with: `lead` are shared by its live sequences, the others are not."""

    live: list[int]
    widths: dict[int, int]  # per live sequence: its blocks so far and one to grow into
    lead: int
    lead_keys: list[BlockKey]

    @property
    def whole(self) -> int:
        return self.lead + sum(width - self.lead for width in self.widths.values())

    def public_blocks(self, public_keys: Container[BlockKey]) -> int:
        """How many of its leading blocks are public."""
        for index, key in enumerate(self.lead_keys):
            if key not in public_keys:
                return index
        return len(self.lead_keys)


def shape(request: Request) -> Shape:
    live = request.live
    widths = {index: min(request.blocks[index] + 1, request.max_blocks) for index in live}
    lead = request.prompt_blocks if len(live) > 1 else widths[live[0]]
    keys = max((request.keys[index] for index in live), key=len)[:lead]
    return Shape(live, widths, lead, keys)


@dataclass(frozen=True, slots=True)
class Plan:
    """An admission before it happens. The counters are by account: what would be added to (or is taken from) each."""

    shape: Shape
    path: list[Block]  # resident blocks at the lead's beginning
    tails: dict[int, list[Block]]  # per live sequence: resident blocks behind the lead
    holds: dict[Block, int]  # sequences that will hold each resident block
    owners: dict[Block, Account]  # resident blocks that move, and to whom
    allocate: int  # fresh blocks
    allocate_public: int  # of these, charged to the public share: the first ones
    held: Counter[Account]
    used: Counter[Account]
    taken: Counter[Account]  # cached blocks that become held
    taken_lapsed: Counter[Account]

    def hit_blocks(self, request: Request) -> list[int]:
        """Per sequence: leading blocks that need not be computed."""
        hits = [0] * request.sequences
        for index in self.shape.live:
            hits[index] = min(len(self.path), len(request.keys[index])) + len(self.tails[index])
        return hits


def plan(
    request: Request,
    tier: Account,
    residents: Residents,
    public: Account,
    public_keys: Container[BlockKey],
    tiers: Callable[[Request], Account],
) -> Plan:
    """Look up the request's blocks and account for them. O(its blocks)."""
    form = shape(request)
    path = residents.path(form.lead_keys)
    tails = {
        index: residents.path(request.keys[index][form.lead :]) if len(path) == form.lead else [] for index in form.live
    }
    holds = dict.fromkeys(path, len(form.live))
    for tail in tails.values():
        for block in tail:
            holds[block] = holds.get(block, 0) + 1

    held, used, taken, taken_lapsed = Counter[Account](), Counter[Account](), Counter[Account](), Counter[Account]()
    # Public blocks that nobody holds make room for others in the share, unless this request is about to hold them.
    public_room = public.limit - public.held - sum(block.owner is public and not block.holders for block in holds)

    def has_room(account: Account) -> bool:
        return (public_room if account is public else account.limit - account.used) > used[account]

    owners: dict[Block, Account] = {}
    for block in holds:
        before = block.owner
        after = owner_after_hit(block, tier, public=public, public_keys=public_keys, has_room=has_room, tiers=tiers)
        if block.holders:
            held[before] -= 1
        else:
            taken[before] += 1
            taken_lapsed[before] += block.lapsed
        held[after] += 1
        if after is not before:
            owners[block] = after
            used[before] -= 1
            used[after] += 1

    allocate = form.whole - len(path) - sum(len(tail) for tail in tails.values())
    public_left = max(0, form.public_blocks(public_keys) - len(path))
    allocate_public = 0 if tier is public else min(public_left, max(0, public_room - used[public]))
    for account, blocks in ((public, allocate_public), (tier, allocate - allocate_public)):
        held[account] += blocks
        used[account] += blocks
    return Plan(
        form, path, tails, holds, owners, allocate, allocate_public, held, used, taken, taken_lapsed
    )  # fmt: skip


def lacks_slots(sequences: int, tier: Account, free_slots: int) -> bool:
    """Whether so many sequences of the tier wait for slots whatever blocks they need: too few are free, and those that
    the tier gets back from others are too few as well."""
    return sequences > free_slots and tier.running + sequences > tier.slots


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` says what it waits for; None: it may enter. `entitled`: what others borrowed comes back for it."""

    entitled: bool
    reason: WaitReason | None = None


def verdict(
    change: Plan, request: Request, tier: Account, accounts: Sequence[Account], public: Account, capacity: int,
    free: int, free_slots: int, *, idle: bool,
) -> Verdict:  # fmt: skip
    """Whether the rules let the request in. `idle`: nothing runs and nothing else can be admitted. O(accounts)."""
    entitled = tier.held + change.held[tier] <= tier.nominal
    sequences = len(change.shape.live)
    if lacks_slots(sequences, tier, free_slots) or (sequences > free_slots and not entitled):
        return Verdict(entitled, WaitReason.SLOTS)
    if entitled or idle:
        return Verdict(entitled)
    if tier.waiting[0] is not request:
        return Verdict(entitled, WaitReason.OLDER)
    if tier.held + change.held[tier] > tier.limit:
        return Verdict(entitled, WaitReason.LIMIT)
    held = {account: account.held + change.held[account] for account in accounts}
    if sum(held.values()) > capacity:
        return Verdict(entitled, WaitReason.ROOM)
    tiers = [account for account in accounts if account is not public]
    if held[public] + sum(max(held[account], account.kept_from_others()) for account in tiers) > capacity:
        return Verdict(entitled, WaitReason.LENDING)
    if free + _evictable(change, tier, accounts, public) < change.allocate:
        return Verdict(entitled, WaitReason.ROOM)
    return Verdict(entitled)


def _evictable(change: Plan, tier: Account, accounts: Sequence[Account], public: Account) -> int:
    """Cached blocks that a request beyond nominal may take: lapsed ones, excess over effective quotas, its own.

    `change.used` counts the fresh blocks too, which matters to no account but the asker's own and the public share's.
    """
    total = 0
    for account in accounts:
        cached = account.cached - change.taken[account]
        if account is tier:
            total += cached
            continue
        lapsed = account.lapsed - change.taken_lapsed[account]
        used = account.used + change.used[account]
        # Inside the public share fresh blocks replace idle ones, which is the same sum: what is beyond the share.
        total += lapsed + min(cached - lapsed, max(0, used - lapsed - account.effective))
    return total
