"""What a cached block saves: the seconds that the engine needs to compute one. Pure.

A first token comes after a fixed time and so much for each block that was not cached, and after what the request waited
inside the engine, which is no block's fault and may be many times as much. Waiting only adds, so the pace is that of
the line which starts at the fastest of recent requests and has all longer ones above it: those that waited do not move
it, be they nine of ten. A regression over all of them, which was tried, makes a tier whose requests come in bursts look
a hundred times as expensive as its neighbour on the same engine.

Noting a request is O(1); the pace is computed when it is asked for, in O(`WINDOW`).
"""

from __future__ import annotations

from collections import deque

WINDOW = 384  # requests: of bursts few are first, and only those show the pace
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
        fewest, least = min(self._seen, key=lambda seen: (seen[1], -seen[0]))
        slopes = [
            (seconds - least) / (blocks - fewest)
            for blocks, seconds in self._seen
            if blocks - fewest >= max(_LEAST_SPREAD, fewest)
        ]
        if len(slopes) >= FEWEST and (slope := min(slopes)) > 0:
            return slope
        # All prompts are alike: the fixed time cannot be told from the rest.
        return min(seconds / blocks for blocks, seconds in self._seen)
