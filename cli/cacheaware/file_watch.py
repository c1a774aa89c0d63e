"""Notice that a file has new content, however an editor wrote it: in place, by rename, or as a mounted symlink."""

from __future__ import annotations

from pathlib import Path


class FileWatch:
    """Call `poll` now and then; it returns new content once, when two polls in a row have seen the same bytes.

    Waiting for the second poll keeps a half-written file from being reported. A file that is missing or cannot be read
    is no change: editors remove and recreate. Content that is equal to the last one reported is none either.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._reported = content
        self._candidate: bytes | None = None

    def poll(self) -> bytes | None:
        try:
            content = self._path.read_bytes()
        except OSError:
            self._candidate = None
            return None
        if content == self._reported:
            self._candidate = None
            return None
        if content != self._candidate:
            self._candidate = content
            return None
        self._reported, self._candidate = content, None
        return content
