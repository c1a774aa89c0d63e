"""What the engine probably still has: a bounded record of the chunks that recent requests started with. Pure.

It holds every chunk's whole path: chunks go least recently used first, and a chunk goes before those that lead to it.
So what is known of a prompt is always a prefix of it: matching takes O(log chunks) look-ups, inserting O(chunks).
It knows no quotas and no blocks; the engine's ledger does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

DEFAULT_CAPACITY = 200_000  # chunks; about 50 MB


class PrefixIndex:
    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._known: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._known)

    def match(self, chunks: Sequence[bytes]) -> int:
        """How many leading chunks are known."""
        known = self._known
        least, most = 0, len(chunks)
        while least < most:
            middle = (least + most + 1) // 2
            if chunks[middle - 1] in known:
                least = middle
            else:
                most = middle - 1
        return least

    def insert(self, chunks: Sequence[bytes]) -> None:
        """The engine has computed this prompt: its first byte came back."""
        known = self._known
        for chunk in reversed(chunks):  # the tail is the oldest, so what remains is always a prefix
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def clear(self) -> None:
        """The engine started anew, or the salt key changed."""
        self._known.clear()
