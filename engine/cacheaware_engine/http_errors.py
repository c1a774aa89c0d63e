"""Errors as HTTP responses in OpenAI's shape, and the request id that every response carries. Used by both servers."""

from __future__ import annotations

import logging
import re

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .errors import BadRequest, NotServed, RequestError, Unavailable
from .openai_responses import error_json
from .requests import request_ids

log = logging.getLogger(__name__)

LABEL = web.RequestKey("label", str)  # the request's id in logs and in its response
REQUEST_ID = "x-request-id"
RETRY_AFTER_S = 1


class TooLarge(RequestError):
    """The body is longer than `--max-body-bytes`."""

    status = 413
    type = "invalid_request_error"


class MethodNotAllowed(RequestError):
    """The path exists, with another method."""

    status = 405
    type = "invalid_request_error"


def error_middleware() -> Middleware:
    """Answers whatever a handler raises; keeps the caller's request id as a label, or gives it one."""
    mint = request_ids()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        label = request[LABEL] = safe_label(request.headers.get(REQUEST_ID)) or mint()
        try:
            response = await handler(request)
        except RequestError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = error_response(_translated(request, error))
        except Exception:
            log.exception("a handler failed")
            response = error_response(RequestError("the engine's server failed on this request: see its log"))
        if not response.prepared:
            response.headers[REQUEST_ID] = label
        return response

    return middleware


def error_response(error: RequestError) -> web.Response:
    retry = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, Unavailable) else None
    return web.json_response(error_json(error), status=error.status, headers=retry)


def safe_label(given: str | None) -> str:
    """The caller's request id if it may stand in a header and a log line, else nothing."""
    return given if given is not None and re.fullmatch(r"[\x21-\x7e]{1,128}", given) else ""


def _translated(request: web.Request, error: web.HTTPException) -> RequestError:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return TooLarge(f"the body is larger than {request.client_max_size} bytes: send less")
        case web.HTTPNotFound():
            return NotServed(f"there is nothing at {request.method} {request.path[:200]!r}", code="not_found")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowed(f"{request.path} does not take {request.method}: use {allowed}")
        case _:
            return BadRequest(error.reason)
