"""What a request used and how fast it came, read from the engine's answer as it passes. Pure: it is told the time.

Streams are read event by event; only the first token, the usage and errors are looked at, and a chunk's JSON is parsed
only where it can hold one of them. The engine's `usage` counts; where a stream ends without it (cancelled, broken), its
events stand in for tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from cacheaware_sidecar.sse import DONE, Event


class _Answer(msgspec.Struct):
    """All that is looked at of an answer or a chunk of one; the rest is passed over without being built."""

    usage: Any = None
    choices: msgspec.Raw = msgspec.Raw(b"")


_quick = msgspec.json.Decoder(_Answer).decode
_USAGE = re.compile(rb'"usage"\s*:\s*\{')  # some engines say in every chunk that it is null


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None  # None: the engine does not say


def usage_from(value: Any) -> Usage | None:
    """OpenAI's `usage` object, or None where it is not one."""
    if not isinstance(value, Mapping):
        return None
    prompt, output = _count(value.get("prompt_tokens")), _count(value.get("completion_tokens"))
    if prompt is None:
        return None
    details = value.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    return Usage(prompt, output or 0, cached)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


@dataclasses.dataclass(slots=True)
class Meter:
    """Fills up while an answer passes. Times are those of the caller's clock."""

    usage: Usage | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    outputs: int = 0  # events besides usage: about as many as tokens
    done: bool = False  # the stream said [DONE]
    error: bool = False  # the engine reported an error inside the stream

    @property
    def output_tokens(self) -> int:
        return self.usage.output_tokens if self.usage is not None else self.outputs

    def time_per_output_token(self, sequences: int = 1) -> float | None:
        """Seconds between two tokens of one sequence; None for fewer than two, or where they were not counted."""
        if self.usage is None or self.first_token_at is None or self.last_token_at is None:
            return None
        steps = self.usage.output_tokens / sequences - 1
        if steps < 1:
            return None
        return (self.last_token_at - self.first_token_at) / steps

    def observe(self, event: Event, now: float) -> bool:
        """Read one event; True if it is the chunk that only carries usage, which exists because it was asked for."""
        data = event.data
        return False if data is None else self.observe_data(data, now)

    def observe_data(self, data: bytes, now: float) -> bool:
        """The same of what an event says."""
        if data == DONE:
            self.done = True
            return False
        if data.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"')):
            self.error = True
            return False
        only_usage = b'"usage"' in data and _USAGE.search(data) is not None and self._read_usage(data)
        if not only_usage:
            self.outputs += 1
            self.last_token_at = now
            if self.first_token_at is None:
                self.first_token_at = now
        return only_usage

    def _read_usage(self, data: bytes) -> bool:
        answer = _told(data)
        usage = None if answer is None else usage_from(answer.usage)
        if answer is None or usage is None:
            return False
        self.usage = usage
        return bytes(answer.choices).translate(None, b" \t\r\n") == b"[]"

    def observe_body(self, body: bytes, now: float) -> None:
        """Read an answer that did not stream. It has no first token that could be told from the last."""
        answer = _told(body)
        if answer is not None:
            self.usage = usage_from(answer.usage)
            self.last_token_at = now


def _told(data: bytes) -> _Answer | None:
    """None: it is no JSON object."""
    try:
        return _quick(data)
    except (msgspec.DecodeError, RecursionError):
        pass  # half of a surrogate pair is enough, and clients may take it
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    return _Answer(answer.get("usage"), msgspec.Raw(b"[]" if answer.get("choices") == [] else b""))
