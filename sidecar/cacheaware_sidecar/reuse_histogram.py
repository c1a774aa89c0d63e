"""How soon a tier comes back to the same blocks: a histogram of reuse times, of which the LRU hit curve follows. Pure.

Time is virtual: it advances by the blocks that the tier refers to, so a curve does not depend on how busy the tier is.
The reuse time of a reference is the number of block references since the same block was last referred to; a first use
has none and is counted in +Inf. What the engine evicted is still remembered here: that is how a larger share's hits
become known. Counts are cumulative; whoever reads them takes differences and lets the old ones fade.

Memory is bounded by sampling in space (SHARDS). Keys fall into `CLASSES` classes by their hash. While too many are
known, one class after another is forgotten, and what is left counts for those that are gone. A sample misjudges the few
keys that everybody starts with, so the most recent keys are always known exactly: a reference that finds its key among
them counts once, whatever its class. Which of the two holds depends on recency alone, never on the hash, so the counts
stay unbiased. The rate only falls: a class that came back would look like first uses.

Cost: O(1) a key, about a microsecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

# Quarter octaves, 4 to 2**21 blocks. Shorter times are no concern of a cache that holds a single prompt; longer ones
# no cache holds, so they are first uses again and the key may be forgotten.
BOUNDS: tuple[float, ...] = tuple(2 ** (quarter / 4) for quarter in range(8, 85))
CLASSES = 16
FEWEST_CLASSES = 2  # below a tenth, samples mislead
DEFAULT_KEYS = 200_000  # about 45 MB
RECENT_SHARE = 8  # one key in so many is among the most recent
_FORGOTTEN_AT_ONCE = 8  # keys of a class that are too old; the limit bounds what is left, so no call takes long


class ReuseHistogram:
    """One tier's reuse times. A key is a digest: its bits are uniform, so its last byte decides its class."""

    def __init__(self, most_keys: int = DEFAULT_KEYS) -> None:
        if most_keys < CLASSES:
            raise ValueError(f"most_keys must be at least {CLASSES}, got {most_keys}")
        self._most_keys = most_keys
        self._now = 0.0  # blocks referred to so far
        self._recent: OrderedDict[bytes, float] = OrderedDict()  # key: when it was last referred to; oldest first
        # The keys that are recent no longer, by class; they arrive in the order of their last use.
        self._older: list[OrderedDict[bytes, float]] = [OrderedDict() for _ in range(CLASSES)]
        self._older_keys = 0
        self._leaving: OrderedDict[bytes, float] = OrderedDict()  # a class that is forgotten, key by key
        self._counts = [0.0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    @property
    def rate(self) -> float:
        """The part of all keys that is remembered beyond the most recent ones."""
        return len(self._older) / CLASSES

    @property
    def keys(self) -> int:
        """How many are in memory."""
        return len(self._recent) + self._older_keys + len(self._leaving)

    @property
    def sum(self) -> float:
        """Of all reuse times; first uses add nothing."""
        return self._sum

    def cumulative(self) -> list[float]:
        """Block references with a reuse time of at most each of `BOUNDS`, and all of them as the last entry."""
        return list(accumulate(self._counts))

    def limit(self, most_keys: int) -> None:
        """Remember fewer keys, or more, from the next reference on; a sampling rate that fell stays."""
        self._most_keys = max(CLASSES, most_keys)

    def refer(self, keys: Sequence[bytes], blocks_per_key: float, unknown_keys: int = 0) -> None:
        """A prompt referred to the blocks of these keys, in order, and to more that have no key: those count as first
        uses. A key stands for `blocks_per_key` blocks, which need not be a whole number.
        """
        recent, older, counts = self._recent, self._older, self._counts
        classes = len(older)
        scaled = blocks_per_key * CLASSES / classes
        now = self._now
        for key in keys:
            now += blocks_per_key
            last = recent.get(key)
            if last is not None:
                recent.move_to_end(key)
                weight = blocks_per_key
            elif (number := key[-1] % CLASSES) < classes:
                last = older[number].pop(key, None)
                weight = scaled
                if last is not None:
                    self._older_keys -= 1
            else:
                weight = 0.0
            recent[key] = now
            if last is None:
                counts[-1] += weight
            else:
                counts[bisect_left(BOUNDS, now - last)] += weight
                self._sum += (now - last) * weight
        if unknown_keys:
            now += unknown_keys * blocks_per_key
            counts[-1] += unknown_keys * blocks_per_key
        self._now = now
        self._age()

    def _age(self) -> None:
        """Let keys grow old, and forget what is too old or too much."""
        recent, older = self._recent, self._older
        classes = len(older)
        for _ in range(len(recent) - max(1, self._most_keys // RECENT_SHARE)):
            key, last = recent.popitem(last=False)
            if (number := key[-1] % CLASSES) < classes:
                older[number][key] = last
                self._older_keys += 1
        horizon = self._now - BOUNDS[-1]
        for known in older:
            for _ in range(_FORGOTTEN_AT_ONCE):
                if not known or next(iter(known.values())) >= horizon:
                    break
                known.popitem(last=False)
                self._older_keys -= 1
        while self.keys > self._most_keys:
            if self._leaving:
                self._leaving.popitem()
                continue
            if len(older) > FEWEST_CLASSES:
                self._leaving = older.pop()
                self._older_keys -= len(self._leaving)
            else:
                max(older, key=len).popitem(last=False)
                self._older_keys -= 1
