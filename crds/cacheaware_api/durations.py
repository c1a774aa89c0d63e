"""Durations as the object writes them: the Gateway API's form, `10m`, `1h30m`, `250ms`.

One to four parts, each one to five digits and a unit of h, m, s, ms; no sign, no fraction, no other unit. The sum is
kept in whole milliseconds, so that no rounding creeps in. Standard library only: engine and sidecar import it.
"""

from __future__ import annotations

import math
import re

PATTERN = r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"
MAX_LENGTH = 32
EXPECTED = "a duration such as 250ms, 10s or 1h30m"

_WHOLE = re.compile(r"(?:[0-9]{1,5}(?:h|m|s|ms)){1,4}")  # with fullmatch: `$` would let a final newline pass
_PART = re.compile(r"([0-9]{1,5})(ms|h|m|s)")
_UNITS = {"h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_MOST_IN_ONE_PART = 99_999


class DurationError(ValueError):
    """Text that is no duration, or a number that no duration can say."""


def milliseconds(text: str) -> int:
    """`milliseconds("1m30s") == 90_000`. Parts of one unit add up, as they do for the API server."""
    if not _WHOLE.fullmatch(text):
        raise DurationError(f"{text[:MAX_LENGTH]!r} is not {EXPECTED}")
    return sum(int(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def seconds(text: str) -> float:
    """`seconds("250ms") == 0.25`"""
    return milliseconds(text) / 1000


def duration(value: float) -> str:
    """The shortest text for so many seconds, rounded to a millisecond: `duration(90) == "1m30s"`."""
    if not math.isfinite(value) or value < 0:
        raise DurationError(f"{value} seconds is no duration: it must be finite and not negative")
    rest = round(value * 1000)
    if rest == 0:
        return "0s"
    parts = []
    for unit, size in _UNITS.items():
        number, rest = divmod(rest, size)
        if number > _MOST_IN_ONE_PART:
            raise DurationError(f"{value} seconds is more than a duration can say ({_MOST_IN_ONE_PART}h)")
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts)
