"""`POST /v1/responses` as a chat that the engine knows: nothing is kept between two requests. Pure.

What needs something kept, or asks for more than a chat gives, is refused by its name: a client that relies on it would
go on without it unnoticed. Fields that nobody here knows pass to the engine, as everywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from cacheaware_sidecar.errors import BadRequest
from cacheaware_sidecar.limits import MOST_TOKENS, Bound, check_number
from cacheaware_sidecar.responses_input import messages_of
from cacheaware_sidecar.rewrite import Asked, asked_of, parse_object

PATH = "/v1/responses"
CHAT_PATH = "/v1/chat/completions"
LOGPROBS = "message.output_text.logprobs"

# Given at all, they ask for what was kept or for what is not done here; the value tells what to do instead.
REFUSED: Mapping[str, str] = {
    "previous_response_id": "nothing is kept between requests: send the whole conversation as input",
    "conversation": "nothing is kept between requests: send the whole conversation as input",
    "background": "nothing is kept between requests: wait for the answer, or stream it",
    "store": "nothing is kept between requests: leave it out, or send false",
    "prompt": "no prompts are kept here: send its text as instructions",
    "context_management": "nothing is kept between requests: shorten the input yourself",
    "max_tool_calls": "no tools run here: leave it out",
    "moderation": "nothing is moderated here: leave it out",
}
# Fields of chats that would mean the same twice, or that an answer of one text cannot show.
CHAT_FIELDS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": f'include: ["{LOGPROBS}"]',
    "response_format": "text.format",
    "functions": "tools",
    "function_call": "tool_choice",
    "n": "a request for each answer",
    "best_of": "a request for each answer",
    "prompt_logprobs": "/v1/completions",
}
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # of reasoning there is none, so nothing is left out
# Only for the answer, or about what is kept; the engine need not see them.
_OURS = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "text", "include", "store", "background", "truncation"),
        *("metadata", "reasoning", "safety_identifier", "prompt_cache_retention", "tools", "tool_choice"),
        *("stream_options", *REFUSED),
    }
)
_DEEPER = 100  # levels of lists and of calls, more than an answer has
MOST_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseRequest:
    """The chat to ask the engine for, and what the answer repeats of the request."""

    asked: Asked
    repeated: Mapping[str, Any]


def response_request(data: bytes) -> ResponseRequest:
    """Raises `BadRequest`."""
    body = parse_object(data)
    for name, instead in REFUSED.items():
        _refuse_if_given(body, name, instead)
    for name, instead in CHAT_FIELDS.items():
        if body.get(name) is not None:
            _refuse(name, f"use {instead}")
    _refuse_other(body, "truncation", ("disabled",))
    _nothing_in(body, "reasoning")
    if not isinstance(body.get("stream_options", {}), (dict, type(None))):
        raise BadRequest("stream_options must be an object", param="stream_options")
    chat = {name: value for name, value in body.items() if name not in _OURS and name not in CHAT_FIELDS}
    chat["messages"] = messages_of(body)
    if (most := body.get("max_output_tokens")) is not None:
        check_number("max_output_tokens", most, Bound(1, MOST_TOKENS))
        chat["max_completion_tokens"] = most
    text_format = _text_format(body)
    if text_format["type"] != "text":
        chat["response_format"] = _response_format(text_format)
    tools = _tools(body)
    if tools:
        chat["tools"] = [{"type": "function", "function": _without_type(tool)} for tool in tools]
        if (choice := body.get("tool_choice")) is not None:
            chat["tool_choice"] = _tool_choice(choice)
    elif body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequest("tool_choice asks for a tool, and tools has none", param="tool_choice")
    _logprobs(body, chat)
    if not isinstance(body.get("parallel_tool_calls", True), (bool, type(None))):
        raise BadRequest("parallel_tool_calls must be true or false", param="parallel_tool_calls")
    _check_depth([text_format, tools])
    return ResponseRequest(asked_of(chat, len(data)), _repeated(body, text_format, tools))


def _check_depth(repeated: Any) -> None:
    """What is repeated stands deeper in the answer than in the request, and has to be written there too."""
    for _ in range(_DEEPER):
        repeated = [repeated]
    try:
        json.dumps(repeated)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _refuse_if_given(body: Mapping[str, Any], name: str, instead: str) -> None:
    value = body.get(name)
    if value is None or (value is False and name in ("store", "background")):
        return
    _refuse(name, instead)


def _refuse(name: str, instead: str) -> NoReturn:
    raise BadRequest(f"{name} is not supported on {PATH}: {instead}", param=name, code="unsupported_parameter")


def _refuse_other(body: Mapping[str, Any], name: str, taken: tuple[str, ...]) -> None:
    value = body.get(name)
    if value is not None and value not in taken:
        _refuse(name, f"leave it out, or send {' or '.join(taken)}")


def _nothing_in(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object", param=name)
    for field, asks in value.items():
        if asks not in (None, "none"):
            _refuse(f"{name}.{field[:40]}", f"leave it out, or use {CHAT_PATH}")


def _text_format(body: Mapping[str, Any]) -> Mapping[str, Any]:
    text = body.get("text")
    if text is None:
        return {"type": "text"}
    if not isinstance(text, dict):
        raise BadRequest("text must be an object", param="text")
    if text.get("verbosity") not in (None, "medium"):
        _refuse("text.verbosity", "say it in the instructions")
    wanted = text.get("format")
    if wanted is None:
        return {"type": "text"}
    if not isinstance(wanted, dict) or wanted.get("type") not in ("text", "json_object", "json_schema"):
        raise BadRequest("text.format.type must be one of text, json_object, json_schema", param="text.format.type")
    return wanted


def _response_format(wanted: Mapping[str, Any]) -> dict[str, Any]:
    if wanted["type"] == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": _without_type(wanted)}


def _without_type(value: Mapping[str, Any]) -> dict[str, Any]:
    """A chat has the same fields one level deeper."""
    return {name: each for name, each in value.items() if name != "type"}


def _tools(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    for number, tool in enumerate(tools):
        param = f"tools[{number}]"
        if not isinstance(tool, dict):
            raise BadRequest(f"{param} must be an object", param=param)
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:40]
            _refuse(f"{param}.type", f"{kind!r} would have to run here; only functions, which you run, are taken")
        if not isinstance(tool.get("name"), str):
            raise BadRequest(f"{param}.name must be a string", param=f"{param}.name")
    return tools


def _tool_choice(choice: Any) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise BadRequest(
        'tool_choice must be auto, none, required or {"type": "function", "name": "…"}', param="tool_choice"
    )


def _logprobs(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise BadRequest("include must be a list", param="include")
    for number, name in enumerate(include or ()):
        if name not in INCLUDED:
            _refuse(f"include[{number}]", f"only {' and '.join(INCLUDED)} are taken")
    if LOGPROBS in (include or ()):
        chat["logprobs"] = True
    elif body.get("top_logprobs"):
        raise BadRequest(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    else:
        chat.pop("top_logprobs", None)


def _repeated(
    body: Mapping[str, Any], text_format: Mapping[str, Any], tools: list[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """What was asked for, as it was understood; what was left to the engine is null."""
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    named = ("instructions", "max_output_tokens", "temperature", "top_p", "user", "safety_identifier")
    return {
        **{name: body.get(name) for name in (*named, "prompt_cache_key")},
        "metadata": _metadata(body),
        "text": {"format": text_format},
        "tools": tools,
        "tool_choice": "auto" if choice is None else choice,
        "parallel_tool_calls": True if parallel is None else parallel,
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        "previous_response_id": None,
        "background": False,
        "store": False,
    }


def _metadata(body: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if (
        not isinstance(metadata, dict)
        or len(metadata) > MOST_METADATA
        or not all(
            isinstance(value, str) and len(name) <= LONGEST_NAME and len(value) <= LONGEST_VALUE
            for name, value in metadata.items()
        )
    ):
        raise BadRequest(
            f"metadata must be an object of at most {MOST_METADATA} texts of at most {LONGEST_VALUE} characters, "
            f"with names of at most {LONGEST_NAME}",
            param="metadata",
        )
    return metadata
