"""Telling whoever started a long job what is being done, and how much of it is."""

from __future__ import annotations

import io
import re
from typing import Protocol


class Progress(Protocol):
    def __call__(self, text: str, fraction: float | None) -> None:
        """Say what is being done, and how much of it is done where that is known."""


def silent(text: str, fraction: float | None) -> None:
    """Progress that nobody watches."""


class ProgressBars(io.TextIOBase):
    """Stands in for stderr where a library draws progress bars there: nothing is drawn, and `on_progress` is told the
    percentages of those bars whose description holds `about`."""

    def __init__(self, about: str, text: str, on_progress: Progress) -> None:
        self._percentage = re.compile(rf"{re.escape(about)}[^%|]*?(\d{{1,3}})%\|")
        self._text = text
        self._on_progress = on_progress

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for percent in self._percentage.findall(text):
            self._on_progress(self._text, int(percent) / 100)
        return len(text)
