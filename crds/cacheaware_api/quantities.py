"""Kubernetes quantities of memory: `1Gi`, `512Mi`, `1.5G`, `1e9`, or plain bytes.

The grammar is the API server's, without what is no amount of memory: a sign, and the units below one (`m`, `u`, `n`).
A fraction of a byte is rounded up, as Kubernetes does.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_LENGTH = 32
MAX_BYTES = 2**63 - 2  # Kubernetes keeps one byte more, and cuts everything larger down to that
PATTERN = r"^[0-9]{1,18}([.][0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|[eE][0-9]{1,2})?$"
EXPECTED = "an amount of memory such as 1Gi, 512Mi or a number of bytes"

_WHOLE = re.compile(r"([0-9]{1,18}(?:[.][0-9]{1,9})?)(?:([KMGTPE]i|[kMGTPE])|[eE]([0-9]{1,2}))?")
_UNITS = {unit: 1000**power for power, unit in enumerate("kMGTPE", start=1)}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", start=1)}


class QuantityError(ValueError):
    """Text that is no amount of memory."""


def bytes_of(quantity: str | int) -> int:
    """`bytes_of("1Gi") == 1073741824`"""
    if isinstance(quantity, int) and abs(quantity) > MAX_BYTES:  # Python may refuse to print it
        raise QuantityError(f"a number this large is not {EXPECTED}")
    text = str(quantity)
    found = _WHOLE.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None:
        raise QuantityError(f"{text[:MAX_LENGTH]!r} is not {EXPECTED}")
    number, unit, exponent = found.groups()
    amount = Fraction(number) * (_UNITS[unit] if unit else int(10 ** int(exponent or 0)))
    if amount > MAX_BYTES:
        raise QuantityError(f"{text} is more than {MAX_BYTES} bytes, the most that Kubernetes can say")
    return math.ceil(amount)
