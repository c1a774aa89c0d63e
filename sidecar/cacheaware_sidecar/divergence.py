"""Prompts that would share most of their text if they did not differ near their start: a date, a name, a counter in
the first lines. Found and told, never rewritten. Pure.

A prefix is shared up to the first difference and not beyond, so such a line costs everything after it. Texts are
compared as sets of pieces (lines and sentences), by salted digests: no text is kept, and nobody's is compared with that
of another sharing scope. Only prompts of which little was cached are looked at, and at most `PER_SECOND` of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cacheaware_api import wire

FEWEST_TOKENS = 256  # shorter prompts have little to save
PER_SECOND = 20.0
FEWEST_SIGHTINGS = 3  # before it is told
_LITTLE_CACHED = 0.25
_MUCH_SHARED = 0.5  # of the text, in equal pieces
_LONGEST_TEXT = 32 * 1024  # of a prompt
_TEMPLATES = 64  # prompts that are remembered
_ADVICE = 32  # kinds of divergence that are remembered
_PIECES = re.compile(r"\n+|(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, slots=True)
class _Template:
    """A prompt's pieces in order, and how long each one is."""

    pieces: Mapping[bytes, int]
    length: int


@dataclasses.dataclass(slots=True)
class _Seen:
    """A kind of divergence: by tier, and the piece before the difference."""

    tier: str
    requests: int = 0
    at_tokens: float = 0.0  # sums
    saved_tokens: float = 0.0


class Divergence:
    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, _Template] = OrderedDict()
        self._seen: OrderedDict[tuple[str, bytes], _Seen] = OrderedDict()
        self._allowance, self._asked = PER_SECOND, 0.0

    def note(
        self, tier: str, salt: str, body: Mapping[str, Any], *, prompt_tokens: int, cached_tokens: int, now: float
    ) -> int:
        """The engine counted a prompt. Returns the tokens that it would have found cached had it started otherwise."""
        if prompt_tokens < FEWEST_TOKENS or cached_tokens >= _LITTLE_CACHED * prompt_tokens or not self._allowed(now):
            return 0
        template = _template(salt, body)
        if not template.pieces:
            return 0
        best, shared = None, 0
        for other in self._templates.values():
            common = sum(length for piece, length in template.pieces.items() if piece in other.pieces)
            if common > shared:
                best, shared = other, common
        self._templates[hashlib.blake2b(b"".join(template.pieces), digest_size=16).digest()] = template
        while len(self._templates) > _TEMPLATES:
            self._templates.popitem(last=False)
        if best is None or shared < _MUCH_SHARED * template.length or shared == template.length:
            return 0
        return self._tell(tier, template, best, shared, prompt_tokens, cached_tokens)

    def advice(self) -> tuple[wire.Advice, ...]:
        """What was seen often enough, the most expensive first."""
        told = [
            wire.Advice(
                tier=seen.tier,
                requests=seen.requests,
                diverges_at_token=round(seen.at_tokens / seen.requests),
                would_save_tokens=round(seen.saved_tokens / seen.requests),
            )
            for seen in self._seen.values()
            if seen.requests >= FEWEST_SIGHTINGS
        ]
        return tuple(sorted(told, key=lambda one: -one.requests * one.would_save_tokens))

    def keep(self, tiers: Sequence[str]) -> None:
        """Forget tiers that are gone."""
        for key in [key for key, seen in self._seen.items() if seen.tier not in tiers]:
            del self._seen[key]

    def _tell(self, tier: str, mine: _Template, other: _Template, shared: int, prompt: int, cached: int) -> int:
        before, last = 0, b""
        for piece, length in mine.pieces.items():
            if piece not in other.pieces:
                break
            before, last = before + length, piece
        saved = round((shared - before) / mine.length * prompt)
        if saved < FEWEST_TOKENS // 2 or saved <= cached:
            return 0
        seen = self._seen.setdefault((tier, last), _Seen(tier))
        self._seen.move_to_end((tier, last))
        seen.requests += 1
        seen.at_tokens += before / mine.length * prompt
        seen.saved_tokens += saved
        while len(self._seen) > _ADVICE:
            self._seen.popitem(last=False)
        return saved

    def _allowed(self, now: float) -> bool:
        self._allowance = min(PER_SECOND, self._allowance + max(0.0, now - self._asked) * PER_SECOND)
        self._asked = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


def _template(salt: str, body: Mapping[str, Any]) -> _Template:
    pieces: dict[bytes, int] = {}
    left = _LONGEST_TEXT
    for text in _texts(body):
        for piece in _PIECES.split(text[:left]):
            if piece.strip():
                data = piece.encode("utf-8", "surrogatepass")
                pieces[hashlib.blake2b(data, digest_size=16, key=salt.encode()[:64]).digest()] = len(data)
        left -= len(text)
        if left <= 0:
            break
    return _Template(pieces, sum(pieces.values()))


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a prompt in their order, of shapes that we know."""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(prompt, str):
        yield prompt
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                yield part["text"]
