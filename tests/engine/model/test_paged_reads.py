"""The work list of the native library: every token of every stretch once, and each row knows its parts."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_engine.paged_reads import LEAST, TILE, Stretch, paged_reads, piece_sizes


@st.composite
def steps(draw: st.DrawFn) -> list[Stretch]:
    """Rows one after the other, some in groups that read a prefix together before what is their own."""
    stretches: list[Stretch] = []
    row = 0
    for _ in range(draw(st.integers(1, 5))):
        members, prefix = draw(st.integers(1, 6)), draw(st.sampled_from([0, 0, 1, 130, 3000]))
        if prefix:
            stretches.append(Stretch(row, row + members, row, 0, prefix))
        own = draw(st.lists(st.integers(1, 1500), min_size=members, max_size=members))
        stretches.extend(
            Stretch(member, member + 1, member, prefix, prefix + tokens) for member, tokens in enumerate(own, row)
        )
        row += members
    for _ in range(draw(st.integers(0, 3))):  # prompts
        added, start, window = (
            draw(st.integers(1, 200)),
            draw(st.integers(0, 300)),
            draw(st.sampled_from([None, 1, 90])),
        )
        first = 0 if window is None else max(0, start + 1 - window)
        stretches.append(Stretch(row, row + added, row, first, start + added, start, window))
        row += added
    return stretches


def seen(stretch: Stretch, row: int) -> range:
    if stretch.start is None:
        return range(stretch.first, stretch.last)
    position = stretch.start + row - stretch.first_row
    first = stretch.first if stretch.window is None else max(stretch.first, position + 1 - stretch.window)
    return range(first, position + 1)


@given(stretches=steps(), kv_heads=st.integers(1, 8), threads=st.integers(1, 64))
def test_pieces_are_all_tokens_of_all_rows_and_each_once(stretches: list[Stretch], kv_heads: int, threads: int) -> None:
    rows = max(stretch.last_row for stretch in stretches)
    tables = [torch.full((2,), row, dtype=torch.int32) for row in range(rows)]
    reads = paged_reads(stretches, tables, kv_heads, threads)
    asked = Counter(
        (row, stretch.table, token)
        for stretch in stretches
        for row in range(stretch.first_row, stretch.last_row)
        for token in seen(stretch, row)
    )
    found: Counter[tuple[int, int, int]] = Counter()
    part_of: dict[int, int] = {}  # part -> row
    for first_row, members, table, first, last, before, low, high in reads.pieces.tolist():
        for row in range(first_row, first_row + members):
            part = before + row - first_row
            assert part not in part_of
            part_of[part] = row
            sees = range(max(first, low + row - first_row), min(last, high + row - first_row))
            found.update((row, int(reads.tables[table]), token) for token in sees)
    assert found == asked
    assert sorted(part_of) == list(range(reads.parts))
    starts = reads.row_starts.tolist()
    for row in range(rows):
        own = reads.row_parts[starts[row] : starts[row + 1]].tolist()
        assert sorted(own) == sorted(part for part, its_row in part_of.items() if its_row == row)


def test_one_long_context_keeps_all_threads_busy() -> None:
    reads = paged_reads([Stretch(0, 1, 0, 0, 3000)], [torch.zeros(200, dtype=torch.int32)], kv_heads=3, threads=8)
    assert len(reads.pieces) * 3 >= 3 * 8


def test_many_short_contexts_are_not_cut() -> None:
    stretches = [Stretch(row, row + 1, row, 0, 500) for row in range(64)]
    assert piece_sizes(stretches, kv_heads=3, threads=2) == [512] * 64


@given(st.integers(1, 20_000), st.integers(1, 16), st.integers(1, 64))
def test_a_piece_is_whole_tiles_and_worth_merging(tokens: int, kv_heads: int, threads: int) -> None:
    (size,) = piece_sizes([Stretch(0, 1, 0, 0, tokens)], kv_heads, threads)
    assert size % TILE == 0
    assert size >= min(tokens, LEAST)
