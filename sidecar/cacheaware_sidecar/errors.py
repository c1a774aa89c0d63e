"""What a client may be told, in OpenAI's error shape.

    Refusal                 any answer that is not the engine's: status, reason, message, what to do next
    ├── BadRequest          400  the body, a header or a number in it
    │   ├── UnknownTier     400  no such tier; lists those there are
    │   ├── TooSlow         408  the request did not arrive in time
    │   ├── TooLarge        413  more bytes than --max-body-bytes
    │   ├── UnknownCoding   415  a content-encoding that is not taken apart here
    │   └── HeadTooLarge    431  a header, or the request line
    ├── Unauthorized        401  no key, or one that nobody was given
    ├── TierNotAllowed      403  a tier that this key may not use
    ├── NotFound            404  a path that is not offered
    ├── Busy                429  queue-full, sla-infeasible; a retry helps
    ├── EngineBroke         502  the engine failed before its first byte
    ├── NoEngine            503  nothing to send to, or draining; a retry helps
    └── TooLate             504  no first byte, or no answer, in time

The HTTP shape of a refusal is made here too, as plain values; only `app.py` turns it into a response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar


class Reason(StrEnum):
    """The closed set of `x-cacheaware-reason`; metrics and logs use the same words."""

    BAD_REQUEST = "bad-request"
    UNKNOWN_TIER = "unknown-tier"
    TOO_LARGE = "too-large"
    TOO_SLOW = "too-slow"
    UNKNOWN_CODING = "unknown-coding"
    HEAD_TOO_LARGE = "head-too-large"
    UNKNOWN_KEY = "unknown-key"
    TIER_NOT_ALLOWED = "tier-not-allowed"
    NOT_FOUND = "not-found"
    UNSUPPORTED = "unsupported"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    QUEUE_FULL = "queue-full"
    SLA_INFEASIBLE = "sla-infeasible"
    ENGINE_REFUSED = "engine-refused"
    ENGINE_BROKE = "engine-broke"
    NO_ENGINE = "no-engine"
    DRAINING = "draining"
    NO_FIRST_BYTE = "no-first-byte"
    REQUEST_TIMEOUT = "request-timeout"
    IDLE_TIMEOUT = "idle-timeout"
    STALE_VIEW = "stale-view"  # control side only
    INTERNAL = "internal"


class Refusal(Exception):
    """An answer instead of the engine's. `param` names the field or header at fault."""

    status: ClassVar[int]
    type: ClassVar[str]
    default_reason: ClassVar[Reason]

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.param = param
        self.code = code or str(self.reason)
        self.retry_after = retry_after
        self.should_retry = should_retry

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-cacheaware-reason": str(self.reason)}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers

    @property
    def body(self) -> bytes:
        return error_body(self.message, self.type, self.code, self.param)


class BadRequest(Refusal):
    status = 400
    type = "invalid_request_error"
    default_reason = Reason.BAD_REQUEST


class UnknownTier(BadRequest):
    default_reason = Reason.UNKNOWN_TIER


class TooLarge(BadRequest):
    status = 413
    default_reason = Reason.TOO_LARGE

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body has more than the {limit} bytes that are taken here: send less at once")


class TooSlow(BadRequest):
    """The client stopped sending. Nothing was begun, so sending it again is safe."""

    status = 408
    default_reason = Reason.TOO_SLOW

    def __init__(self, message: str) -> None:
        super().__init__(message, should_retry=True)


class UnknownCoding(BadRequest):
    status = 415
    default_reason = Reason.UNKNOWN_CODING


class HeadTooLarge(BadRequest):
    status = 431
    default_reason = Reason.HEAD_TOO_LARGE

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request line or a header has more than {limit} bytes: send a shorter one")


class Unauthorized(Refusal):
    status = 401
    type = "authentication_error"
    default_reason = Reason.UNKNOWN_KEY

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | {"WWW-Authenticate": "Bearer"}


class TierNotAllowed(Refusal):
    status = 403
    type = "permission_error"
    default_reason = Reason.TIER_NOT_ALLOWED


class NotFound(Refusal):
    status = 404
    type = "invalid_request_error"
    default_reason = Reason.NOT_FOUND


class MethodNotAllowed(NotFound):
    status = 405
    default_reason = Reason.METHOD_NOT_ALLOWED

    def __init__(self, message: str, allowed: Iterable[str]) -> None:
        super().__init__(message)
        self.allowed = sorted(allowed)

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | {"Allow": ", ".join(self.allowed)}


class Busy(Refusal):
    status = 429
    type = "rate_limit_error"
    default_reason = Reason.QUEUE_FULL

    def __init__(self, message: str, *, reason: Reason, retry_after: float) -> None:
        super().__init__(message, reason=reason, retry_after=retry_after, should_retry=True)


class EngineBroke(Refusal):
    status = 502
    type = "server_error"
    default_reason = Reason.ENGINE_BROKE


class NoEngine(Refusal):
    status = 503
    type = "server_error"
    default_reason = Reason.NO_ENGINE

    def __init__(self, message: str, *, reason: Reason = Reason.NO_ENGINE, retry_after: float = 1.0) -> None:
        super().__init__(message, reason=reason, retry_after=retry_after, should_retry=True)


class TooLate(Refusal):
    """The engine was given up on. Repeating the call at once would only double its load."""

    status = 504
    type = "timeout_error"
    default_reason = Reason.NO_FIRST_BYTE

    def __init__(self, message: str, *, reason: Reason) -> None:
        super().__init__(message, reason=reason, should_retry=False)


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    error: Mapping[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def error_event(message: str, reason: Reason) -> bytes:
    """The last event of a stream that broke after its first byte; OpenAI clients raise on it."""
    return b"data: " + error_body(message, "server_error", str(reason)) + b"\n\n"
