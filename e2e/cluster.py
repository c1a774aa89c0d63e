"""What tests do with a cluster, however it came about.

    def test_something(cluster: Cluster, namespace: str) -> None:
        cluster.apply({...}, namespace=namespace)                      # server-side, or cluster.kubectl("apply", ...)
        cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods")  # the API itself, on a connection that is kept
        cluster.set_pod_ready(namespace, "chat-0")                      # what a kubelet would say
        rights = cluster.kubeconfig_of(namespace, "operator")           # for a process that runs under its own rights

Fixtures are in `conftest`: `cluster` (one a run), `namespace` (one a test), `installed` (the CRD is there). Everything
here blocks; from a coroutine use `await asyncio.to_thread(cluster.kubectl, ...)`, or `async with cluster.session()`,
an aiohttp session whose relative URLs are the API server's and whose user is the administrator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import shutil
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from e2e.control_plane import Access, Unavailable, write_kubeconfig

Object = dict[str, Any]
T = TypeVar("T")

NO_LABELS: Mapping[str, str] = {}
POOLS = "cacheawarepools.cacheaware.dev"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The API server's answer; `body` is the object, or a Status that says what is wrong."""

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def causes(self) -> list[tuple[str, str]]:
        """Field and message of everything that an invalid object was refused for."""
        causes = self.body.get("details", {}).get("causes", [])
        # without a field it is only the remark that rules were not evaluated because of the other errors
        return [(cause["field"], cause["message"]) for cause in causes if cause["field"] != "<nil>"]


class Cluster:
    """A cluster, as its administrator."""

    def __init__(self, access: Access) -> None:
        self.kubeconfig = access.kubeconfig
        self.server = access.server
        self.token = access.token
        self._access = access
        self._local = threading.local()  # a connection for each thread
        self._tls: ssl.SSLContext | None = None
        if access.server.startswith("https:"):
            self._tls = ssl.create_default_context(cafile=access.certificate_authority)

    # -- kubectl ------------------------------------------------------------------------------------------------------

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl. With `check` a failure raises with what kubectl said."""
        done = subprocess.run(
            [self._access.kubectl, "--kubeconfig", self.kubeconfig, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done

    def apply(self, *objects: Object, namespace: str | None = None) -> str:
        """`kubectl apply --server-side` of objects; what it printed."""
        where = ["--namespace", namespace] if namespace else []
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.kubectl("apply", "--server-side", *where, "-f", "-", stdin=text).stdout

    # -- the API itself -----------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json", **query: str
    ) -> Answer:
        """One request. The connection is kept, so hundreds a second are fine."""
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        content = None if body is None else json.dumps(body).encode()
        for last_try in (False, True):
            connection = self._connection()
            try:
                connection.request(method, target, content, headers)
                answer = connection.getresponse()
                text = answer.read()
                return Answer(answer.status, json.loads(text) if text else None)
            except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):  # it closed an idle connection
                connection.close()
                if last_try:
                    raise
            except BaseException:  # what was under way on it would be read as the answer to the next request
                connection.close()
                raise
        raise AssertionError("unreachable")

    def get(self, path: str) -> Any:
        """The object at `path`; fails where there is none."""
        answer = self.request("GET", path)
        assert answer.ok, f"GET {path}: {answer.status} {answer.body}"
        return answer.body

    def session(self) -> aiohttp.ClientSession:
        """For coroutines; close it, or use it in `async with`."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connector = aiohttp.TCPConnector(ssl=self._tls) if self._tls else None
        return aiohttp.ClientSession(f"{self.server}/", headers=headers, connector=connector)

    def close(self) -> None:
        """Close this thread's connection."""
        if connection := getattr(self._local, "connection", None):
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if (found := getattr(self._local, "connection", None)) is not None:
            return found  # type: ignore[no-any-return]  # an attribute of a thread-local has no type
        address = urllib.parse.urlsplit(self.server)
        assert address.hostname is not None
        if self._tls:
            made = http.client.HTTPSConnection(address.hostname, address.port, timeout=60, context=self._tls)
            self._local.connection = made
        else:
            self._local.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        return self._local.connection  # type: ignore[no-any-return]  # as above

    # -- what tests need around their objects -------------------------------------------------------------------------

    @contextlib.contextmanager
    def namespace(self, labels: Mapping[str, str] = NO_LABELS) -> Iterator[str]:
        """A namespace of one's own, ready for pods. Its end is asked for and not waited for: it takes seconds."""
        name = f"e2e-{secrets.token_hex(4)}"
        made = self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": dict(labels)}})
        assert made.ok, f"namespace {name}: {made.body}"
        try:
            account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            self.wait_for(f"the default service account of {name}", lambda: self.request("GET", account).ok)
            yield name
        finally:
            self.request("DELETE", f"/api/v1/namespaces/{name}")

    def wait_for(self, what: str, look: Callable[[], T], timeout: float = 90) -> T:
        """Look until there is something to see, and return it; fails when the time is over."""
        end = time.monotonic() + timeout
        while not (seen := look()):
            assert time.monotonic() < end, f"{what} did not come in {timeout:.0f} s"
            time.sleep(0.05)
        return seen

    def kubeconfig_of(self, namespace: str, service_account: str, folder: Path) -> Path:
        """A kubeconfig in `folder` with the rights of a service account: an administrator's would hide missing ones."""
        token = self.kubectl("create", "token", service_account, "--namespace", namespace).stdout.strip()
        if self.token is None:
            raise AssertionError("rights of a service account are tested on a control plane of our own only")
        file = folder / f"{namespace}-{service_account}.kubeconfig"
        write_kubeconfig(file, self._access, token)
        return file

    def set_pod_ready(self, namespace: str, pod: str, ready: bool = True, ip: str = "127.0.0.1") -> None:
        """Say of a pod what the kubelet of a node would say once its containers run, and are ready or not."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        written = self.get(path)
        answer = self.request("PATCH", f"{path}/status", {"status": pod_status(written, ready, ip)}, MERGE_PATCH)
        assert answer.ok, f"status of pod {pod}: {answer.body}"


def pod_status(pod: Mapping[str, Any], ready: bool, ip: str) -> Object:
    """The status of a pod whose containers (native sidecars too) run."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    word = "True" if ready else "False"

    def status_of(container: Mapping[str, Any], ready: bool) -> Object:
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": ready,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }

    sidecars = [each for each in pod["spec"].get("initContainers", []) if each.get("restartPolicy") == "Always"]
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": now,
        "conditions": [
            {"type": kind, "status": status, "lastTransitionTime": now}
            for kind, status in (
                ("PodScheduled", "True"),
                ("Initialized", "True"),
                ("ContainersReady", word),
                ("Ready", word),
            )
        ],
        "containerStatuses": [status_of(each, ready) for each in pod["spec"]["containers"]],
        "initContainerStatuses": [status_of(each, ready) for each in sidecars],
    }


@contextlib.contextmanager
def cluster_of_kubeconfig(kubeconfig: Path) -> Iterator[Access]:
    """The cluster that a kubeconfig's current context names; kubectl itself logs in, whatever way that takes."""
    found = shutil.which("kubectl")
    if found is None:
        raise Unavailable("KUBECONFIG is set, and there is no kubectl to use it with")
    proxy = subprocess.Popen(
        [found, "--kubeconfig", kubeconfig, "proxy", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert proxy.stdout is not None
        line = proxy.stdout.readline().decode().strip()  # Starting to serve on 127.0.0.1:43210
        _, started, address = line.rpartition("Starting to serve on ")
        if not started:
            raise Unavailable(f"kubectl proxy cannot use KUBECONFIG: {line}")
        yield Access(Path(found), kubeconfig, f"http://{address}", None, None)
    finally:
        proxy.kill()
        proxy.wait()
        if proxy.stdout is not None:
            proxy.stdout.close()
