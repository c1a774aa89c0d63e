"""`/kv/*` on a Unix socket, from threads of its own: the same messages as the Torch engine's, by the standard library.

Whoever may open the socket may set quotas; it is made for its owner only. A leftover of a process that is gone is
replaced, one that answers is not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cacheaware_api import wire
from cacheaware_engine.blocks import QuotaRefused, StaleRevision

from .control import Control
from .errors import PluginRefused

log = logging.getLogger("vllm.cacheaware")

REPORTS_PER_SECOND = 20
MAX_WAIT_S = 60
MAX_BODY_BYTES = 16 * 2**20
IDLE_S = 120.0  # a connection that says nothing for so long is closed


class _Refused(Exception):
    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class KvServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers until its process ends, or until `close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, path: Path, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        _remove_leftover(path)
        mask = os.umask(0o177)  # the socket is its owner's from the moment it exists
        try:
            super().__init__(os.fspath(path), handler)
        except OSError as error:
            raise PluginRefused([f"CACHEAWARE_KV_SOCKET: {path} cannot be used ({error})"]) from error
        finally:
            os.umask(mask)
        self.path = path
        self.stopping = threading.Event()
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.5}, name="cacheaware kv", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = super().get_request()
        return connection, ("kv", 0)  # a Unix socket's client has no address, and the handler wants one

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):  # a client that went away is no news
            log.exception("cacheaware: a connection of the KV side failed")


def serve(control: Control, path: Path) -> KvServer:
    return KvServer(path, lambda *arguments: _Handler(control, *arguments))


def serve_refusal(why: str, path: Path) -> KvServer:
    """For a vLLM that runs without the plugin's scheduler: every request is told why there are no accounts."""
    return KvServer(path, lambda *arguments: _RefusingHandler(why, *arguments))


class _JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: KvServer

    def answer(self, status: int, body: Any) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def refuse(self, status: int, message: str, code: str, param: str | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        self.answer(status, {"error": error})

    def read_body(self) -> bytes:
        """All of it, so that the connection can be used again."""
        text = self.headers.get("Content-Length", "0")
        length = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else MAX_BODY_BYTES + 1
        if length > MAX_BODY_BYTES:
            self.close_connection = True
            raise _Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes: send less", code="too_large")
        return self.rfile.read(length)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  # the name is the base class's
        """A long poll a second is no news."""


class _RefusingHandler(_JsonHandler):
    def __init__(self, why: str, *arguments: Any) -> None:
        self._why = why
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self.refuse(501, self._why, "unsupported_version")

    def do_PUT(self) -> None:
        with contextlib.suppress(_Refused):
            self.read_body()
        self.refuse(501, self._why, "unsupported_version")


class _Handler(_JsonHandler):
    def __init__(self, control: Control, *arguments: Any) -> None:
        self._control = control
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._route({"/kv/ledger": self._ledger, "/kv/steps": self._steps})

    def do_PUT(self) -> None:
        self._route({"/kv/quotas": self._quotas, "/kv/public": self._public})

    def _route(self, routes: dict[str, Callable[[bytes], None]]) -> None:
        path = urlsplit(self.path).path
        try:
            body = self.read_body()
            if path not in routes:
                raise _Refused(404, f"there is nothing at {self.command} {path[:200]!r}", code="not_found")
            routes[path](body)
        except _Refused as error:
            self.refuse(error.status, str(error), error.code, error.param)
        except StaleRevision as error:
            self.refuse(409, str(error), "stale_revision", "revision")
        except QuotaRefused as error:
            self.refuse(422, str(error), "quota_refused")
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            log.exception("cacheaware: a request of the KV side failed")
            self.refuse(500, "the KV side failed on this request: see vLLM's log", "internal_error")

    # -- routes -------------------------------------------------------------------------------------------------------

    def _ledger(self, _body: bytes) -> None:
        after, wait = self._number("after", 2**63), self._number("wait", MAX_WAIT_S) or 0
        if after is not None:
            deadline = time.monotonic() + wait
            # A look twenty times a second, so that nobody has to wake us in a step; what changes within is one answer.
            while self._control.sequence <= after and time.monotonic() < deadline:
                if self.server.stopping.wait(1 / REPORTS_PER_SECOND):
                    break
        self.answer(200, wire.to_json(self._control.ledger()))

    def _quotas(self, body: bytes) -> None:
        self.answer(200, wire.to_json(self._control.set_quotas(_message(wire.Quotas, body))))

    def _public(self, body: bytes) -> None:
        self.answer(200, wire.to_json(self._control.set_public(_message(wire.PublicPrefixes, body))))

    def _steps(self, _body: bytes) -> None:
        """Server-sent events: sums over the steps since the last one."""
        self.close_connection = True
        seen = self._control.totals  # before the answer begins: who has its head is told of every step from then on
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        while not self.server.stopping.wait(1 / REPORTS_PER_SECOND):
            totals = self._control.totals
            if totals.steps > seen.steps:
                self.wfile.write(f"data: {json.dumps(wire.to_json(totals.since(seen)))}\n\n".encode())
                seen = totals

    def _number(self, name: str, most: int) -> int | None:
        values = parse_qs(urlsplit(self.path).query).get(name)
        if not values:
            return None
        text = values[-1]
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) > most:
            raise _Refused(
                400, f"{name}: expected a whole number from 0 to {most}, got {text[:40]!r}", code="invalid", param=name
            )
        return int(text)


def _message(kind: type[Any], body: bytes) -> Any:
    try:
        return wire.from_json(kind, json.loads(body))
    except wire.WireError as error:
        raise _Refused(400, str(error), code="invalid", param=error.path or None) from error
    except (ValueError, RecursionError):
        raise _Refused(400, "the body is not valid JSON in UTF-8", code="invalid") from None


def _remove_leftover(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise PluginRefused([f"CACHEAWARE_KV_SOCKET: {path} exists and is not a socket: choose another path"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)  # nobody answers: left by a process that was killed
        else:
            raise PluginRefused([f"CACHEAWARE_KV_SOCKET: another process listens on {path}: stop it or move one"])
