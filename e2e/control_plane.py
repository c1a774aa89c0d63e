"""A real Kubernetes control plane: etcd, kube-apiserver, controller-manager and scheduler, on the loopback address.

It needs no root and leaves nothing behind: state and logs are in one folder of the caller's, the processes are ours and
are killed at the end (the state is thrown away, so nothing is gained by a polite end). There is no node, so pods stay
Pending; one can be brought where the API server has an address that it reaches (`node_cluster`). What tests do with a
cluster is in `cluster`.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")

LOOPBACK = "127.0.0.1"
NOBODY: Mapping[str, str] = {}

_ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 90.0  # usually 3 to 5; a busy machine may take long
_TRIES = 3  # another process may take a port between our look and the server's start
_TAIL = 10


class Unavailable(Exception):
    """There is no control plane here; the message says what is missing."""


class StartFailed(Exception):
    """A process ended or did not answer; the message has the end of its log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How to reach a cluster as its administrator."""

    kubectl: Path
    kubeconfig: Path
    server: str
    certificate_authority: Path | None
    token: str | None


def find_programs(environment: Mapping[str, str]) -> Path:
    """The folder that holds the programs; raises `Unavailable`."""
    if named := environment.get("KUBEBUILDER_ASSETS"):
        folder = Path(named)
    else:
        shared = Path(environment.get("CACHEAWARE_SHARED") or _ROOT.parent / "shared")
        unpack = shared / "kube" / "unpack"
        if not unpack.is_file():
            raise Unavailable("set KUBEBUILDER_ASSETS to a folder with etcd, kube-apiserver and kubectl")
        unpacked = subprocess.run([unpack], capture_output=True, text=True, check=False)
        if unpacked.returncode != 0:
            raise Unavailable(f"{unpack} failed: {unpacked.stderr.strip()}")
        folder = Path(unpacked.stdout.strip())
    missing = [program for program in PROGRAMS if not os.access(folder / program, os.X_OK)]
    if missing:
        raise Unavailable(f"{folder} has no {', '.join(missing)}")
    if shutil.which("openssl") is None:
        raise Unavailable("openssl is missing (it makes the key of service account tokens)")
    return folder


class ControlPlane:
    """Starts and ends the processes. `with ControlPlane(programs, folder) as access:`"""

    def __init__(
        self,
        programs: Path,
        folder: Path,
        api_server_flags: Sequence[str] = (),
        address: str = LOOPBACK,
        services: str = "10.96.0.0/16",
        users: Mapping[str, str] = NOBODY,
        controllers: str = "*",
    ) -> None:
        """`users` are more than the administrator, each with its group; `kubeconfig_of` is for them. `controllers` is
        what the controller-manager runs: all but those that it has switched off by default.
        """
        self._programs = programs
        self._folder = folder
        self._api_server_flags = api_server_flags
        self._address = address
        self._services = services
        self._controllers = controllers
        self._users = {user: (group, secrets.token_hex(16)) for user, group in users.items()}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(16)
        self._access: Access | None = None

    def __enter__(self) -> Access:
        try:
            return self._start()
        except BaseException:
            self._kill()
            raise

    def __exit__(self, *exc: object) -> None:
        self._kill()

    def complaints(self) -> str:
        """The last warnings and errors of each process, for a failing test's report."""
        return "\n".join(self._tail(log.stem, quiet=True) for log in sorted(self._folder.glob("*.log")))

    def kubeconfig_of(self, user: str) -> Path:
        """Of one of the users that were named at the start."""
        assert self._access is not None, "the control plane has not started"
        file = self._folder / f"{user.replace(':', '-')}.kubeconfig"
        write_kubeconfig(file, self._access, self._users[user][1])
        return file

    # -- start and end ------------------------------------------------------------------------------------------------

    def _start(self) -> Access:
        key = self._folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = self._folder / "tokens.csv"
        tokens.touch(mode=0o600)
        others = [f"{token},{user},{user},{group}\n" for user, (group, token) in self._users.items()]
        tokens.write_text("".join([f"{self._token},admin,admin,system:masters\n", *others]))
        for left in reversed(range(_TRIES)):
            try:
                self._access = access = self._start_api_server(key, tokens)
                break
            except StartFailed as error:
                self._kill()
                if left == 0 or "address already in use" not in str(error):
                    raise
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={access.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--controllers={self._controllers}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={access.certificate_authority}",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--concurrent-namespace-syncs=20",
            "--horizontal-pod-autoscaler-sync-period=1s",
        )
        self._spawn(
            "kube-scheduler",
            f"--kubeconfig={access.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )
        self._wait("the controllers (service account default/default)", lambda: self._controllers_work(access))
        return access

    def _start_api_server(self, key: Path, tokens: Path) -> Access:
        """etcd and the API server at once: the server waits for etcd by itself."""
        client, peer, port = free_ports(3)
        data = self._folder / "etcd"
        shutil.rmtree(data, ignore_errors=True)
        self._spawn(
            "etcd",
            f"--data-dir={data}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        certificates = self._folder / "certs"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{client}",
            f"--bind-address={self._address}",
            f"--secure-port={port}",
            f"--cert-dir={certificates}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=Node,RBAC",
            # a loopback address cannot be an endpoint of the kubernetes service
            f"--endpoint-reconciler-type={'none' if self._address == LOOPBACK else 'lease'}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-cluster-ip-range={self._services}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            *self._api_server_flags,
        )
        access = Access(
            kubectl=self._programs / "kubectl",
            kubeconfig=self._folder / "admin.kubeconfig",
            server=f"https://{self._address}:{port}",
            certificate_authority=certificates / "apiserver.crt",  # made by the server, its own authority too
            token=self._token,
        )
        write_kubeconfig(access.kubeconfig, access, self._token)
        self._wait(f"{access.server}/readyz", lambda: self._answers(access, "/readyz"))
        return access

    def _spawn(self, program: str, *flags: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            self._processes[program] = subprocess.Popen(
                [self._programs / program, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_SECONDS
        while not is_there():
            for program, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise StartFailed(f"{program} ended with code {code}\n{self._tail(program)}")
            if time.monotonic() > end:
                tails = "\n".join(map(self._tail, self._processes))
                raise StartFailed(f"{what} did not come in {_START_SECONDS:.0f} s\n{tails}")
            time.sleep(0.05)

    def _answers(self, access: Access, path: str) -> bool:
        if access.certificate_authority is None or not access.certificate_authority.exists():
            return False
        request = urllib.request.Request(access.server + path, headers={"Authorization": f"Bearer {self._token}"})
        try:
            context = ssl.create_default_context(cafile=access.certificate_authority)
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except (OSError, ssl.SSLError, urllib.error.URLError):
            return False  # not yet: the caller waits, and looks at the process

    def _controllers_work(self, access: Access) -> bool:
        return self._answers(access, "/api/v1/namespaces/default/serviceaccounts/default")

    def _tail(self, program: str, quiet: bool = False) -> str:
        log = self._folder / f"{program}.log"
        lines = log.read_text(errors="replace").splitlines()
        if quiet:
            lines = [line for line in lines if not line.startswith("I")]  # klog's word for information
        return "\n".join([f"--- the end of {log}", *lines[-_TAIL:]])


def write_kubeconfig(file: Path, access: Access, token: str) -> None:
    """A kubeconfig for `token` on the cluster of `access`."""
    cluster = {"server": access.server}
    if access.certificate_authority:
        cluster["certificate-authority"] = str(access.certificate_authority)
    file.touch(mode=0o600)
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": cluster}],
        "users": [{"name": "e2e", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
        "current-context": "e2e",
    }
    file.write_text(yaml.safe_dump(content))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are looked for before any is let go, so that they differ."""
    listeners = []
    for _ in range(count):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listeners.append(listener)
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
