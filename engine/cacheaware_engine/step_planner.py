"""Plans a step: the order of its rows, who reads what together, and where new keys and values go.

A step mixes sequences that add one token (decodes) with sequences that add many (chunks). Rows are ordered so that
groups and buckets are slices: nothing is scattered. What tables say is kept from step to step (`block_tables.py`); what
each kind of layer reads of them is `step_reads.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.block_tables import BlockTable, BlockTables
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.prefix_groups import PrefixGroup, PrefixTree
from cacheaware_engine.step_plan import SequenceWork, Shared, StepPlan, Window
from cacheaware_engine.step_reads import Item, Native, StepReads


class StepPlanner:
    """Plans steps over one store. One caller at a time."""

    def __init__(
        self,
        store: KvStore,
        dtype: torch.dtype,
        costs: AttentionCosts,
        windows: Collection[Window] = (None,),
        native: Native | None = None,
    ) -> None:
        """`dtype` is that of scores' masks, the compute dtype; `windows` are those of layers. `native` tells
        what the native library is used for; None: for nothing."""
        self._store = store
        self._dtype = dtype
        self._costs = costs
        self._windows = frozenset(windows)
        self._native = native
        self._tables = BlockTables(store.block_size, store.device)
        self._tree: PrefixTree | None = None  # of the step before

    def plan(self, work: Sequence[SequenceWork]) -> StepPlan:
        """Index tensors for `work`."""
        size = self._store.block_size
        tables = self._tables.of_step([item.table for item in work])
        items = [_item(one, table, size) for one, table in zip(work, tables, strict=True)]
        names = [table.name for table in tables]
        tree = PrefixTree([table.blocks for table in tables], [item.full for item in items], names, self._tree)
        self._tree = tree
        decodes, decode_groups = self._in_groups(items, tree, [i for i, item in enumerate(items) if item.rows == 1])
        chunks, chunk_groups = self._in_groups(items, tree, [i for i, item in enumerate(items) if item.rows > 1])
        rows = 0
        for index in (*decodes, *chunks):
            items[index].row = rows
            rows += items[index].rows
        groups = [*decode_groups, *chunk_groups]
        reads = StepReads(items, decodes, chunks, groups, tree, self._store, self._dtype, self._costs, self._native)
        order = [(work[index], items[index]) for index in (*decodes, *chunks)]
        sampled = [item.row + offset for item, one in zip(items, work, strict=True) for offset in one.wanted]
        return StepPlan(
            tokens=self._tensor([token for one, _ in order for token in one.tokens]),
            positions=self._tensor([position for _, item in order for position in range(item.start, item.end)]),
            slots=self._written(items, decodes, chunks),
            sampled=self._tensor(sampled),
            reads={
                window: reads.everything() if window is None else reads.windowed(window) for window in self._windows
            },
            groups=tuple(Shared(len(group.members), group.blocks * size) for group in groups),
        )

    def _in_groups(
        self, items: Sequence[Item], tree: PrefixTree, indices: Sequence[int]
    ) -> tuple[list[int], list[PrefixGroup]]:
        """The same indices with groups side by side, and the groups, in that order; equally long ones near each
        other."""
        size = self._store.block_size
        found = tree.groups(set(indices), lambda members, blocks: self._costs.gain(members, blocks * size))
        groups = [
            PrefixGroup(tuple(sorted(group.members, key=lambda index: -items[index].end)), group.blocks)
            for group in found
        ]
        groups.sort(key=lambda group: group.blocks * size - items[group.members[0]].end)
        grouped = {member for group in groups for member in group.members}
        singles = sorted((index for index in indices if index not in grouped), key=lambda index: -items[index].end)
        return [*(member for group in groups for member in group.members), *singles], groups

    def _written(self, items: Sequence[Item], decodes: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Slots of the step's own tokens, in the order of rows."""
        size = self._store.block_size
        own = [
            item.table.blocks[item.start // size] * size + item.start % size for item in map(items.__getitem__, decodes)
        ]
        added = [items[index].table.slots(items[index].start, items[index].end) for index in chunks]
        return torch.cat([self._tensor(own), *added]) if added else self._tensor(own)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._store.device)


def _item(work: SequenceWork, table: BlockTable, block_size: int) -> Item:
    rows, start = len(work.tokens), work.start
    assert rows, "a sequence in a step adds at least one token"
    assert start >= 0, f"a sequence cannot start at position {start}"
    covered = len(table.blocks) * block_size
    assert covered >= start + rows, f"the table covers {covered} tokens, and the work ends at {start + rows}"
    return Item(table, start, rows, start // block_size)
