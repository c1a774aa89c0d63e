"""How often requests with a common prefix come: what company may be hoped for. Pure, bounded; told the time.

Intervals are kept for prefixes of 1, 2, 4, … checkpoints, so noting a request takes O(log checkpoints). The rate of a
prefix between two of these is that of the shorter one, at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

_MOST_PREFIXES = 20_000
_SMOOTHING = 0.3


class Arrivals:
    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, tuple[float, float | None]] = OrderedDict()  # last time, usual interval

    def __deepcopy__(self, memo: Mapping[int, object]) -> Arrivals:
        copied = Arrivals()
        copied._seen = self._seen.copy()  # of values that never change: much faster than one by one
        return copied

    def note(self, checkpoints: Sequence[bytes], now: float) -> None:
        length = 1
        while length <= len(checkpoints):
            key = checkpoints[length - 1]
            last, usual = self._seen.pop(key, (None, None))
            if last is not None:
                usual = now - last if usual is None else usual + _SMOOTHING * (now - last - usual)
            self._seen[key] = (now, usual)
            length *= 2
        while len(self._seen) > _MOST_PREFIXES:
            self._seen.popitem(last=False)

    def rate(self, prefix: Sequence[bytes]) -> float:
        """Requests a second that start so; 0 where that is not known."""
        if not prefix:
            return 0.0
        length = 1 << (len(prefix).bit_length() - 1)
        usual = self._seen.get(prefix[length - 1], (0.0, None))[1]
        return 0.0 if not usual else 1 / usual
