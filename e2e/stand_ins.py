"""What a node would do for a pool: pods that run and are ready, and sidecars that answer for them.

The sidecars are one server on loopback; an operator that is given `address_of` finds each pod's under its name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from e2e.cluster import Cluster

from cacheaware_api import wire

CAPACITY = 1000


@dataclass
class StandInSidecar:
    """Takes views as the real one does; its engine acknowledges at once."""

    tokens: set[str] = field(default_factory=set)  # that it was asked with
    views: list[wire.View] = field(default_factory=list)
    page: Callable[[], str] = str  # its metrics, at each look
    silent: bool = False  # answers nothing before the asker gives up

    def status(self) -> wire.PoolStatus:
        view = self.views[-1] if self.views else None
        account = wire.TierLedger(0, 0, 0, 0, 0, 0, 0, 0, wire.Slots(1, 0), 0, 0, 0, 0, 0)
        tiers = {tier.name: account for tier in (view.tiers if view is not None else ())}
        ledger = wire.Ledger(
            sequence=1,
            revision=None if view is None else view.revision,
            block_size=16,
            bytes_per_token=100,
            capacity=CAPACITY,
            free=CAPACITY,
            public=wire.PublicLedger(0, 0, 0, {}),
            tiers=tiers,
            running=0,
            waiting=0,
        )
        return wire.PoolStatus(
            applied=None if view is None else view.revision,
            capacity=CAPACITY,
            ledger=ledger,
            tiers={name: wire.TierFigures(queue=0, requests=0) for name in tiers},
            enforcement=wire.Enforcement.ENGINE,
            conditions=(),
            key_algorithm="stand-in",
        )


class StandInSidecars:
    """By pod name; one is made for whatever pod is asked about."""

    def __init__(self) -> None:
        self.by_pod: dict[str, StandInSidecar] = {}
        self.port = 0
        self.ended = threading.Event()

    def of(self, pod: str) -> StandInSidecar:
        return self.by_pod.setdefault(pod, StandInSidecar())

    def address_of(self, pod: Mapping[str, Any]) -> str | None:
        """Where the operator finds a pod's sidecar, once the pod has an address."""
        return f"http://127.0.0.1:{self.port}/{pod['metadata']['name']}" if pod["status"].get("podIP") else None

    @contextmanager
    def serving(self) -> Iterator[StandInSidecars]:
        sidecars = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                _, pod, path = self.path.split("/", 2)
                sidecar = sidecars.of(pod)
                if sidecar.silent:
                    sidecars.ended.wait(30)
                    return
                sidecar.tokens.add(self.headers.get("Authorization", ""))
                match self.command, path:
                    case "PUT", "pool/view":
                        sidecar.views.append(wire.from_json(wire.View, json.loads(body)))
                        answer = json.dumps({"revision": wire.to_json(sidecar.views[-1].revision)})
                    case "GET", "metrics":
                        answer = sidecar.page()
                    case _:
                        answer = json.dumps(wire.to_json(sidecar.status()))
                data = answer.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = _answer

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        with Server(("127.0.0.1", 0), Handler) as server:
            self.port = server.server_port
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.ended.set()
                server.shutdown()
                thread.join()


def run_pods(cluster: Cluster, namespace: str, pool: str, count: int) -> list[str]:
    """Wait for so many pods of a pool and say that they are ready, as their kubelet would."""

    def there() -> list[str]:
        path = f"/api/v1/namespaces/{namespace}/pods"
        found = cluster.request("GET", path, labelSelector=f"cacheaware.dev/pool={pool}").body["items"]
        names = [pod["metadata"]["name"] for pod in found if not pod["metadata"].get("deletionTimestamp")]
        return names if len(names) == count else []

    names = cluster.wait_for(f"{count} pods of {pool}", there)
    for name in names:
        cluster.set_pod_ready(namespace, name)
    return names
