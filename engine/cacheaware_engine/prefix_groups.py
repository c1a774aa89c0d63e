"""Which sequences of a step read a shared prefix together: groups found from shared blocks, chosen by gain. Pure.

Sequences share keys and values exactly where their block tables begin alike. The tables form a tree of prefixes; of it
one level is chosen, disjoint groups, such that the sum of gains is largest. What a group gains is told by the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import lt

MOST_LEVELS = 64
"""Levels of the tree that are looked at: a bound on work, far beyond how often real prompts branch."""

Gain = Callable[[int, int], float]
"""What is gained if so many members read so many blocks once instead of each for itself; at most 0: nothing."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    members: tuple[int, ...]  # indices into what was given, two or more
    blocks: int  # leading blocks that all of them share


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Two or more tables with one first block, in the order of their blocks."""

    members: Sequence[int]
    shared: Sequence[int]  # leading blocks that members i and i + 1 have in common


class PrefixTree:
    """Block tables by their beginnings; of each so many leading blocks as are `usable` take part."""

    def __init__(
        self,
        tables: Sequence[Sequence[int]],
        usable: Sequence[int],
        names: Sequence[int] | None = None,
        before: PrefixTree | None = None,
    ) -> None:
        """`names` tell which tables are those that `before` knew, longer at most: what it found of them still holds
        where all of them part before they end."""
        self._tables = tables
        self._usable = usable
        self._names = names
        self._kept: dict[tuple[int, ...], _Cluster] = {}
        first: dict[int, list[int]] = {}
        for index, blocks in enumerate(usable):
            if blocks > 0:
                first.setdefault(tables[index][0], []).append(index)
        self._first = first
        self._clusters = [
            self._cluster(members, before._kept if before is not None else {})
            for members in first.values()
            if len(members) > 1
        ]
        self._places = {
            index: (cluster, place) for cluster in self._clusters for place, index in enumerate(cluster.members)
        }

    def distinct_blocks(self) -> int:
        """Usable blocks, each counted once however many tables begin with it."""
        return sum(self._usable) - sum(sum(cluster.shared) for cluster in self._clusters)

    def goes_on(self, index: int, block: int) -> bool:
        """Whether `block` is the next usable one of another table that begins with all of this one's."""
        depth = self._usable[index]
        if depth == 0:
            return block in self._first
        if index not in self._places:
            return False
        cluster, place = self._places[index]
        while place < len(cluster.shared) and cluster.shared[place] >= depth:  # who begins with all of it stands behind
            place += 1
            other = cluster.members[place]
            if self._usable[other] > depth and self._tables[other][depth] == block:
                return True
        return False

    def groups(self, among: Collection[int], gain: Gain) -> list[PrefixGroup]:
        """The groups of some of the tables with the largest sum of gains."""
        groups: list[PrefixGroup] = []
        for cluster in self._clusters:
            members, shared = cluster.members, cluster.shared
            if len(among) < len(self._usable):
                members, shared = _those(cluster, among)
            groups.extend(_best(members, shared, gain, MOST_LEVELS)[1])
        return groups

    def _cluster(self, members: Sequence[int], known: Mapping[tuple[int, ...], _Cluster]) -> _Cluster:
        name = (*members, *(self._names[index] for index in members)) if self._names is not None else ()
        cluster = known.get(name)
        if cluster is None or not self._part_early(cluster):
            cluster = self._sorted(members)
        if name and self._part_early(cluster):  # tables that end where they part may go on alike
            self._kept[name] = cluster
        return cluster

    def _part_early(self, cluster: _Cluster) -> bool:
        usable = [self._usable[index] for index in cluster.members]
        return all(map(lt, cluster.shared, usable)) and all(map(lt, cluster.shared, usable[1:]))

    def _sorted(self, members: Sequence[int]) -> _Cluster:
        ordered = sorted((list(self._tables[index][: self._usable[index]]), index) for index in members)
        shared = [_common(one, other) for (one, _), (other, _) in itertools.pairwise(ordered)]
        return _Cluster([index for _, index in ordered], shared)


def choose_groups(tables: Sequence[Sequence[int]], usable: Sequence[int], gain: Gain) -> list[PrefixGroup]:
    """Groups of tables that begin alike; `usable` is how many leading blocks of each may be read as a group's."""
    return PrefixTree(tables, usable).groups(range(len(tables)), gain)


def _those(cluster: _Cluster, among: Collection[int]) -> tuple[list[int], list[int]]:
    """What is left of a cluster without the others: two that become neighbours share the least on the way."""
    members: list[int] = []
    shared: list[int] = []
    least: int | None = None
    for index, common in zip(cluster.members, [0, *cluster.shared], strict=True):
        least = common if least is None else min(least, common)
        if index in among:
            if members:
                shared.append(least)
            members.append(index)
            least = None
    return members, shared


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
    """Leading blocks that two tables have in common: halving what is left to compare, so that no block is looked at
    by itself."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
