"""Stand-ins for an engine and a sidecar, so that supervision is tested with real processes, ports and signals.

`python -m cacheaware_operator.testing engine|sidecar` takes the flags of the real parts and speaks what the operator
asks of them: health, `PUT /pool/view`, `GET /pool/status`. How they misbehave is told by environment variables, which a
pool's `engine.env` can carry to the engine:

    STANDIN_EXIT=CODE:TEXT       print TEXT and end with CODE at once
    STANDIN_LOADING=FILE         not ready while FILE is missing
    STANDIN_STUBBORN=1           ignore SIGTERM
    STANDIN_CHILD=FILE           start a process that never ends, and write its pid to FILE
    STANDIN_REFUSE=TEXT          the sidecar says that its engine refused the quotas, with TEXT
    STANDIN_ONLY_ONE=FILE        the first engine makes FILE, every later one ends with 1
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cacheaware_api import wire

ENGINE = (sys.executable, "-m", "cacheaware_operator.testing", "engine")
SIDECAR = (sys.executable, "-m", "cacheaware_operator.testing", "sidecar")

Answer = tuple[int, Any]
Routes = dict[tuple[str, str], Callable[[bytes, str], Answer]]  # (method, path) -> (body, authorization) -> answer


def serve(host: str, port: int, routes: Routes) -> ThreadingHTTPServer:
    """A server in a thread of its own; unknown paths are 404."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            route = routes.get((self.command, self.path))
            status, message = (
                route(body, self.headers.get("Authorization", "")) if route else (404, {"error": self.path})
            )
            data = json.dumps(message).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, *arguments: Any) -> None:
            print(f"{self.command} {self.path}", flush=True)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    server = Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stand-in")
    parser.add_argument("part", choices=["engine", "sidecar"])
    for flag in ("--port", "--control-port"):
        parser.add_argument(flag, type=int)
    for flag in ("--host", "--control-host"):
        parser.add_argument(flag, default="127.0.0.1")
    for flag in ("--engine-url", "--kv-socket", "--view-file", "--secrets-dir", "--model"):
        parser.add_argument(flag)
    known, _ = parser.parse_known_args(argv)  # a stand-in takes every flag of the real part and ignores most
    return known


def _engine(settings: argparse.Namespace) -> None:
    loading = os.environ.get("STANDIN_LOADING")

    def health(body: bytes, authorization: str) -> Answer:
        if loading and not Path(loading).exists():
            return 503, {"status": "loading"}
        return 200, {"status": "ready"}

    serve(settings.host, settings.port, {("GET", "/health"): health})


class _Sidecar:
    """Takes views as the real one does: from its file at the start, then by PUT; a smaller number is stale."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._engine_url = settings.engine_url
        self._token = (Path(settings.secrets_dir) / "control-token").read_text()
        self._view = wire.from_json(wire.View, json.loads(Path(settings.view_file).read_text()))
        serve(settings.host, settings.port, {("GET", "/health"): lambda body, authorization: (200, {})})
        serve(
            settings.control_host,
            settings.control_port,
            {
                ("GET", "/healthz"): lambda body, authorization: (200, {}),
                ("GET", "/readyz"): lambda body, authorization: (200 if self._engine_is_ready() else 503, {}),
                ("PUT", "/pool/view"): self.put_view,
                ("GET", "/pool/status"): self.status,
            },
        )

    def put_view(self, body: bytes, authorization: str) -> Answer:
        if authorization != f"Bearer {self._token}":
            return 401, {"error": {"message": "wrong token"}}
        view = wire.from_json(wire.View, json.loads(body))
        if view.revision.pool_uid == self._view.revision.pool_uid:
            if view.revision.number < self._view.revision.number:
                return 409, {"error": {"message": f"older than revision {self._view.revision.number}"}}
        self._view = view
        return 200, {"revision": wire.to_json(view.revision)}

    def status(self, body: bytes, authorization: str) -> Answer:
        if authorization != f"Bearer {self._token}":
            return 401, {"error": {"message": "wrong token"}}
        refused = os.environ.get("STANDIN_REFUSE")
        ready = self._engine_is_ready() and refused is None
        status = wire.PoolStatus(
            applied=self._view.revision if ready else None,
            capacity=100 if ready else None,
            ledger=None,
            tiers={tier.name: wire.TierFigures(queue=0, requests=0) for tier in self._view.tiers},
            enforcement=wire.Enforcement.ENGINE,
            conditions=() if refused is None else (wire.Condition("QuotaEnforced", "False", "QuotaRefused", refused),),
            key_algorithm="stand-in",
        )
        return 200, wire.to_json(status)

    def _engine_is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._engine_url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:  # URLError and refused connections
            return False


def main(argv: list[str]) -> None:
    settings = _parse(argv)
    if planned := os.environ.get("STANDIN_EXIT"):
        code, _, text = planned.partition(":")
        print(text, file=sys.stderr)
        sys.exit(int(code))
    if os.environ.get("STANDIN_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    if pid_file := os.environ.get("STANDIN_CHILD"):
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        Path(pid_file).write_text(str(child.pid))
    if settings.part == "engine":
        if only_one := os.environ.get("STANDIN_ONLY_ONE"):
            try:
                Path(only_one).touch(exist_ok=False)
            except FileExistsError:
                sys.exit(1)
        _engine(settings)
    else:
        _Sidecar(settings)
    print(f"stand-in {settings.part} listens", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
