"""OpenAI response bodies and stream chunks, as plain JSON values. Pure; sending them is `app.py`'s.

Chat and completions differ in how a choice is written and in nothing else, so each is a shape behind one protocol.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import RequestError
from .requests import Delta, TokenLogprob, TokenReport, Usage

DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    object: str
    chunk_object: str

    def choice(self, delta: Delta) -> dict[str, Any]: ...
    def of_prompt(self, delta: Delta) -> dict[str, Any]:
        """What a body says of its prompt beside the choices."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Choices of a stream's first chunk, before any text."""

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]: ...


class ChatShape:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": _chat_logprobs(delta),
            **_end(delta),
        }

    def of_prompt(self, delta: Delta) -> dict[str, Any]:
        return _prompt_logprobs(delta)

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [_chat_chunk(index, {"role": "assistant", "content": ""})]

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The text, then the end on its own: clients expect the last delta to be empty."""
        text = []
        if delta.text or delta.reports:
            text = [_chat_chunk(delta.index, {"content": delta.text}) | {"logprobs": _chat_logprobs(delta)}]
        return text + ([_chat_chunk(delta.index, {}) | _end(delta)] if delta.finish is not None else [])


class CompletionShape:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": _completion_logprobs(delta),
            **_end(delta),
            **_prompt_logprobs(delta),
        }

    def of_prompt(self, delta: Delta) -> dict[str, Any]:
        return {}  # several prompts may be in one call: each choice tells of its own

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.choice(delta)] if delta.text or delta.reports or delta.finish is not None else []


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies and chunks of one call have in common."""

    shape: Shape
    id: str
    created: int
    model: str
    include_usage: bool = False
    """Every chunk of such a stream has a `usage`: null but in the last."""

    def body(self, choices: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.model,
            "choices": [self.shape.choice(delta) for delta in sorted(choices, key=lambda delta: delta.index)],
            "usage": usage_json(usage),
            **self.shape.of_prompt(choices[0]),
        }

    def opening(self, choices: int) -> bytes:
        return b"".join(self._chunk(choice) for index in range(choices) for choice in self.shape.opening(index))

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._chunk(choice) for delta in deltas for choice in self.shape.chunk_choices(delta))

    def closing(self, usage: Usage) -> bytes:
        return (event(self._envelope([]) | {"usage": usage_json(usage)}) if self.include_usage else b"") + DONE

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        return event(self._envelope([choice]))

    def _envelope(self, choices: list[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.shape.chunk_object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({"usage": None} if self.include_usage else {}),
        }


def event(value: Any) -> bytes:
    """A server-sent event with one JSON value."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_json(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def _chat_chunk(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": None}


def _chat_logprobs(delta: Delta) -> dict[str, Any] | None:
    if not delta.reports:
        return None
    return {
        "content": [
            _logprob(report.chosen) | {"top_logprobs": [_logprob(likely) for likely in report.likeliest]}
            for report in delta.reports
        ],
        "refusal": None,
    }


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}


def _completion_logprobs(delta: Delta) -> dict[str, Any] | None:
    """The older shape: columns instead of objects. Offsets count characters of these tokens' own text."""
    if not delta.reports:
        return None
    texts = [report.chosen.text for report in delta.reports]
    return {
        "tokens": texts,
        "token_logprobs": [report.chosen.logprob for report in delta.reports],
        # Pieces of characters look alike as text: the likeliest of them is told.
        "top_logprobs": [
            {likely.text: likely.logprob for likely in reversed(report.likeliest)} for report in delta.reports
        ],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)),
    }


def _prompt_logprobs(delta: Delta) -> dict[str, Any]:
    """In vLLM's shape: a list with an object by token ids for each token, null for the first."""
    if not delta.prompt_reports:
        return {}
    return {"prompt_logprobs": [None if report is None else _ranked(report) for report in delta.prompt_reports]}


def _ranked(report: TokenReport) -> dict[str, Any]:
    ranked = [*((rank, likely) for rank, likely in enumerate(report.likeliest, 1)), (report.rank, report.chosen)]
    return {str(one.token): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text} for rank, one in ranked}


def _end(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
