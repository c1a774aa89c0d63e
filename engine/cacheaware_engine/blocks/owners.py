"""Who pays: one account for each tier, and one for the public share.

An account knows what its owner may use and what it uses. The blocks themselves, and who holds them, are `residents`'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cacheaware_api import wire

from .heaps import BlockHeap
from .requests import Request

PUBLIC = "<public>"
"""The public share as an owner, and as the tier of requests that prewarm public prefixes. No tier has this name."""


@dataclass(slots=True)
class Totals:
    """Counters that only grow."""

    evicted: int = 0  # cached blocks
    reclaimed: int = 0  # blocks freed so that another tier got its nominal back
    preempted: int = 0  # requests that had to wait again
    hit_tokens: int = 0
    query_tokens: int = 0


class Account:
    """One owner's quota, its blocks and its sequences.

    `used` = `held` + cached; `lapsed` counts cached blocks past their retention. `leaves` are its cached blocks without
    a resident child and within their retention, `idle` all its cached blocks; both least recent first.
    """

    __slots__ = (
        "draining",
        "effective",
        "held",
        "idle",
        "lapsed",
        "leaves",
        "lending",
        "limit",
        "name",
        "nominal",
        "priority",
        "retention",
        "running",
        "slots",
        "totals",
        "used",
        "waiting",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.nominal = 0
        self.effective = 0
        self.limit = 0
        self.lending = 0
        self.priority: float = 0
        self.retention: float | None = None  # seconds; None: protected as long as it is within `effective`
        self.slots = 0  # sequences it may always run
        self.draining = False  # left out of the quotas: forgotten once it is empty

        self.used = 0
        self.held = 0
        self.lapsed = 0
        self.leaves = BlockHeap()
        self.idle = BlockHeap()
        self.running = 0  # sequences
        self.waiting: list[Request] = []  # in arrival order
        self.totals = Totals()

    @property
    def cached(self) -> int:
        return self.used - self.held

    @property
    def empty(self) -> bool:
        return self.used == 0 and self.running == 0 and not self.waiting

    def over(self, asking: Account) -> int:
        """How far it is beyond its effective quota, counting the block that it is asking for."""
        return self.used + (self is asking) - self.effective

    def kept_from_others(self) -> int:
        """Nominal blocks that others are never admitted into, however idle they are."""
        return self.nominal - self.lending

    # -- quotas -------------------------------------------------------------------------------------------------------

    def set_quota(self, quota: wire.TierQuota, capacity: int, slots: int) -> None:
        self.nominal = quota.nominal
        self.effective = quota.effective
        self.limit = min(capacity, quota.limit)
        self.lending = quota.lending
        self.priority = quota.priority
        self.retention = quota.retention_s
        self.slots = slots
        self.draining = False

    def open(self, capacity: int) -> None:
        """Before there are quotas: nothing guaranteed, refused or protected, so that all tiers share one LRU."""
        self.limit = capacity
        self.retention = 0

    def drain(self) -> None:
        """Its tier is gone: blocks that others still use move to them, the rest goes."""
        self.nominal = self.effective = self.limit = self.lending = self.slots = 0
        self.priority = -math.inf
        self.draining = True

    def set_share(self, share: int) -> None:
        """The quota of the public owner: it neither borrows nor lends, and is last in ties."""
        self.nominal = self.effective = self.limit = share
        self.priority = math.inf


def most_an_account_can_hold(account: Account, accounts: Iterable[Account], capacity: int) -> int:
    """The bound on one request: its limit, and all that the others do not keep for themselves."""
    return min(account.limit, capacity - sum(other.kept_from_others() for other in accounts if other is not account))
