"""Noticing that files changed, by polling: the one way that works for mounted volumes and for plain files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

POLL_SECONDS = 0.5

_Stamp = tuple[int, int, int] | None  # None: the file is not there


class WatchedFiles:
    """Tells whether any of some files changed since it was last asked. Of a link, the target counts: mounts swap it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._stamps = self._look()

    def changed(self) -> bool:
        stamps = self._look()
        changed, self._stamps = stamps != self._stamps, stamps
        return changed

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
