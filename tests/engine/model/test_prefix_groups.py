"""Groups are found from shared blocks, disjoint, and chosen so that the sum of gains is the largest possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.attention_costs import NEVER, SEPARATELY, TOGETHER, AttentionCosts, Reading, measure
from cacheaware_engine.prefix_groups import PrefixTree, choose_groups


def blocks_saved(members: int, blocks: int) -> float:
    return (members - 1) * blocks - 1.5


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        pytest.param([[1, 2, 3], [1, 2, 4], [1, 2, 5]], [((0, 1, 2), 2)], id="one-prefix"),
        pytest.param([[1, 2, 3], [4, 5, 6]], [], id="nothing-shared"),
        pytest.param([[1, 2], [3, 4], [1, 9], [3, 4]], [((1, 3), 2)], id="too-little-gain-is-left-alone"),
        pytest.param(
            [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7, 8, 9, 5], [1, 7, 8, 9, 6]],
            [((0, 1), 4), ((2, 3), 4)],
            id="two-branches-beat-their-root",
        ),
        pytest.param(
            [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8], [1, 2, 3, 9, 9]],
            [((0, 1, 2, 3), 3)],
            id="a-root-beats-its-branches",
        ),
    ],
)
def test_groups_of_known_tables(tables: list[list[int]], expected: list[tuple[tuple[int, ...], int]]) -> None:
    groups = choose_groups(tables, [len(table) for table in tables], blocks_saved)
    assert sorted((tuple(sorted(group.members)), group.blocks) for group in groups) == expected


def test_a_group_is_no_longer_than_what_its_members_may_share() -> None:
    (group,) = choose_groups([[1, 2, 3, 4], [1, 2, 3, 4]], [4, 3], blocks_saved)
    assert group.blocks == 3
    assert choose_groups([[1, 2, 3, 4], [1, 2, 3, 4]], [4, 0], blocks_saved) == []


def test_prompts_that_branch_thousands_of_times_are_no_problem() -> None:
    tables = [[*range(length), 10_000 + length] for length in range(1, 2000)]
    assert choose_groups(tables, [len(table) for table in tables], blocks_saved)


def best_gain(tables: list[list[int]]) -> float:
    """Over every set of branches of which none is part of another: slow, and plainly right."""
    branches: dict[frozenset[int], int] = {}  # who is on a branch, and how far they go together
    for table in tables:
        for blocks in range(1, len(table) + 1):
            on_it = frozenset(i for i, other in enumerate(tables) if other[:blocks] == table[:blocks])
            if len(on_it) > 1:
                branches[on_it] = max(blocks, branches.get(on_it, 0))
    best = 0.0
    for count in range(1, len(branches) + 1):
        for chosen in itertools.combinations(branches, count):
            if sum(map(len, chosen)) == len(frozenset().union(*chosen)):
                best = max(best, sum(blocks_saved(len(members), branches[members]) for members in chosen))
    return best


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=6))
def test_no_choice_of_branches_gains_more(paths: list[list[int]]) -> None:
    # A block is in one place of the tree: its number is its path.
    numbers: dict[tuple[int, ...], int] = {}
    tables = [[numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))] for path in paths]
    groups = choose_groups(tables, [len(table) for table in tables], blocks_saved)
    members = [member for group in groups for member in group.members]
    assert len(members) == len(set(members))
    assert sum(blocks_saved(len(group.members), group.blocks) for group in groups) == pytest.approx(best_gain(tables))
    for group in groups:
        assert len({tuple(tables[member][: group.blocks]) for member in group.members}) == 1


paths_of_steps = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


@given(paths_of_steps)
def test_what_is_kept_of_the_step_before_changes_nothing(changes: list[tuple[int, list[int], int]]) -> None:
    """Tables grow, or become others under new names, and of each any part may be usable."""
    numbers: dict[tuple[int, ...], int] = {}
    paths: list[list[int]] = [[0], [0], [0], [1]]
    names, usable = [0, 1, 2, 3], [1, 1, 1, 1]
    before = None
    for number, (which, more, cut) in enumerate(changes, 4):
        if cut == 9:
            paths[which], names[which] = list(more), number
        else:
            paths[which] = paths[which] + more
        usable[which] = max(0, len(paths[which]) - cut % 3)
        usable = [min(blocks, len(path)) for blocks, path in zip(usable, paths, strict=True)]
        tables = [[numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))] for path in paths]
        kept, new = PrefixTree(tables, usable, list(names), before), PrefixTree(tables, usable)
        assert kept.groups(range(4), blocks_saved) == new.groups(range(4), blocks_saved)
        assert kept.groups({1, 3}, blocks_saved) == choose_groups(
            tables, [blocks if index in (1, 3) else 0 for index, blocks in enumerate(usable)], blocks_saved
        )
        used = [table[:blocks] for table, blocks in zip(tables, usable, strict=True)]
        assert kept.distinct_blocks() == new.distinct_blocks() == len({block for table in used for block in table})
        for index, table in enumerate(tables):
            for block in table[usable[index] : usable[index] + 1]:
                assert kept.goes_on(index, block) == any(
                    block in other for place, other in enumerate(used) if place != index
                )
        before = kept


class Device:
    """A device with known costs, in virtual time; each reading is disturbed but for every fifth."""

    def __init__(self, costs: AttentionCosts) -> None:
        self.costs, self.now, self.calls = costs, 0.0, 0

    def attend(self, reading: Reading) -> None:
        costs = self.costs
        self.now += 1e-5 + reading.members * reading.own * costs.own_token
        if reading.shared:
            self.now += costs.call + reading.shared * (costs.token + reading.members * costs.row)
        self.calls += 1
        self.now += 0.0 if self.calls % 5 == 0 else 3e-4

    def clock(self) -> float:
        return self.now


def test_costs_are_measured_through_disturbances() -> None:
    device = Device(AttentionCosts(own_token=4e-7, call=5e-5, token=1e-7, row=2e-8))
    measured = measure(device.attend, 2048, clock=device.clock, patience_s=0.01)
    for name in ("own_token", "call", "token", "row"):
        assert getattr(measured, name) == pytest.approx(getattr(device.costs, name), rel=1e-6)


def test_sharing_pays_from_a_length_that_falls_with_the_members() -> None:
    costs = AttentionCosts(own_token=4e-7, call=5e-5, token=1e-7, row=2e-8)
    lengths = [costs.least_prefix(members) for members in (2, 4, 8, 16)]
    assert lengths == sorted(lengths, reverse=True)
    for members, length in zip((2, 4, 8, 16), lengths, strict=True):
        assert costs.gain(members, length) > 0 >= costs.gain(members, length - 1)
    assert costs.gain(1, costs.least_run()) > 0 >= costs.gain(1, costs.least_run() - 1)


def test_a_device_on_which_sharing_never_pays_never_shares() -> None:
    costs = AttentionCosts(own_token=1e-7, call=1e-5, token=4e-7, row=1e-7)
    assert costs.least_prefix(64) == costs.least_run() == NEVER
    assert SEPARATELY.least_prefix(64) == NEVER
    assert TOGETHER.least_prefix(2) == 1
