"""A real node: containerd, the kubelet and kube-proxy in a machine of their own (`namespaces`).

Debian's containerd and runc run it, with the bridge plugin for the network. Images come from archives, nothing is
pulled: they are unpacked once into a store that is kept, of which every node gets a copy that shares the files. What
the node does not do: enforce network policies (the bridge knows none).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from e2e.control_plane import StartFailed, Unavailable
from e2e.images import Images
from e2e.namespaces import Machine

NODE = "node1"
USERS: Mapping[str, str] = {f"system:node:{NODE}": "system:nodes", "system:kube-proxy": "system:proxies"}
DNS_DOMAIN = "cluster.local"

_PROGRAMS = ("kubelet", "kube-proxy")
# What a node needs of the machine, and the package that has it (Debian, Ubuntu).
_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
_SOCKET = "/run/containerd.sock"
_START_SECONDS = 60.0
_TAIL = 15


def check(programs: Path) -> None:
    """Raises `Unavailable` where something is missing, and says how to get it."""
    if missing := sorted({package for tool, package in _PACKAGES.items() if shutil.which(tool) is None}):
        raise Unavailable(f"a node needs more packages: apt-get install {' '.join(missing)}")
    if missing := [program for program in _PROGRAMS if not (programs / program).exists()]:
        raise Unavailable(f"{programs} has no {', '.join(missing)}")


class Node:
    """`with Node(...) as node:` it is Ready. Its processes end with the machine that they run in."""

    def __init__(
        self,
        programs: Path,
        folder: Path,
        machine: Machine,
        kubeconfigs: Mapping[str, Path],  # of USERS
        images: Images,
    ) -> None:
        self._programs = programs
        self._folder = folder
        self._machine = machine
        self._kubeconfigs = kubeconfigs
        self._images = images
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Node:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()  # nsenter, which waits for what it started; that ends with the machine
            process.wait()
        self._processes.clear()

    def ctr(self, *arguments: str | Path) -> str:
        """containerd's own client, on the containers of pods."""
        command = self._machine.command("ctr", "--address", _SOCKET, "--namespace", "k8s.io", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            raise StartFailed(f"ctr {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def kill(self, container: str) -> None:
        """Kill the first process of a container, named by its id, as the kernel would that is short of memory."""
        self.ctr("task", "kill", "--signal", "SIGKILL", container.removeprefix("containerd://"))

    def complaints(self) -> str:
        return "\n".join(map(self._tail, self._processes))

    # -- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        plugins = self._folder / "cni"
        plugins.mkdir()
        (plugins / "10-bridge.conflist").write_text(_bridge(self._machine.network.pods, self._folder / "ipam"))
        with self._images.lock():
            if not self._images.store.is_dir():
                self._fill_store()
            root = self._folder / "containerd"
            copy = ["cp", "--archive", "--link"]
            subprocess.run([*copy, self._images.store, root], check=True)
        for database in root.rglob("*.db"):  # these are written to; the rest is only added to
            own = database.with_suffix(".own")
            shutil.copy(database, own)
            own.rename(database)
        self._start_containerd(root)
        network = self._machine.network
        self._spawn(
            "kubelet",
            self._programs / "kubelet",
            f"--config={self._kubelet_config()}",
            f"--kubeconfig={self._kubeconfigs[f'system:node:{NODE}']}",
            f"--hostname-override={NODE}",
            f"--node-ip={network.node}",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'kubelet' / 'pki'}",
        )
        self._spawn(
            "kube-proxy",
            self._programs / "kube-proxy",
            f"--kubeconfig={self._kubeconfigs['system:kube-proxy']}",
            f"--hostname-override={NODE}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={network.pods}",
            "--conntrack-max-per-core=0",
            "--healthz-bind-address=127.0.0.1:10256",
        )

    def _spawn(self, name: str, *command: str | Path) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                self._machine.command(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _fill_store(self) -> None:
        unfinished = self._images.store.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._start_containerd(unfinished)
        for archive in self._images.archives:
            self.ctr("images", "import", archive)
            archive.unlink()
        containerd = self._processes.pop("containerd")
        self._machine.run("pkill", "--exact", "containerd")
        containerd.wait()
        unfinished.rename(self._images.store)

    def _start_containerd(self, root: Path) -> None:
        file = self._folder / "containerd.toml"
        file.write_text(_CONTAINERD.format(root=root, folder=self._folder, socket=_SOCKET, pause=self._images.pause))
        self._spawn("containerd", "containerd", "--config", file)
        self._wait("containerd", lambda: self._answers("version"))

    def _kubelet_config(self) -> Path:
        network = self._machine.network
        file = self._folder / "kubelet.yaml"
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": network.node,
            "readOnlyPort": 0,
            "healthzPort": 0,
            # Only this machine reaches it.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._machine.cgroup}",
            "failCgroupV1": False,
            "oomScoreAdj": 0,  # a lower one needs a right that containers rarely have
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "enforceNodeAllocatable": ["pods"],
            "maxPods": 60,
            "imageGCHighThresholdPercent": 100,  # images cannot be pulled again
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "memory.available": "50Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "syncFrequency": "10s",
            "nodeStatusUpdateFrequency": "5s",
            "clusterDomain": DNS_DOMAIN,
            "clusterDNS": [],
            "resolvConf": "",
            "shutdownGracePeriod": "0s",
        }
        file.write_text(yaml.safe_dump(settings))
        return file

    def _answers(self, *arguments: str) -> bool:
        try:
            self.ctr(*arguments)
        except StartFailed:
            return False
        return True

    def _wait(self, what: str, look: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_SECONDS
        while not look():
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise StartFailed(f"{name} ended with code {code}\n{self._tail(name)}")
            if time.monotonic() > end:
                raise StartFailed(f"{what} did not come in {_START_SECONDS:.0f} s\n{self.complaints()}")
            time.sleep(0.05)

    def _tail(self, name: str) -> str:
        log = self._folder / f"{name}.log"
        lines = [
            line
            for line in log.read_text(errors="replace").splitlines()
            if not line.startswith("I") and "level=info" not in line
        ]
        return "\n".join([f"--- the end of {log}", *lines[-_TAIL:]])


_CONTAINERD = """\
version = 2
root = "{root}"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "runc"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


def _bridge(pods: str, state: Path) -> str:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(state),
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]})
