"""The prefix key: what a request starts with, as chained hashes of 64-byte chunks. Pure.

Two requests share the leading chunks that are equal, and nothing else, so a prediction from the key follows what the
engine can reuse. It only predicts: the engine's own tokens decide, and its `cached_tokens` corrects.

Canonical order is that of chat templates: what changes the whole prompt (model, template, salt) is the domain of the
chain, then tools, then messages. Text enters as itself, token ids as ids (four bytes each, so a chunk is 16 tokens),
any other content part by its own digest. A body of unknown shape has no key and is never refused for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

CHUNK_BYTES = 64
_DIGEST_BYTES = 16
_CHUNKS_A_STEP = 512
_LONG_TEXT = 64 * 1024
MAX_CHUNKS = 8192  # 512 KiB of text; longer prompts are keyed by their start, which bounds the time spent here
KEY_ALGORITHM = "blake2b-128/chunk-64/v1"
TEXT_BYTES_PER_TOKEN = 4.0  # where the engine has not told yet
ID_BYTES = 4

_FIELD, _RECORD = b"\x1f", b"\x1e"  # between the parts of a message, and between messages


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixKey:
    chunks: tuple[bytes, ...]  # chained digests; equal digest = equal text up to there
    length: int  # bytes of the canonical form, those after the last full chunk included
    of_ids: bool = False  # the client sent token ids


class _UnknownShape(Exception):
    """The body is not what this module knows how to read."""


def prefix_key(path: str, body: Mapping[str, Any], salt: str) -> PrefixKey | None:
    """The key of a request body, or None for a shape that has no single prompt."""
    steps = prefix_key_steps(path, body, salt)
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            key: PrefixKey | None = ended.value
            return key


def prefix_key_steps(path: str, body: Mapping[str, Any], salt: str) -> Generator[None, None, PrefixKey | None]:
    """The same in steps of about a millisecond, so that other requests can go on while a long prompt is keyed."""
    try:
        if path == "/v1/chat/completions":
            return (yield from _chained(b"chat", body, salt, _chat_text(body)))
        if path == "/v1/completions":
            prompt = _single(body.get("prompt"))
            if isinstance(prompt, str):
                return (yield from _chained(b"text", body, salt, iter([prompt])))
            return (yield from _chained(b"ids", body, salt, iter([_ids(prompt)])))
    except (_UnknownShape, ValueError, TypeError, RecursionError):
        return None
    return None


def conversation_of(body: Mapping[str, Any], salt: str) -> str | None:
    """The client's own name for a conversation, if it gives one. Two sharing scopes never have the same."""
    for field in ("prompt_cache_key", "conversation_id", "session_id"):
        name = body.get(field)
        if isinstance(name, str) and name:
            return _digest(_encoded(salt) + _FIELD + _encoded(name)).hex()
    return None


def _chained(
    kind: bytes, body: Mapping[str, Any], salt: str, parts: Iterator[bytes | str]
) -> Generator[None, None, PrefixKey]:
    domain = tuple(body.get(name) for name in ("model", "chat_template", "chat_template_kwargs", "documents"))
    plain = isinstance(domain[0], str) and domain[1:] == (None, None, None)
    parent = _plain_start(kind, salt, domain[0]) if plain else _start(kind, salt, domain)
    chunks: list[bytes] = []
    rest = b""
    length = 0
    for part in parts:
        wanted = max(0, (MAX_CHUNKS - len(chunks)) * CHUNK_BYTES - len(rest))
        if isinstance(part, str):  # a long one: copying it whole would take longer than keying its start
            length += len(part) if part.isascii() else len(_encoded(part))
            part = _encoded(part[:wanted])
        else:
            length += len(part)
        if not wanted:
            continue
        text = rest + part[:wanted]
        full = len(text) - len(text) % CHUNK_BYTES
        for start in range(0, full, CHUNK_BYTES):
            parent = blake2b(parent + text[start : start + CHUNK_BYTES], digest_size=_DIGEST_BYTES).digest()
            chunks.append(parent)
            if not len(chunks) % _CHUNKS_A_STEP:
                yield
        rest = text[full:]
    return PrefixKey(tuple(chunks), length, of_ids=kind == b"ids")


def _start(kind: bytes, salt: str, domain: Sequence[Any]) -> bytes:
    return _digest(kind + _FIELD + _encoded(salt) + _FIELD + _canonical(list(domain)))


@functools.lru_cache(maxsize=1024)
def _plain_start(kind: bytes, salt: str, model: str) -> bytes:
    return _start(kind, salt, (model, None, None, None))


def _chat_text(body: Mapping[str, Any]) -> Iterator[bytes | str]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise _UnknownShape
    tools = body.get("tools")
    if tools:
        yield _canonical(tools) + _RECORD
    for message in messages:
        yield from _message(message)


def _message(message: Any) -> Iterator[bytes | str]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _UnknownShape
    # Everything besides role and content (tool calls, a name, reasoning) follows the content: what precedes it decides
    # how far two messages agree.
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    tail = _canonical(others) if others else b""
    before, content, after = _encoded(message["role"]) + _FIELD, message.get("content"), _FIELD + tail + _RECORD
    if isinstance(content, str) and len(content) > _LONG_TEXT:
        yield before
        yield content
        yield after
    else:
        yield before + _content(content) + after


def _content(content: Any) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return _encoded(content)
    if isinstance(content, list):
        return b"".join(_part(part) for part in content)
    raise _UnknownShape


def _part(part: Any) -> bytes:
    if isinstance(part, str):
        return _encoded(part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type") in ("text", None):
        return _encoded(part["text"])
    return _FIELD + _digest(_canonical(part)) + _FIELD  # an image, audio, or a kind we do not know


def _single(prompt: Any) -> Any:
    """A prompt that is one string or one list of ids; several prompts in a request have no single start."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return prompt[0]
    return prompt


def _ids(prompt: Any) -> bytes:
    if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)) or not prompt:
        raise _UnknownShape
    if not all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        raise _UnknownShape
    return struct.pack(f"<{len(prompt)}I", *prompt)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
