"""What is inside the engine: sequences in flight per tier, each reservation given back exactly once. Pure.

Who may have how many is decided by the scheduler, from `slots`; this is the account of it, and of the blocks where the
engine keeps none.
"""

from __future__ import annotations

from cacheaware_api import wire
from cacheaware_sidecar.block_budget import BlockBudget, Demand
from cacheaware_sidecar.scheduling import Slots

DEFAULT_SLOTS = Slots().total


def slots_of(ledger: wire.Ledger | None, configured: int | None) -> Slots:
    """Slots as configured, else as the ledger says; a configured total scales what the tiers may always have."""
    if ledger is None:
        return Slots(configured or DEFAULT_SLOTS)
    nominal = {name: tier.slots.nominal for name, tier in ledger.tiers.items()}
    total = ledger.max_sequences or max(sum(nominal.values()), DEFAULT_SLOTS)
    if configured is None:
        return Slots(total, nominal)
    return Slots(configured, {name: -(-slots * configured // total) for name, slots in nominal.items()})


class Reservation:
    """A request's sequences in the engine, until `release`; a second release changes nothing."""

    __slots__ = ("_budget", "request_id", "sequences", "tier")

    def __init__(self, budget: SlotBudget, request_id: str, tier: str, sequences: int) -> None:
        self._budget: SlotBudget | None = budget
        self.request_id = request_id
        self.tier = tier
        self.sequences = sequences

    def release(self) -> bool:
        """True the first time."""
        budget, self._budget = self._budget, None
        if budget is None:
            return False
        budget._give_back(self)
        return True


class SlotBudget:
    """`blocks` is given where the engine keeps no account of blocks: then they are counted here too."""

    def __init__(self, slots: Slots | None = None, blocks: BlockBudget | None = None) -> None:
        self.slots = slots or Slots()
        self.blocks = blocks
        self._requests: dict[str, Reservation] = {}
        self._sequences: dict[str, int] = {}  # by tier
        self._total = 0

    @property
    def requests(self) -> int:
        return len(self._requests)

    @property
    def sequences(self) -> int:
        return self._total

    def in_flight(self, tier: str) -> int:
        """Sequences of a tier."""
        return self._sequences.get(tier, 0)

    def reserve(self, request_id: str, tier: str, sequences: int, demand: Demand | None = None) -> Reservation:
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is in flight already")
        if self.blocks is not None and demand is not None:
            self.blocks.hold(request_id, tier, demand)
        reservation = Reservation(self, request_id, tier, sequences)
        self._requests[request_id] = reservation
        self._sequences[tier] = self.in_flight(tier) + sequences
        self._total += sequences
        return reservation

    def check_integrity(self) -> None:
        assert self._total == sum(self._sequences.values()) >= 0
        assert self._total == sum(reservation.sequences for reservation in self._requests.values())
        assert all(count > 0 for count in self._sequences.values())
        if self.blocks is not None:
            self.blocks.check_integrity()

    def _give_back(self, reservation: Reservation) -> None:
        del self._requests[reservation.request_id]
        if self.blocks is not None:
            self.blocks.release(reservation.request_id)
        self._total -= reservation.sequences
        left = self._sequences[reservation.tier] - reservation.sequences
        if left:
            self._sequences[reservation.tier] = left
        else:
            del self._sequences[reservation.tier]
