"""What a cached block saves: the seconds that the engine needs to compute one. Pure.

A first token comes after a fixed time and so much for each block that was not cached. The slope is the median of the
slopes between all pairs of recent requests (Theil and Sen): up to a quarter of them may be far off, as those are that
waited inside the engine, without moving it. Noting a request is O(1); the slope is computed when it is asked for.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

WINDOW = 48  # requests; 1,128 pairs take about half a millisecond
FEWEST = 8
_LEAST_SPREAD = 4.0  # blocks; requests that differ by less say more about noise than about blocks


class PrefillPace:
    def __init__(self, window: int = WINDOW) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)

    def note(self, uncached_blocks: float, seconds: float) -> None:
        """A request had its first token `seconds` after it went to the engine, which had so many blocks to compute."""
        if uncached_blocks > 0 and seconds >= 0:
            self._seen.append((uncached_blocks, seconds))

    def seconds_per_block(self) -> float | None:
        """None while too little was seen."""
        if len(self._seen) < FEWEST:
            return None
        slopes = [
            (seconds - other_seconds) / (blocks - other_blocks)
            for (blocks, seconds), (other_blocks, other_seconds) in combinations(self._seen, 2)
            if abs(blocks - other_blocks) >= _LEAST_SPREAD
        ]
        if len(slopes) >= len(self._seen):
            slope = statistics.median(slopes)
            if slope > 0:
                return slope
        # All prompts are alike: the fixed time cannot be told from the rest.
        return statistics.median(seconds / blocks for blocks, seconds in self._seen)
