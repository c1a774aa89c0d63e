"""Text from tokens as they come: whole characters only, and nothing past a stop string.

`TextStream` turns one token at a time into text such that the pieces add up to what decoding all tokens at once gives.
`StopStrings` cuts that text at the first stop string, holding back no more than could still become one. Neither knows
requests; `sequences.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_OPEN = 3  # a UTF-8 character has at most 4 bytes, so at most 3 of an unfinished one are at the end
WINDOW = 16  # tokens kept for context; a longer window only occurs where bytes never form characters


class TextStream:
    """Text of a growing token list.

    Decoding is not a sum over tokens: a character may span several, and some tokenizers drop a space at the start. So a
    window of recent tokens is decoded again with each new one, and what was already given out is skipped. The end of
    the text stays back while it may be part of an unfinished character.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: the end of the prompt, which decides whether the first token keeps its leading space."""
        self._decode = decode
        self._window = list(context[-WINDOW // 2 :])
        text = decode(self._window) if self._window else ""
        self._given = len(text) - _open_end(text)  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        """The text that became certain with this token, possibly none."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text) - _open_end(text)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if len(self._window) > WINDOW:
            self._shorten(held_back=len(text) - self._given)
        return new

    def flush(self) -> str:
        """The rest, once no more tokens come; an unfinished character is then a replacement character."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _shorten(self, held_back: int) -> None:
        """Forget the older half of the window; the last `held_back` characters are still to be given out."""
        shorter = self._window[-WINDOW // 2 :]
        given = len(self._decode(shorter)) - held_back
        if given >= 0:
            self._window, self._given = shorter, given


def _open_end(text: str) -> int:
    """Characters at the end of `text` that another token may still change."""
    if not text.endswith(REPLACEMENT):
        return 0
    tail = text[-MAX_OPEN:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopStrings:
    """Cuts text at the earliest stop string; the stop string itself is not given out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # text that may be the start of a stop string
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What of the text so far may be given out; after a match nothing more is."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            certain, self._held = self._held[:at], ""
            return certain
        keep = self._longest_start()
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
