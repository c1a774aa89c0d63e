"""What stands in the place of vLLM's queue of free blocks: the tables of the block pool.

vLLM asks this queue for blocks one request at a time and gives back what nobody refers to. Which block comes next is
decided already: it is in the table of the request that is being served. What the queue keeps is the number that vLLM
counts as free, blocks without a reference; among them are cached ones and those that wait in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

NULL_BLOCKS = 1  # vLLM's block 0 is a placeholder that holds nothing


class TableQueue:
    """`take` says which blocks of the pool the request being served gets next."""

    def __init__(self, blocks: Sequence[Any], take: Callable[[int], Iterable[int]]) -> None:
        self._blocks = blocks
        self._take = take
        self.num_free_blocks = len(blocks) - NULL_BLOCKS

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        if n == 0:
            return []
        taken = [self._blocks[block_id + NULL_BLOCKS] for block_id in self._take(n)]
        self.num_free_blocks -= n
        return taken

    def remove(self, block: Any) -> None:
        """A cached block is hit."""
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        self.num_free_blocks += 1

    def append_n(self, blocks: Sequence[Any]) -> None:
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        return [block for block in self._blocks if block.ref_cnt == 0 and not block.is_null]
