"""What the engine is sent instead of what the client sent. Pure: bytes and headers in, bytes and headers out.

The client decides what is generated; the server decides priority, tier, isolation and metering. So the fields of
`PRIVATE` are taken out of the body and ours are put in, and only the headers of `FORWARDED` go on: nothing a client
writes there can route, trace into or authenticate against the engine. Everything else in the body passes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import orjson

from cacheaware_sidecar.errors import BadRequest
from cacheaware_sidecar.limits import check_numbers, output_limit, sequences

PRIVATE = ("priority", "cache_salt", "vllm_xargs", "request_id", "kv_transfer_params", "service_tier")

FORWARDED = frozenset({"accept", "content-type", "accept-language", "traceparent", "tracestate", "baggage"})
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    }
)
# What we decide about an answer ourselves: its length and coding (it was decoded on the way in), its id, its date.
_OURS = frozenset(
    {"content-length", "content-encoding", "x-request-id", "server", "date", "set-cookie", "server-timing"}
)

_STAY = HOP_BY_HOP | _OURS

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_LABEL = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body, and what the data path needs to know of it."""

    body: dict[str, Any]
    streams: bool
    wants_usage: bool  # the client itself asked for the usage chunk of a stream
    sequences: int
    output_limit: int | None
    size: int  # bytes, as sent

    @property
    def service_tier(self) -> Any:
        return self.body.get("service_tier")


_quick = msgspec.json.Decoder().decode


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object; raises `BadRequest` for anything else, for text that is not Unicode and for NaN and Infinity."""
    try:
        body = _quick(data)  # nothing can interrupt it, so it is the one that takes least of a long body
    except (msgspec.DecodeError, RecursionError):
        body = _parse_slowly(data)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _parse_slowly(data: bytes) -> Any:
    """For what the quick one will not have: half of a surrogate pair, which may pass, and what cannot be read, to say
    what is wrong with it.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadRequest(f"the body is not JSON that can be read: {error}") from None


def parse_generation(data: bytes) -> Asked:
    """The body of a completion or chat completion, its numbers checked; raises `BadRequest`."""
    return asked_of(parse_object(data), len(data))


def asked_of(body: dict[str, Any], size: int) -> Asked:
    """The same of a body that was `size` bytes long."""
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("stream must be true or false", param="stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", param="stream_options")
    check_numbers(body)
    return Asked(
        body=body,
        streams=bool(stream),
        wants_usage=bool(options and options.get("include_usage")),
        sequences=sequences(body),
        output_limit=output_limit(body),
        size=size,
    )


def for_engine(asked: Asked, *, tier: str, priority: int, salt: str, group: str | None = None) -> bytes:
    """The body that the engine gets. `priority` is the tier's, higher first; for the engine lower is first."""
    body = {name: value for name, value in asked.body.items() if name not in PRIVATE}
    body["priority"] = -priority
    body["cache_salt"] = salt
    body["vllm_xargs"] = {"cacheaware_tier": tier} | ({} if group is None else {"cacheaware_group": group})
    if asked.streams:
        options = dict(asked.body.get("stream_options") or {})
        if not asked.wants_usage:
            options.pop("continuous_usage_stats", None)  # only means something beside include_usage, which is ours here
        options["include_usage"] = True
        body["stream_options"] = options
    return encode(body)


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON text, several times as fast as the standard library's for long prompts; raises `BadRequest`."""
    try:
        return orjson.dumps(body)
    except TypeError:
        pass  # what it cannot write, numbers beyond 64 bits among it, or says less well why
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body has half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def without_private(body: Mapping[str, Any]) -> bytes:
    """A body for a path that generates nothing (tokenize)."""
    return encode({name: value for name, value in body.items() if name not in PRIVATE})


def request_headers(headers: Iterable[tuple[str, str]], request_id: str) -> dict[str, str]:
    """Headers for the engine. No coding is accepted, so that events can be read as they come."""
    kept, connection = {}, []
    for name, value in headers:
        lower = name.lower()
        if lower in FORWARDED:
            kept[lower] = value
        elif lower == "connection":
            connection.append(value)
    for name in _named_in(connection):
        kept.pop(name, None)
    kept |= {"content-type": "application/json", "accept-encoding": "identity", "x-request-id": request_id}
    return kept


def response_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The engine's headers that the client gets; the framing of each hop stays with that hop."""
    kept, connection = [], []
    for name, value in headers:
        lower = name.lower()
        if lower not in _STAY:
            kept.append((lower, value))
        elif lower == "connection":
            connection.append(value)
    named = _named_in(connection)
    return [(name, value) for name, value in kept if name not in named] if named else kept


def _named_in(connection: Sequence[str]) -> frozenset[str]:
    """The headers that `Connection` headers name: they belong to this hop."""
    if not connection:
        return frozenset()
    return frozenset(token.strip().lower() for value in connection for token in value.split(","))


def label(text: str | None) -> str | None:
    """A caller's own request id, if it is harmless in a log; it is never used as an id."""
    return text if text is not None and _LABEL.fullmatch(text) else None


def trace_id(traceparent: str | None) -> str | None:
    """The trace that a request belongs to (W3C trace context), for the log; the header itself goes on as it came."""
    if traceparent is None:
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found and found[1].strip("0") else None


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("it has a number too large to be finite")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
