"""The split of the cache that earns most, and how to walk there in small steps. Pure, on tables of whole percent.

`worth[tier][q]` is what a tier's hits are worth with q percent of the cache; it never falls with q. Finding the best
split is UCP's lookahead: give the next units to the tier that gains most per unit over any number of units, so that a
tier that gains nothing before its whole loop fits is not overlooked. O(tiers · units²).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Worth = Mapping[str, Sequence[float]]

UNIT = 2  # percent: finer differences are within the error of the curves
MOST_TRANSFERS = 16  # a status has room for so many
_NOTHING = 1e-12  # of the best that is possible: floating point, not gain


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Transfer:
    giver: str
    taker: str
    percent: int
    gain: float  # of worth


def total_worth(worth: Worth, shares: Mapping[str, int]) -> float:
    return sum(worth[name][share] for name, share in shares.items())


def best_shares(worth: Worth, bounds: Mapping[str, Bounds], current: Mapping[str, int]) -> dict[str, int]:
    """The split, of as much as `current` has, that is worth most. What gains nobody anything stays where it is."""
    shares = {name: bound.least for name, bound in bounds.items()}
    left = sum(current.values()) - sum(shares.values())
    nothing = _NOTHING * sum(worth[name][bounds[name].most] for name in bounds)
    while left > 0:
        best_rate, best_name, best_units = nothing, None, 0
        # Where two gain alike, the one that has it already keeps it.
        for name in sorted(shares, key=lambda name: shares[name] >= current[name]):
            have, room = shares[name], min(left, bounds[name].most - shares[name])
            table = worth[name]
            for units in _sizes(room):
                rate = (table[have + units] - table[have]) / units
                if rate > best_rate:
                    best_rate, best_name, best_units = rate, name, units
        if best_name is None:
            break
        shares[best_name] += best_units
        left -= best_units
    for wanted in (current, {name: bound.most for name, bound in bounds.items()}):
        for name in shares:
            more = min(left, max(0, wanted[name] - shares[name]))
            shares[name] += more
            left -= more
    return shares


def _sizes(room: int) -> list[int]:
    sizes = list(range(UNIT, room + 1, UNIT))
    return [*sizes, room] if room % UNIT else sizes


def best_step(worth: Worth, current: Mapping[str, int], target: Mapping[str, int], budget: int) -> list[Transfer]:
    """Transfers towards `target` of at most `budget` percent in all, the most valuable first. Each one gains something,
    so a walk of such steps only rises and never comes back to where it was.
    """
    shares = dict(current)
    nothing = _NOTHING * (1 + total_worth(worth, target))
    transfers: dict[tuple[str, str], Transfer] = {}
    while budget > 0 and len(transfers) < MOST_TRANSFERS:
        best = _best_transfer(worth, shares, target, budget)
        if best is None or best.gain <= nothing:
            break
        shares[best.giver] -= best.percent
        shares[best.taker] += best.percent
        budget -= best.percent
        pair = best.giver, best.taker
        before = transfers.get(pair, Transfer(*pair, 0, 0.0))
        transfers[pair] = Transfer(*pair, before.percent + best.percent, before.gain + best.gain)
    return list(transfers.values())


def _best_transfer(worth: Worth, shares: Mapping[str, int], target: Mapping[str, int], budget: int) -> Transfer | None:
    best: Transfer | None = None
    for giver, has in shares.items():
        spare = has - target[giver]
        lost = worth[giver]
        for taker, share in shares.items():
            won = worth[taker]
            for percent in range(1, min(budget, spare, target[taker] - share) + 1):
                gain = won[share + percent] - won[share] - (lost[has] - lost[has - percent])
                if best is None or gain > best.gain:
                    best = Transfer(giver, taker, percent, gain)
    return best


def step_towards(current: Mapping[str, int], target: Mapping[str, int], budget: int) -> list[Transfer]:
    """Transfers towards `target` whatever they gain, from the tier furthest above it to the one furthest below."""
    shares = dict(current)
    transfers: list[Transfer] = []
    while budget > 0 and len(transfers) < MOST_TRANSFERS:
        giver = max(shares, key=lambda name: shares[name] - target[name])
        taker = max(shares, key=lambda name: target[name] - shares[name])
        percent = min(budget, shares[giver] - target[giver], target[taker] - shares[taker])
        if percent <= 0:
            break
        shares[giver] -= percent
        shares[taker] += percent
        budget -= percent
        transfers.append(Transfer(giver, taker, percent, 0.0))
    return transfers
