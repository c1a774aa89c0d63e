"""Groups are found from shared blocks, disjoint, and chosen so that the sum of gains is the largest possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.attention_costs import NEVER, SEPARATELY, TOGETHER, AttentionCosts, Reading, measure
from cacheaware_engine.kv_reads import Run, extents, split
from cacheaware_engine.prefix_groups import choose_groups


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
    """Over every way to divide the tables into groups: slow, and plainly right."""
    if not tables:
        return 0.0
    first, rest = tables[0], tables[1:]
    best = best_gain(rest)
    for size in range(1, len(rest) + 1):
        for chosen in itertools.combinations(range(len(rest)), size):
            together = [first, *(rest[index] for index in chosen)]
            common = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*together, strict=False))))
            others = [table for index, table in enumerate(rest) if index not in chosen]
            best = max(best, best_gain(others) + (blocks_saved(len(together), common) if common else 0.0))
    return best


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=6))
def test_no_choice_of_groups_gains_more(paths: list[list[int]]) -> None:
    # A block is in one place of the tree: its number is its path.
    numbers: dict[tuple[int, ...], int] = {}
    tables = [[numbers.setdefault(tuple(path[: i + 1]), len(numbers)) for i in range(len(path))] for path in paths]
    groups = choose_groups(tables, [len(table) for table in tables], blocks_saved)
    members = [member for group in groups for member in group.members]
    assert len(members) == len(set(members))
    assert sum(blocks_saved(len(group.members), group.blocks) for group in groups) == pytest.approx(best_gain(tables))
    for group in groups:
        assert len({tuple(tables[member][: group.blocks]) for member in group.members}) == 1


@pytest.mark.parametrize(
    ("table", "found"),
    [
        pytest.param([], [], id="empty"),
        pytest.param([5], [(0, 1)], id="one"),
        pytest.param([3, 4, 5, 9, 10, 2], [(0, 3), (3, 5), (5, 6)], id="three-stretches"),
        pytest.param([5, 4, 3], [(0, 1), (1, 2), (2, 3)], id="backwards-is-not-in-place"),
    ],
)
def test_stretches_of_neighbouring_blocks(table: list[int], found: list[tuple[int, int]]) -> None:
    assert extents(table) == found


def test_only_long_stretches_are_read_in_place() -> None:
    divided = split([8, 9, 10, 3, 4, 7], block_size=16, least_run=48)
    assert divided.runs == (Run(128, 176),)
    assert divided.scattered == (3, 4, 7)


class Device:
    """A device with known costs, in virtual time; each reading is disturbed but for every fifth."""

    def __init__(self, costs: AttentionCosts) -> None:
        self.costs, self.now, self.calls = costs, 0.0, 0

    def attend(self, reading: Reading) -> None:
        costs = self.costs
        self.now += 1e-5 + reading.members * reading.gathered * costs.gathered_token
        if reading.in_place:
            self.now += costs.call + reading.in_place * (costs.token + reading.members * costs.row)
        self.calls += 1
        self.now += 0.0 if self.calls % 5 == 0 else 3e-4

    def clock(self) -> float:
        return self.now


def test_costs_are_measured_through_disturbances() -> None:
    device = Device(AttentionCosts(gathered_token=4e-7, call=5e-5, token=1e-7, row=2e-8))
    measured = measure(device.attend, 2048, clock=device.clock, patience_s=0.01)
    for name in ("gathered_token", "call", "token", "row"):
        assert getattr(measured, name) == pytest.approx(getattr(device.costs, name), rel=1e-6)


def test_sharing_pays_from_a_length_that_falls_with_the_members() -> None:
    costs = AttentionCosts(gathered_token=4e-7, call=5e-5, token=1e-7, row=2e-8)
    lengths = [costs.least_prefix(members) for members in (2, 4, 8, 16)]
    assert lengths == sorted(lengths, reverse=True)
    for members, length in zip((2, 4, 8, 16), lengths, strict=True):
        assert costs.gain(members, length) > 0 >= costs.gain(members, length - 1)
    assert costs.gain(1, costs.least_run()) > 0 >= costs.gain(1, costs.least_run() - 1)


def test_a_device_on_which_sharing_never_pays_never_shares() -> None:
    costs = AttentionCosts(gathered_token=1e-7, call=1e-5, token=4e-7, row=1e-7)
    assert costs.least_prefix(64) == costs.least_run() == NEVER
    assert SEPARATELY.least_prefix(64) == NEVER
    assert TOGETHER.least_prefix(2) == 1
