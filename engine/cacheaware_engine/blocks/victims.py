"""Who gives way when a request needs a block and none is free: the order of victims. Pure decisions; `pool` acts.

In order: lapsed cached blocks; cached blocks of the owner furthest over its effective quota; reclaim, which takes
cached blocks and then running requests from owners over their nominal; the asker's own cached blocks; for growth any
cached block; the youngest running request that is younger than the asker. Leaves of the key tree go, the least recent
first and tail first. Where prefixes are shared across tiers, blocks of others may be below all that an owner has: then
its least recent block goes with them, which are of no use without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .owners import Account
from .requests import Request
from .residents import Block, Residents

PROTECTED_RECLAIMS = 2  # a request that was reclaimed this often is taken last


@dataclass(frozen=True, slots=True)
class Ask:
    """Who needs a block, and what it may take."""

    account: Account
    number: int
    growth: bool  # a running request grows
    entitled: bool  # within nominal: what others borrowed comes back
    any_cached: bool  # growth, and admission into an idle engine
    preempts: bool = True  # running requests may be made to give way


@dataclass(frozen=True, slots=True)
class Evict:
    """A cached block goes, with all below it."""

    block: Block
    reclaim: bool = False


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request waits again; its full blocks stay cached."""

    request: Request
    reclaim: bool = False


Victim = Evict | Preempt
Tiers = Callable[[Request], Account]


def next_victim(
    ask: Ask, accounts: Sequence[Account], residents: Residents, running: Sequence[Request], tiers: Tiers
) -> Victim | None:
    """What frees a block next, or gets nearer to it; None: the asker waits or yields.

    O(accounts), and O(running) where requests are preempted; both are bounded by settings, not by blocks.
    """
    if lapsed := residents.lapsed_leaves.first():
        return Evict(lapsed)
    if excess := _most_over(ask.account, accounts):
        return Evict(excess)
    mine = ask.account
    reclaims = (ask.growth or ask.entitled) and mine.used < mine.nominal
    if reclaims:
        owing = [account for account in accounts if account.used > account.nominal]
        if cached := _least_recent(owing):
            return Evict(cached, reclaim=True)
        if request := most_owing(running, tiers, {account: account.used - account.nominal for account in owing}):
            return Preempt(request, reclaim=True)
    if own := _first_to_go(mine):
        return Evict(own)
    if ask.any_cached and (cached := _least_recent(accounts)):
        return Evict(cached)
    if ask.growth or reclaims:
        giving = [request for request in running if (owner := tiers(request)) is mine or owner.used > owner.nominal]
        return _youngest(giving, ask.number)
    return None


def victim_at_limit(ask: Ask, running: Sequence[Request], tiers: Tiers) -> Victim | None:
    """What brings the asker's own tier below its limit. Idle blocks are off the path of whoever asks: it holds that."""
    if own := ask.account.idle.first():
        return Evict(own)
    if ask.growth:
        return _youngest([request for request in running if tiers(request) is ask.account], ask.number)
    return None


def most_owing(running: Iterable[Request], tiers: Tiers, excess: dict[Account, int]) -> Request | None:
    """The request that reclaim preempts, among those of accounts with an excess (in blocks, or in sequences).

    Reclaimed fewer than twice first (a tier without nominal has no such protection), then the most over, the least
    important tier, the youngest.
    """

    def rank(request: Request) -> tuple[bool, int, float, int]:
        account = tiers(request)
        exposed = request.reclaims < PROTECTED_RECLAIMS or account.nominal == 0
        return (exposed, excess[account], -account.priority, request.number or 0)

    return max((request for request in running if tiers(request) in excess), key=rank, default=None)


def _most_over(asking: Account, accounts: Sequence[Account]) -> Block | None:
    """What goes first of the owner furthest over its effective quota; ties go to the less important, then by name."""
    worst: tuple[int, float] | None = None
    found: Block | None = None
    for account in accounts:
        over = account.over(asking)
        if over > 0 and (worst is None or (over, -account.priority) > worst) and (block := _first_to_go(account)):
            worst, found = (over, -account.priority), block
    return found


def _first_to_go(account: Account) -> Block | None:
    return account.leaves.first() or account.idle.first()


def _least_recent(accounts: Sequence[Account]) -> Block | None:
    leaves = [leaf for account in accounts if (leaf := account.leaves.first())]
    blocks = leaves or [block for account in accounts if (block := account.idle.first())]
    return min(blocks, key=lambda block: block.order, default=None)


def _youngest(requests: Sequence[Request], number: int) -> Preempt | None:
    youngest = max(requests, key=lambda request: request.number or 0, default=None)
    if youngest is None or (youngest.number or 0) <= number:
        return None
    return Preempt(youngest)
