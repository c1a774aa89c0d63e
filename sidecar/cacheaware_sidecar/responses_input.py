"""The `input` of `/v1/responses` as the messages of a chat. Pure.

Texts, calls of functions and what the functions said have a place in a chat; any other item is refused by its name,
because leaving it out would change the prompt unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from cacheaware_sidecar.errors import BadRequest

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`instructions`, then `input`. Raises `BadRequest`."""
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise BadRequest("instructions must be a string", param="instructions")
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be a string or a list with at least one message", param="input")
    for number, item in enumerate(given):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, param: str) -> None:
    if not isinstance(item, Mapping):
        raise BadRequest(f"{param} must be an object with role and content", param=param)
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message(item, param))
    elif kind == "function_call":
        call = _call(item, param)
        if messages and messages[-1]["role"] == "assistant":  # a chat has the calls of one turn in one message
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        call_id = _text(item, "call_id", param)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item, "output", param)})
    else:
        _unsupported(kind, f"{param}.type", "messages, function_call and function_call_output")


def _message(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise BadRequest(f"{param}.role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    return {"role": role, "content": _content(item, "content", param)}


def _content(item: Mapping[str, Any], field: str, param: str) -> str | list[dict[str, Any]]:
    """A text, or the texts of several parts: how those are joined is the chat template's to say."""
    value, param = item.get(field), f"{param}.{field}"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{param} must be a string or a list of text parts", param=param)
    texts = [_part(part, f"{param}[{number}]") for number, part in enumerate(value)]
    if len(texts) == 1:  # as a client writes it in a chat: the same prompt, and a hit in its cache
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _part(part: Any, param: str) -> str:
    if not isinstance(part, Mapping):
        raise BadRequest(f"{param} must be an object with type and text", param=param)
    kind = part.get("type")
    field = _TEXTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        _unsupported(kind, f"{param}.type", "text parts")
    return _text(part, field, param)


def _call(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    function = {"name": _text(item, "name", param), "arguments": _text(item, "arguments", param)}
    return {"id": _text(item, "call_id", param), "type": "function", "function": function}


def _text(item: Mapping[str, Any], field: str, param: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"{param}.{field} must be a string", param=f"{param}.{field}")
    return value


def _unsupported(kind: Any, param: str, offered: str) -> NoReturn:
    raise BadRequest(
        f"{param}: {str(kind)[:40]!r} is not supported on /v1/responses, only {offered} are",
        param=param,
        code="unsupported_parameter",
    )
