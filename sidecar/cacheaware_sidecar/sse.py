"""Server-sent events, cut out of a byte stream without changing a byte.

A network chunk is not an event: it may hold half of one, or several, or end inside a UTF-8 character or between CR and
LF. Events are found by their blank line only, and looked into only where the caller asks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

# A line ends with CRLF, CR or LF, and an empty line ends the event. Atomic, or CRLF would also match as CR, LF.
_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LONGEST_END = 4
MAX_EVENT_BYTES = 4 * 1024 * 1024

DONE = b"[DONE]"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    raw: bytes  # with the blank line that ends it

    @property
    def data(self) -> bytes | None:
        """What the `data:` lines say, joined by LF; None for a comment or an event without data."""
        raw = self.raw
        if raw.startswith(b"data: ") and _is_one_line(raw):
            return raw[6:-2]  # one line, as nearly all are
        lines = [line[5:].removeprefix(b" ") for line in _lines(self.raw) if line.startswith(b"data:")]
        return b"\n".join(lines) if lines else None


class EventTooLarge(ValueError):
    """No blank line within `MAX_EVENT_BYTES`: this is no event stream, and it must not fill the memory."""


class EventParser:
    """Feed bytes, get whole events; the rest waits for more. Concatenated `raw` and `rest` equal what was fed."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        self._searched = 0  # no event ends before this offset

    @property
    def rest(self) -> bytes:
        """Bytes of an event that has not ended."""
        return bytes(self._buffer)

    def said(self, data: bytes) -> bytes | None:
        """What a piece says that is one whole event in one `data:` line, as nearly every piece is: the same as feeding
        it, for less. None for any other piece, which then has to be fed.
        """
        end = len(data) - 2
        if self._buffer or data[:6] != b"data: " or data.find(b"\n") != end or data[end:] != b"\n\n" or b"\r" in data:
            return None
        return data[6:end]

    def feed(self, data: bytes) -> list[Event]:
        if not self._buffer and _is_one_line(data):
            return [Event(data)]  # one whole event, as nearly every chunk is
        self._buffer += data
        events = list(self._cut())
        if len(self._buffer) > self._max:
            raise EventTooLarge(f"an event is longer than {self._max} bytes")
        return events

    def finish(self) -> list[Event]:
        """The stream has ended: a final CR cannot become CRLF any more."""
        return list(self._cut(final=True))

    def _cut(self, final: bool = False) -> Iterator[Event]:
        start = 0
        position = self._searched
        while found := _END.search(self._buffer, position):
            end = found.end()
            if end == len(self._buffer) and found[0].endswith(b"\r") and not final:
                break  # its LF may be in the next chunk
            yield Event(bytes(self._buffer[start:end]))
            start = position = end
        del self._buffer[:start]
        self._searched = max(0, len(self._buffer) - _LONGEST_END + 1)


def _is_one_line(raw: bytes) -> bool:
    return raw.endswith(b"\n\n") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw


def _lines(raw: bytes) -> list[bytes]:
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
