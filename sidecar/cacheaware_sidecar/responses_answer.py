"""The engine's chat answer as a response of `/v1/responses`: whole, or event by event. Pure.

A response is a list of items: a message with the text, and a call for each function that the model wants called.
Streamed, each item is announced, grows by deltas and is said once more whole when it is done, in the order that clients
insist on; the last event tells how it ended. `responses_request.py` made the chat.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cacheaware_sidecar.engine_connection import Broken
from cacheaware_sidecar.errors import Reason
from cacheaware_sidecar.metering import usage_from
from cacheaware_sidecar.sse import DONE, Event

_INCOMPLETE: Mapping[str, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclasses.dataclass(slots=True, eq=False)
class _Message:
    """The text of the answer, as it grows."""

    id: str
    text: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": self.logprobs, "text": "".join(self.text)}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A function that the model wants called, as its arguments grow."""

    id: str
    call_id: str
    name: str
    arguments: list[str] = dataclasses.field(default_factory=list)

    def item(self, status: str) -> dict[str, Any]:
        arguments = "" if status == "in_progress" else "".join(self.arguments)
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": arguments,
        }


class ResponseTranslation:
    """One answer, from the engine's chat to the client's response. Use `whole` or the events, and once."""

    def __init__(
        self, number: str, created: float, model: Any, repeated: Mapping[str, Any], clock: Callable[[], float]
    ) -> None:
        """`number` names the response and its items; times are of the wall's clock."""
        self._number = number
        self._created = int(created)
        self._model = model
        self._repeated = repeated
        self._clock = clock
        self._items: list[_Message | _Call] = []
        self._message: _Message | None = None
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._events = 0
        self._over = False

    # -- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, body: bytes) -> bytes:
        """Raises `Broken` for what is no chat completion."""
        answer = _object(body)
        choice = _choice(answer)
        message = choice.get("message") if choice is not None else None
        if choice is None or not isinstance(message, dict):
            raise Broken("the engine's answer is no chat completion")
        self._note(answer, choice)
        calls = _list(message.get("tool_calls"))
        if message.get("content") or not calls:
            self._text(message.get("content"), choice.get("logprobs"))
        for index, call in enumerate(calls):
            self._call({"index": index, **_mapping(call)})
        return _encoded(self._response(self._status, self._usage))

    # -- events --------------------------------------------------------------------------------------------------------

    def event(self, event: Event) -> bytes:
        """What the client gets for one event of the engine's. Raises `Broken` for what is no chat chunk."""
        data = event.data
        if data is None:
            return event.raw if event.raw.startswith(b":") else b""  # a comment keeps a connection awake
        if self._over:
            return b""
        if data == DONE:
            return self._end()
        chunk = _object(data)
        if chunk.get("error") or chunk.get("object") == "error":
            error = _mapping(chunk.get("error") or chunk)
            return self.broken(str(error.get("message") or "the engine failed"), Reason.ENGINE_BROKE)
        opening = b"" if self._events else self._open(chunk)
        choice = _choice(chunk)
        self._note(chunk, choice)
        if choice is None:
            return opening
        delta = _mapping(choice.get("delta"))
        said = b"".join(self._call(_mapping(call)) for call in _list(delta.get("tool_calls")))
        if delta.get("content"):
            said = self._text(delta["content"], choice.get("logprobs")) + said
        return opening + said

    def broken(self, message: str, reason: Reason) -> bytes:
        """The last events of a stream that broke: what there is of the response, then an error that clients raise."""
        self._over = True
        error = {"code": "server_error", "message": message}
        failed = {**self._response("incomplete", self._usage), "status": "failed", "error": error}
        flat = {"code": str(reason), "message": message, "param": None}
        opening = b"" if self._events else self._open({})
        return (
            opening
            + self._event("response.failed", response=failed)
            + self._event("error", **flat, error={**flat, "type": "server_error"})
        )

    def _open(self, chunk: Mapping[str, Any]) -> bytes:
        self._model = chunk.get("model") or self._model
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _end(self) -> bytes:
        if self._finish is None:
            raise Broken("the engine ended the stream without saying why")
        self._over = True
        said = [b"" if self._items else self._text("", None)]
        for index, item in enumerate(self._items):
            if isinstance(item, _Message):
                at = {"item_id": item.id, "output_index": index, "content_index": 0}
                part = item.part()
                said.append(
                    self._event("response.output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
                )
                said.append(self._event("response.content_part.done", **at, part=part))
            else:
                said.append(
                    self._event(
                        "response.function_call_arguments.done",
                        item_id=item.id,
                        output_index=index,
                        name=item.name,
                        arguments="".join(item.arguments),
                    )
                )
            said.append(self._event("response.output_item.done", output_index=index, item=item.item(self._status)))
        said.append(self._event(f"response.{self._status}", response=self._response(self._status, self._usage)))
        return b"".join(said)

    # -- parts of both -------------------------------------------------------------------------------------------------

    def _note(self, answer: Mapping[str, Any], choice: Mapping[str, Any] | None) -> None:
        self._model = answer.get("model") or self._model
        if choice is not None and isinstance(choice.get("finish_reason"), str):
            self._finish = choice["finish_reason"]
        if (usage := _usage(answer.get("usage"))) is not None:
            self._usage = usage

    def _text(self, text: Any, logprobs: Any) -> bytes:
        """Some text of the message; the events that tell of it."""
        said = b""
        if self._message is None:
            self._message = _Message(f"msg_{self._number}")
            said = self._add(self._message)
            at = {"item_id": self._message.id, "output_index": len(self._items) - 1, "content_index": 0}
            said += self._event("response.content_part.added", **at, part=_Message("").part())
        text = text if isinstance(text, str) else ""
        told = _list(_mapping(logprobs).get("content"))
        self._message.text.append(text)
        self._message.logprobs += told
        if not text and not told:
            return said
        return said + self._event(
            "response.output_text.delta",
            item_id=self._message.id,
            output_index=self._items.index(self._message),
            content_index=0,
            delta=text,
            logprobs=told,
        )

    def _call(self, told: Mapping[str, Any]) -> bytes:
        """Some of a call; the events that tell of it."""
        index = told.get("index")
        index = index if isinstance(index, int) else 0
        function = _mapping(told.get("function"))
        said = b""
        call = self._calls.get(index)
        if call is None:
            name = f"fc_{self._number}_{index}"
            call = self._calls[index] = _Call(name, str(told.get("id") or name), str(function.get("name") or ""))
            said = self._add(call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str) or not arguments:
            return said
        call.arguments.append(arguments)
        output_index = self._items.index(call)
        return said + self._event(
            "response.function_call_arguments.delta", item_id=call.id, output_index=output_index, delta=arguments
        )

    def _add(self, item: _Message | _Call) -> bytes:
        self._items.append(item)
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item.item("in_progress"))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def _response(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        cut = _INCOMPLETE.get(self._finish or "")
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(self._clock()) if status == "completed" else None,
            "status": status,
            "model": self._model,
            "error": None,
            "incomplete_details": None if cut is None else {"reason": cut},
            "output": [] if status == "in_progress" else [item.item(status) for item in self._items],
            "usage": usage,
            **self._repeated,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), _encoded(said))


def _usage(told: Any) -> dict[str, Any] | None:
    usage = usage_from(told)
    if usage is None:
        return None
    details = _mapping(told.get("completion_tokens_details"))
    reasoning = details.get("reasoning_tokens")
    return {
        "input_tokens": usage.prompt_tokens,
        # Nobody pays for writing to the cache here.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning if type(reasoning) is int else 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = _list(answer.get("choices"))
    return choices[0] if choices and isinstance(choices[0], dict) else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Broken("the engine's answer is no JSON") from None
    if not isinstance(value, dict):
        raise Broken("the engine's answer is no JSON object")
    return value


def _encoded(value: Mapping[str, Any]) -> bytes:
    """Half of a surrogate pair is escaped, so that the halves of two deltas are whole again in the client."""
    return json.dumps(value, separators=(",", ":")).encode()
