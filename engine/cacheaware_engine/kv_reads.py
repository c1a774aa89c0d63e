"""Neighbouring slots, read in place: a stretch that lies in one piece needs no copy before attention reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Slots first … last-1, read in place."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first
