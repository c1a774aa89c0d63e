"""Log lines that cost a request nothing but their text: a thread of their own writes them.

Writing to a pipe that nobody reads waits for ever, and one to a full disk fails. Neither may reach a request, so lines
wait in a queue with a bound; beyond it they are dropped and counted, and the next line that gets through says how many.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque

MOST_BYTES = 4 * 1024 * 1024  # of lines that wait to be written: about ten thousand requests
TOGETHER_SECONDS = 0.2  # lines that come within it are one write: each by itself would wake the thread
CLOSING_SECONDS = 1.0  # at the end, for what still waits


class BackgroundHandler(logging.Handler):
    """Writes to a file descriptor, which stays the caller's. `logging` itself closes it when the process ends."""

    def __init__(self, descriptor: int, *, most_bytes: int = MOST_BYTES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most = most_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # that wait or are being written
        self._untold = 0  # lines that were dropped since the last one that said so
        self._dropped = 0
        self._changing = threading.Lock()  # held for arithmetic only, never while anything is written
        self._some = threading.Event()
        self._closing = threading.Event()
        # A daemon: the end of the process does not wait for who reads the log.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were never written: there was no room for them, or writing them failed."""
        return self._dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # as every handler of logging: a line that cannot be made harms nobody
            self.handleError(record)
            return
        with self._changing:
            if self._bytes + len(line) > self._most:
                self._drop(1)
                return
            self._bytes += len(line)
            self._lines.append(line)
        if not self._some.is_set():
            self._some.set()

    def flush(self) -> None:
        """Nothing: whoever asks must not wait. `close` writes what is left."""

    def close(self) -> None:
        """Write what is left, for a moment at most."""
        self._closing.set()
        self._some.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSING_SECONDS)
        super().close()

    def _drop(self, lines: int) -> None:
        self._dropped += lines
        self._untold += lines

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._closing.wait(TOGETHER_SECONDS)
            closing = self._closing.is_set()
            self._some.clear()
            self._write_all()
            if closing:
                return

    def _write_all(self) -> None:
        with self._changing:
            lines = list(self._lines)
            self._lines.clear()
            untold, self._untold = self._untold, 0
        if untold:
            lines.append(self._told(untold))
        data = b"".join(lines)
        if not data:
            return
        try:
            self._write(data)
        except OSError:  # a full disk, a pipe whose other end is gone
            with self._changing:
                self._drop(len(lines) - bool(untold))
                self._untold += untold
        finally:
            with self._changing:
                self._bytes -= len(data) - (len(lines[-1]) if untold else 0)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # who gave us the descriptor shares it with something that does not block
                with contextlib.suppress(OSError):
                    select.select([], [self._descriptor], [])

    def _told(self, lines: int) -> bytes:
        told = {"levelno": logging.WARNING, "levelname": "WARNING", "msg": "log lines were dropped"}
        return self.format(logging.makeLogRecord({**told, "values": {"lines": lines}})).encode() + b"\n"
