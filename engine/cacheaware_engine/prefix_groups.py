"""Which sequences of a step read a shared prefix together: groups found from shared blocks, chosen by gain. Pure.

Sequences share keys and values exactly where their block tables begin alike. The tables form a tree of prefixes; of it
one level is chosen, disjoint groups, such that the sum of gains is largest. What a group gains is told by the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ne

MOST_LEVELS = 64
"""Levels of the tree that are looked at: a bound on work, far beyond how often real prompts branch."""

Gain = Callable[[int, int], float]
"""What is gained if so many members read so many blocks once instead of each for itself; at most 0: nothing."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    members: tuple[int, ...]  # indices into what was given, two or more
    blocks: int  # leading blocks that all of them share


def choose_groups(tables: Sequence[Sequence[int]], usable: Sequence[int], gain: Gain) -> list[PrefixGroup]:
    """Groups of tables that begin alike; `usable` is how many leading blocks of each may be read as a group's."""
    clusters: dict[int, list[tuple[list[int], int]]] = {}
    for index, table in enumerate(tables):
        if usable[index] > 0:
            clusters.setdefault(table[0], []).append((list(table[: usable[index]]), index))
    groups: list[PrefixGroup] = []
    for cluster in clusters.values():
        if len(cluster) > 1:
            cluster.sort()
            shared = [_common(one, other) for (one, _), (other, _) in itertools.pairwise(cluster)]
            groups.extend(_best([index for _, index in cluster], shared, gain, MOST_LEVELS)[1])
    return groups


def _best(members: Sequence[int], shared: Sequence[int], gain: Gain, levels: int) -> tuple[float, list[PrefixGroup]]:
    """The best choice among neighbours in sorted order; `shared[i]` blocks are common to members i and i + 1.

    Either all are one group on what they all share, or each branch of the tree below that decides for itself.
    """
    if len(members) < 2 or levels == 0:
        return 0.0, []
    blocks = min(shared)
    whole = gain(len(members), blocks) if blocks else 0.0
    parts_gain, parts = 0.0, []
    start = 0
    for index in [*(i for i, common in enumerate(shared) if common == blocks), len(shared)]:
        branch_gain, branch = _best(members[start : index + 1], shared[start:index], gain, levels - 1)
        parts_gain += branch_gain
        parts.extend(branch)
        start = index + 1
    if whole > max(parts_gain, 0.0):
        return whole, [PrefixGroup(tuple(members), blocks)]
    return parts_gain, parts


def _common(one: list[int], other: list[int]) -> int:
    """Leading blocks that two tables have in common."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return list(map(ne, one, other)).index(True)
