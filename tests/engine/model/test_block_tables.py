"""What is kept of block tables from step to step is what working them out anew gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.block_tables import BlockTable, BlockTables
from cacheaware_engine.kv_reads import Run

SIZE = 4
OFFSETS = torch.arange(SIZE)


def slots(blocks: list[int]) -> list[int]:
    return [block * SIZE + offset for block in blocks for offset in range(SIZE)]


@pytest.mark.parametrize(
    ("blocks", "least_run", "runs", "between"),
    [
        pytest.param([], 1, [], [], id="empty"),
        pytest.param([5], 1, [Run(20, 24)], [], id="one-block"),
        pytest.param([5], 5, [], [(0, 1)], id="one-block-is-too-short"),
        pytest.param([8, 9, 10, 3, 4, 7], 12, [Run(32, 44)], [(3, 6)], id="only-long-stretches-are-read-in-place"),
        pytest.param([3, 7, 8, 9, 1], 12, [Run(28, 40)], [(0, 1), (4, 5)], id="what-is-left-lies-on-both-sides"),
        pytest.param([5, 4, 3], 8, [], [(0, 3)], id="backwards-is-not-in-place"),
    ],
)
def test_a_table_is_divided_into_stretches(
    blocks: list[int], least_run: int, runs: list[Run], between: list[tuple[int, int]]
) -> None:
    assert BlockTable(blocks, OFFSETS).parts(0, len(blocks), least_run) == (runs, between)


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 9)),
            st.tuples(st.just("replace"), st.integers(0, 9)),
            st.tuples(st.just("other"), st.lists(st.integers(0, 9), max_size=12)),
        ),
        max_size=8,
    ),
    st.integers(1, 13),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_a_table_that_is_followed_is_as_if_it_were_new(
    blocks: list[int], changes: list[tuple[str, object]], least_run: int, part: tuple[int, int]
) -> None:
    followed = BlockTable(blocks, OFFSETS)
    for change, value in changes:
        if isinstance(value, list):
            blocks[:] = value
        elif change == "append":
            blocks.append(value)  # type: ignore[arg-type]  # the strategy pairs appends with numbers
        elif blocks:
            blocks[len(blocks) // 2] = value  # type: ignore[call-overload]  # and replacements too
        followed.follow(blocks)
    new = BlockTable(blocks, OFFSETS)
    first, last = sorted(min(end, len(blocks)) for end in part)
    assert followed.blocks == blocks
    assert followed.numbers.tolist() == blocks
    assert followed.slots(0, len(blocks) * SIZE).tolist() == slots(blocks)
    assert followed.parts(first, last, least_run) == new.parts(first, last, least_run)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 13))
def test_stretches_and_what_is_between_them_are_all_of_a_table(blocks: list[int], least_run: int) -> None:
    runs, between = BlockTable(blocks, OFFSETS).parts(0, len(blocks), least_run)
    read = [slot for run in runs for slot in range(run.first, run.last)]
    gathered = [slot for low, high in between for slot in slots(blocks[low:high])]
    assert sorted(read + gathered) == sorted(slots(blocks))
    assert all(len(run) >= least_run for run in runs)


def test_tables_are_known_by_what_they_say_and_not_by_where_they_are() -> None:
    tables = BlockTables(SIZE, torch.device("cpu"))
    first, second = [1, 2], [7]
    before = tables.of_step([first, second, first])
    assert [table.blocks for table in before] == [[1, 2], [7], [1, 2]]
    first.append(3)
    second[:] = [5, 6]
    after = tables.of_step([second, first])
    assert [table.blocks for table in after] == [[5, 6], [1, 2, 3]]
    assert after[1] is before[0], "what was known of it is used again"
