"""What `up` shows: lines that stay, and one line of progress that is replaced on a terminal.

Without a terminal, progress is printed as plain lines, each text once, so that a log stays short.
"""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Display(Protocol):
    def line(self, text: str = "") -> None:
        """Something to keep."""

    def problem(self, text: str) -> None:
        """Something that needs attention."""

    def progress(self, text: str, fraction: float | None = None) -> None:
        """What is going on now; replaces what was said before."""

    def progress_done(self) -> None: ...


class PlainDisplay:
    """Lines for logs and pipes."""

    def __init__(self, out: Console, err: Console) -> None:
        self._out = out
        self._err = err
        self._last = ""

    def line(self, text: str = "") -> None:
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        self._err.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, text: str, fraction: float | None = None) -> None:
        if text != self._last:
            self._last = text
            self.line(text)

    def progress_done(self) -> None:
        self._last = ""


class TerminalDisplay:
    """A spinner with the current step, its share where known, and the time it has taken."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def line(self, text: str = "") -> None:
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        self._out.print(text, markup=False, highlight=False, soft_wrap=True, style="bold red")

    def progress(self, text: str, fraction: float | None = None) -> None:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=self._out,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(text, total=None)
        total = None if fraction is None else 1.0
        self._progress.update(self._task, description=text, total=total, completed=fraction or 0.0)

    def progress_done(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def display(out: Console, err: Console) -> Display:
    return TerminalDisplay(out) if out.is_terminal else PlainDisplay(out, err)
