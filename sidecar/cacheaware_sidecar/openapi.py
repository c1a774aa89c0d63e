"""The OpenAPI description of :8000, made from what the code itself goes by: bounds of numbers, reasons, private fields.

It describes what a client may send and what comes back; what an engine does with a field is the engine's to describe.
Bodies are open: unknown fields pass. It holds nothing of the pool or its tiers, so anybody may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from cacheaware_sidecar.errors import Reason
from cacheaware_sidecar.limits import BOUNDS, MOST_LOGPROBS, MOST_PROMPTS, MOST_TOKENS, Bound
from cacheaware_sidecar.responses_request import (
    CHAT_FIELDS,
    INCLUDED,
    LONGEST_NAME,
    LONGEST_VALUE,
    MOST_METADATA,
    REFUSED,
)
from cacheaware_sidecar.rewrite import PRIVATE
from cacheaware_sidecar.tiers import LONGEST_HINT_MS, TPOT_HINT, TTFT_HINT

Json = Mapping[str, Any]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

_TEXT: Json = {"type": "string"}
_OBJECT: Json = {"type": "object"}
_ANSWERS: Mapping[str, str] = {
    "400": "The request is wrong; `param` names the field or header. The engine's own 400 passes as it is.",
    "401": "No key, or one that nobody was given.",
    "403": "A tier that this key may not use.",
    "408": "The request stopped arriving. Sending it again is safe.",
    "413": "More bytes than a body may have.",
    "415": "A content-encoding that is not taken apart here.",
    "429": "The queue is full, or the tier's promise cannot be kept. Wait `Retry-After`.",
    "502": "The engine failed; part of the answer may have been made.",
    "503": "There is no engine, or this replica shuts down: nothing was begun. Wait `Retry-After`.",
    "504": "The engine did not answer in time.",
}


def description() -> Json:
    """The document that is served at /openapi.json."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cacheaware",
            "version": version("cacheaware"),
            "description": "OpenAI's API in front of one engine; `docs/clients.md` says what differs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}, {}],
        "paths": {
            CHAT: {"post": _generation("A chat goes on.", _chat(), "#/components/schemas/ChatCompletion")},
            COMPLETIONS: {"post": _generation("A text goes on.", _completion(), "#/components/schemas/Completion")},
            RESPONSES: {
                "post": _generation(
                    "A response to an input. Nothing is kept: what went before is sent again.",
                    _responses(),
                    "#/components/schemas/Response",
                )
            },
            "/v1/models": {"get": _passed("The models that the engine serves.")},
            "/tokenize": {"post": _passed("The tokens of a text or a chat.", _body(_tokenize()))},
            "/detokenize": {"post": _passed("The text of tokens.", _body(_detokenize()))},
            "/health": {"get": _health("Whether requests can be answered.", ready=True)},
            "/readyz": {"get": _health("Whether requests can be answered.", ready=True)},
            "/healthz": {"get": _health("Whether the process is alive.", ready=False)},
            "/metrics": {"get": _page("The engine's metrics and the pool's, for Prometheus.", "text/plain")},
            "/openapi.json": {"get": _page("This description.", "application/json")},
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": _error(),
                "ChatCompletion": _answer("choices", "usage"),
                "Completion": _answer("choices", "usage"),
                "Response": _answer("id", "object", "status", "output", "store"),
            },
        },
    }


# -- requests ----------------------------------------------------------------------------------------------------------


def _chat() -> Json:
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _list(_OBJECT), {"type": "null"}]}},
    }
    return _request(
        ["model", "messages"],
        messages=_list(message, least=1),
        tools=_optional(_list(_OBJECT)),
        response_format=_optional(_OBJECT),
        logprobs=_optional({"type": "boolean"}),
        **_shared(),
    )


def _completion() -> Json:
    ids = _list({"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, least=1)
    prompts = [_TEXT, ids, *({**_list(each, least=1), "maxItems": MOST_PROMPTS} for each in (_TEXT, ids))]
    return _request(
        ["model", "prompt"],
        prompt={"anyOf": prompts, "description": "Texts or token ids; each prompt of a list is a request of its own."},
        logprobs=_optional({"type": "integer", "minimum": 0, "maximum": MOST_LOGPROBS}),
        **_shared(),
    )


def _responses() -> Json:
    nothing = {name: {"type": "null", "description": why} for name, why in REFUSED.items()}
    elsewhere = {name: {"type": "null", "description": f"Use {use}."} for name, use in CHAT_FIELDS.items()}
    return _request(
        ["model", "input"],
        **_for_all(),
        **nothing
        | elsewhere
        | {name: {"enum": [False, None], "description": REFUSED[name]} for name in ("store", "background")},
        input={"anyOf": [_TEXT, _list(_item(), least=1)]},
        instructions=_optional(_TEXT),
        max_output_tokens=_optional({"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}),
        **{name: _number(BOUNDS[name]) for name in ("temperature", "top_p", "top_logprobs")},
        include=_optional(_list({"enum": list(INCLUDED)})),
        text=_optional({"type": "object", "properties": {"format": _text_format()}}),
        tools=_optional(_list(_tagged("function", name=_TEXT))),
        tool_choice=_optional({"anyOf": [{"enum": ["auto", "none", "required"]}, _tagged("function", name=_TEXT)]}),
        parallel_tool_calls=_optional({"type": "boolean"}),
        metadata=_optional(
            {
                "type": "object",
                "maxProperties": MOST_METADATA,
                "propertyNames": {"maxLength": LONGEST_NAME},
                "additionalProperties": {"type": "string", "maxLength": LONGEST_VALUE},
            }
        ),
        reasoning=_optional({"type": "object", "additionalProperties": {"enum": ["none", None]}}),
        truncation={"enum": ["disabled", None]},
        stream_options=_optional(_OBJECT),
    )


def _item() -> Json:
    parts = [_tagged(kind, text=_TEXT) for kind in ("input_text", "output_text", "text")]
    content = {"anyOf": [_TEXT, _list({"anyOf": [*parts, _tagged("refusal", refusal=_TEXT)]})]}
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "type": {"const": "message"},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": content,
        },
    }
    return {
        "anyOf": [
            message,
            _tagged("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
            _tagged("function_call_output", call_id=_TEXT, output=content),
        ]
    }


def _text_format() -> Json:
    kinds = [_tagged("text"), _tagged("json_object"), _tagged("json_schema", name=_TEXT, schema=_OBJECT)]
    return _optional({"anyOf": kinds})


def _tagged(kind: str, **properties: Json) -> Json:
    """An object that tells by its `type` what it is."""
    return {
        "type": "object",
        "required": ["type", *properties],
        "properties": {"type": {"const": kind}, **properties},
    }


def _shared() -> dict[str, Json]:
    return {
        **{name: _number(bound) for name, bound in BOUNDS.items()},
        "stream_options": _optional({"type": "object", "properties": {"include_usage": {"type": "boolean"}}}),
        "stop": _optional({"anyOf": [_TEXT, _list(_TEXT)]}),
        **_for_all(),
    }


def _for_all() -> dict[str, Json]:
    taken_out = {name: {"description": "The pool decides this: it is taken out."} for name in PRIVATE}
    tier = _optional({"type": "string", "description": "The name of a tier; auto, default or nothing: your key's own."})
    return {
        "model": _TEXT,
        "stream": _optional({"type": "boolean"}),
        "prompt_cache_key": _optional({"type": "string", "description": "Your name for a conversation."}),
        **taken_out,
        "service_tier": tier,
    }


def _tokenize() -> Json:
    properties = {"model": _optional(_TEXT), "prompt": _optional(_TEXT), "messages": _optional(_list(_OBJECT))}
    return {"type": "object", "properties": properties}


def _detokenize() -> Json:
    tokens = _list({"type": "integer", "minimum": 0})
    return {"type": "object", "required": ["tokens"], "properties": {"model": _optional(_TEXT), "tokens": tokens}}


def _request(required: list[str], **properties: Json) -> Json:
    return {"type": "object", "required": required, "properties": properties}


def _number(bound: Bound) -> Json:
    least = "exclusiveMinimum" if bound.above else "minimum"
    kind = "integer" if bound.whole else "number"
    return _optional({"type": kind, least: bound.least, "maximum": bound.most})


def _optional(schema: Json) -> Json:
    """Null is as good as nothing."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Json, *, least: int = 0) -> Json:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def _body(schema: Json) -> Json:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


# -- answers -----------------------------------------------------------------------------------------------------------


def _generation(summary: str, request: Json, answer: str) -> Json:
    hints = [
        {
            "name": name,
            "in": "header",
            "description": "Loosens the tier's promise for this request; it never tightens it.",
            "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_HINT_MS},
        }
        for name in (TTFT_HINT, TPOT_HINT)
    ]
    stream = {"description": "Events, where `stream` is true; those of the engine, or of a response."}
    answered = {
        "description": "The answer.",
        "headers": {
            **_headers("x-request-id", "The pool's own id of the request."),
            **_headers("x-cacheaware-tier", "The tier that it was served in."),
            **_headers("Server-Timing", "Milliseconds in the queue, held for company, and in the engine."),
        },
        "content": {"application/json": {"schema": {"$ref": answer}}, "text/event-stream": {"schema": stream}},
    }
    return {
        "summary": summary,
        "parameters": hints,
        "requestBody": _body(request),
        "responses": {"200": answered, **_refusals(*_ANSWERS)},
    }


def _passed(summary: str, body: Json | None = None) -> Json:
    answered = {"description": "The engine's answer.", "content": {"application/json": {"schema": _OBJECT}}}
    refusals = _refusals(*(status for status in _ANSWERS if status != "429"), "404")
    passed: dict[str, Any] = {"summary": summary, "responses": {"200": answered, **refusals}}
    return passed if body is None else {**passed, "requestBody": body}


def _health(summary: str, *, ready: bool) -> Json:
    schema = {"type": "object", "required": ["status"], "properties": {"status": _TEXT}}
    content = {"application/json": {"schema": schema}}
    responses = {"200": {"description": "Yes.", "content": content}}
    if ready:
        responses["503"] = {"description": "No; the reason is told.", "content": content}
    return {"summary": summary, "security": [{}], "responses": responses}


def _page(summary: str, content_type: str) -> Json:
    schema = _TEXT if content_type == "text/plain" else _OBJECT
    answered = {"description": summary, "content": {content_type: {"schema": schema}}}
    return {"summary": summary, "security": [{}], "responses": {"200": answered}}


def _refusals(*statuses: str) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    reason = _headers("x-cacheaware-reason", "Why, as one of a closed set.", {"enum": sorted(map(str, Reason))})
    return {
        status: {
            "description": _ANSWERS.get(status, "The engine has no such path."),
            "headers": reason,
            "content": content,
        }
        for status in sorted(statuses)
    }


def _headers(name: str, description: str, schema: Json = _TEXT) -> dict[str, Json]:
    return {name: {"description": description, "schema": schema}}


def _error() -> Json:
    named = {name: _optional(_TEXT) for name in ("type", "param", "code")}
    error = {"type": "object", "required": ["message"], "properties": {"message": _TEXT, **named}}
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _answer(*required: str) -> Json:
    return {"type": "object", "required": list(required)}
