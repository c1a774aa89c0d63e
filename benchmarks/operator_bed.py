"""What the operator's benchmark stands on: a real API server, a stand-in node, and the operator as the process it is.

The operator runs under the rights that the cluster-wide manifests give it. Its writes are counted by the API server, in
an audit log that has nothing else in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from e2e.cluster import APPLY_PATCH, MERGE_PATCH, POOLS, Cluster, Object
from e2e.control_plane import ControlPlane, find_programs, free_ports

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE, OPERATOR = "cacheaware-system", "cacheaware-operator"
_ALL_POOLS = "/apis/cacheaware.dev/v1alpha1/cacheawarepools"
_POOLS_OF = "/apis/cacheaware.dev/v1alpha1/namespaces/{}/cacheawarepools"
_FOR_EVER = aiohttp.ClientTimeout(total=None)
_WRITERS = 8
_END_SECONDS = 20.0
_MIB = 1024**2

# The API server takes no loopback address as an endpoint: these would try for ever, at the cost of all the others.
_CONTROLLERS = "*,-endpoints-controller,-endpointslice-controller"

AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {
            "level": "Metadata",
            "users": [f"system:serviceaccount:{NAMESPACE}:{OPERATOR}"],
            "verbs": ["create", "update", "patch", "delete"],
        },
        {"level": "None"},
    ],
}


class AuditLog:
    """The operator's writes, by verb and resource."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def since_last(self) -> Counter[str]:
        found: Counter[str] = Counter()
        if not self._file.exists():
            return found
        with self._file.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                event = json.loads(line)
                what = event["objectRef"]
                resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
                found[f"{event['verb']} {resource}"] += 1
        return found


class Process:
    """A child, and what it costs."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self.child = child
        self.log = log
        self._costs = psutil.Process(child.pid)

    @property
    def cpu_seconds(self) -> float:
        times = self._costs.cpu_times()
        return float(times.user + times.system)

    @property
    def rss_mib(self) -> float:
        try:
            return float(self._costs.memory_info().rss) / _MIB
        except psutil.NoSuchProcess:
            raise RuntimeError(f"{self.log.stem} has ended; see {self.log}") from None

    def check(self) -> None:
        if self.child.returncode is not None:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.log.stem} ended with code {self.child.returncode}:\n{tail}")

    async def end(self) -> None:
        if self.child.returncode is not None:
            return
        self.child.terminate()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self.child.wait()
        except TimeoutError:
            self.child.kill()
            await self.child.wait()


class Bed:
    """Everything that runs, and what the benchmark does with it."""

    def __init__(
        self, session: aiohttp.ClientSession, node_url: str, operator: Process, node: Process, audit: AuditLog
    ) -> None:
        self._session = session
        self._node_url = node_url
        self.operator = operator
        self.node = node
        self.audit = audit
        self.pools: dict[tuple[str, str], Object] = {}  # as a watch tells them
        self._changed = asyncio.Event()
        self._writers = asyncio.Semaphore(_WRITERS)
        self._watch: asyncio.Task[None] | None = None

    # -- pools ---------------------------------------------------------------------------------------------------------

    async def make_namespace(self, name: str) -> None:
        await self._request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})

    async def apply(self, namespace: str, pool: Object) -> None:
        path = f"{_POOLS_OF.format(namespace)}/{pool['metadata']['name']}"
        await self._request("PATCH", path, pool, APPLY_PATCH, {"fieldManager": "bench"})

    async def patch_spec(self, key: tuple[str, str], spec: Object) -> Object:
        path = f"{_POOLS_OF.format(key[0])}/{key[1]}"
        patched: Object = await self._request("PATCH", path, {"spec": spec}, MERGE_PATCH)
        return patched

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        self._watch = asyncio.create_task(self._watch_pools())
        try:
            yield
        finally:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _watch_pools(self) -> None:
        """Keeps `pools` true."""
        while True:
            listed = await self._request("GET", _ALL_POOLS)
            for pool in listed["items"]:
                self._note(pool)
            query = {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
            async with self._session.get(_ALL_POOLS, params=query, timeout=_FOR_EVER) as answer:
                rest = b""
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self._note(json.loads(line)["object"])

    async def wait_for(self, is_so: Callable[[], bool], what: str, seconds: float) -> None:
        """Looks at every change of a pool."""
        try:
            async with asyncio.timeout(seconds):
                while not is_so():
                    self.check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.check()
            raise RuntimeError(f"{what} did not come in {seconds:.0f} s; see {self.operator.log}") from None

    # -- the node ------------------------------------------------------------------------------------------------------

    async def behave(
        self, *, silent: tuple[str, ...] = (), slow: Mapping[str, float] | None = None, references: float = 0.0
    ) -> None:
        told = {"silent": silent, "slow": dict(slow or {}), "references": references}
        async with self._session.put(f"{self._node_url}/behaviour", json=told) as answer:
            answer.raise_for_status()

    async def metrics_read(self) -> dict[str, list[float]]:
        """By pod: when its metrics were read, in seconds of the monotonic clock."""
        async with self._session.get(f"{self._node_url}/asked") as answer:
            answer.raise_for_status()
            read: dict[str, list[float]] = await answer.json()
            return read

    def check(self) -> None:
        """Raises if something has ended that has to run."""
        self.operator.check()
        self.node.check()
        if self._watch is not None and self._watch.done():
            self._watch.result()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _note(self, pool: Object) -> None:
        self.pools[pool["metadata"]["namespace"], pool["metadata"]["name"]] = pool
        self._changed.set()

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Any:
        headers = {"Content-Type": kind}
        async with (
            self._writers,
            self._session.request(method, path, json=body, headers=headers, params=query) as answer,
        ):
            content = await answer.json()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {content}")
            return content


@contextlib.asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Bed]:
    """Raises `Unavailable` where there is no control plane to be had."""
    policy = folder / "audit-policy.yaml"
    policy.write_text(yaml.safe_dump(AUDIT_POLICY))
    log = folder / "audit.log"
    flags = (f"--audit-policy-file={policy}", f"--audit-log-path={log}")
    programs = await asyncio.to_thread(find_programs, os.environ)
    with ControlPlane(programs, folder, flags, controllers=_CONTROLLERS) as access:
        cluster = Cluster(access)
        try:
            kubeconfig = await asyncio.to_thread(_install, cluster, folder)
        finally:
            cluster.close()
        async with contextlib.AsyncExitStack() as stack:
            node = await _start("node", folder, "benchmarks.operator_node", f"--kubeconfig={cluster.kubeconfig}")
            stack.push_async_callback(node.end)
            port = await _first_line(node)
            (metrics_port,) = free_ports(1)
            operator = await _start(
                "operator",
                folder,
                "cacheaware_operator",
                f"--kubeconfig={kubeconfig}",
                "--engine-image=example.com/engine:1",
                "--sidecar-image=example.com/sidecar:1",
                "--metrics-host=127.0.0.1",
                f"--metrics-port={metrics_port}",
            )
            stack.push_async_callback(operator.end)
            session = await stack.enter_async_context(cluster.session())
            bed = Bed(session, f"http://127.0.0.1:{port}", operator, node, AuditLog(log))
            async with bed.watching():
                yield bed


def _install(cluster: Cluster, folder: Path) -> Path:
    """The CRD and the operator's rights, as the manifests have them; its kubeconfig."""
    text = cluster.kubectl("kustomize", ROOT / "manifests" / "overlays" / "cluster-wide").stdout
    written = [each for each in yaml.safe_load_all(text) if each["kind"] not in ("Deployment", "PodDisruptionBudget")]
    first = [each for each in written if each["kind"] in ("Namespace", "CustomResourceDefinition")]
    cluster.apply(*first)
    cluster.apply(*(each for each in written if each not in first))
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{POOLS}")
    cluster.wait_for("the API of pools", lambda: cluster.request("GET", _ALL_POOLS).ok)
    return cluster.kubeconfig_of(NAMESPACE, OPERATOR, folder)


async def _start(name: str, folder: Path, module: str, *arguments: str) -> Process:
    log = folder / f"{name}.log"
    environment = {**os.environ, "POD_NAME": name, "POD_NAMESPACE": NAMESPACE}
    with log.open("wb") as file:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE if name == "node" else file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is ours to pass on, in order
        )
    return Process(child, log)


async def _first_line(process: Process) -> int:
    assert process.child.stdout is not None
    line = await process.child.stdout.readline()
    if not line:
        await process.child.wait()
        process.check()
    return int(line)
