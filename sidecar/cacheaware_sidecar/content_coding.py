"""Taking an answer's content-encoding off as it is read. None is asked for; a mesh in between may compress anyway."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable

_MOST_AT_ONCE = 256 * 1024  # decoded bytes: a small piece may unfold to very many


class CodingError(Exception):
    """A coding that is not known here, or bytes that are not in it."""


class Decoder:
    """gzip or zlib. Memory is bounded: what is not asked for stays packed."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=47)  # 32 + 15: either header is recognised
        self._packed = b""

    @classmethod
    def of(cls, coding: str) -> Decoder | None:
        """None for the coding that is none; raises `CodingError`."""
        match coding.strip().lower():
            case "" | "identity":
                return None
            case "gzip" | "x-gzip" | "deflate":
                return cls()
            case other:
                raise CodingError(f"content-encoding {other[:30]!r} is not known here")

    async def read(self, source: Callable[[], Awaitable[bytes]]) -> bytes:
        """Some decoded bytes; b"" at the end."""
        while True:
            if not self._packed:
                self._packed = await source()
                if not self._packed:
                    if not self._inflate.eof:
                        raise CodingError("the compressed answer ends early")
                    return b""
            try:
                data = self._inflate.decompress(self._packed, _MOST_AT_ONCE)
            except zlib.error as error:
                raise CodingError(f"the answer is not in its content-encoding ({error})") from None
            self._packed = self._inflate.unconsumed_tail
            if data:
                return data
