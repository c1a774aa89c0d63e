"""A machine of its own inside this one, for a node: network, mounts and processes apart, gone with one kill.

Nothing outside changes but: one end of a virtual cable, three routes to it, and cgroup folders named `NAME`-PID. The
first two go with the namespaces; the folders are removed at the end, and those of a run that was killed by the next.
Whatever ends this process ends the namespaces too: the kernel kills `unshare` when its parent ends, `unshare` kills the
first process inside, and with that everything inside ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from e2e.control_plane import StartFailed, Unavailable

NAME = "cacheaware-e2e"
_CGROUPS = Path("/sys/fs/cgroup")
_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
_START_SECONDS = 60.0

# The kubelet sets these for the whole machine, unless they read as it wants them: files with its values lie over them.
_SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Where things are. Pods and services are reached from outside through routes to the node."""

    number: int

    @property
    def link(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.244.{self.number}.0/30")

    @property
    def outside(self) -> str:
        return str(self.link[1])

    @property
    def node(self) -> str:
        return str(self.link[2])

    @property
    def pods(self) -> str:
        return f"10.245.{self.number}.0/24"

    @property
    def services(self) -> str:
        return f"10.246.{self.number}.0/24"


def check() -> None:
    """Raises `Unavailable` where a machine inside this one cannot be made."""
    if os.geteuid() != 0:
        raise Unavailable("a node needs root: run this as root, or leave it to a machine where you may")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} missing: apt-get install util-linux iproute2 mount")
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        raise Unavailable(f"namespaces cannot be made here: {tried.stderr.strip()}")


class Machine:
    """`with Machine(folder) as machine:` its first process is there, and the network; `command` runs things in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unshare: subprocess.Popen[bytes] | None = None
        self._first = 0  # the first process inside, as seen from outside
        self.network = Network(_free_number())

    def __enter__(self) -> Machine:
        _remove_cgroups(left_over=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._unshare is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first or self._unshare.pid, 9)
            self._unshare.kill()
            self._unshare.wait()
        if self._first:
            _run("ip", "link", "delete", self._cable, check=False)  # it would go by itself, a little later
            _until("the cgroups are empty", lambda: _remove_cgroups(self.cgroup), StartFailed)

    @property
    def cgroup(self) -> str:
        return f"{NAME}-{self._first}"

    def command(self, *arguments: str | Path) -> list[str]:
        """The command that runs `arguments` inside."""
        return ["nsenter", "--target", str(self._first), "--net", "--mount", "--pid", "--", *map(str, arguments)]

    def run(self, *arguments: str) -> str:
        """Run `arguments` inside, to their end."""
        return _run(*self.command(*arguments))

    # -- start --------------------------------------------------------------------------------------------------------

    @property
    def _cable(self) -> str:
        return f"cae2e{self.network.number}"

    def _start(self) -> None:
        script = "\n".join(
            [
                "set -e",
                "mount --make-rprivate /",
                *self._sysctls(),
                *self._own_var(),
                "mount --make-rshared /",  # kubelet and containerd must see each other's mounts, the outside must not
                "ip link set lo up",
                "mount -t tmpfs run /run",
                "touch /run/ready",
                "while :; do sleep 3600 & wait; done",  # as the first process it also reaps what others leave
            ]
        )
        isolated = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self._folder / "namespaces.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *isolated, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        _until("the namespaces", self._is_there, StartFailed)
        self._make_network()
        self._make_cgroups()

    def _sysctls(self) -> list[str]:
        lines = []
        for name, value in _SYSCTLS.items():
            file = self._folder / name.replace("/", "-")
            file.write_text(f"{value}\n")
            lines.append(f"mount --bind {shlex.quote(str(file))} /proc/sys/{name}")
        return lines

    def _own_var(self) -> list[str]:
        """The kubelet and the network plugins also write below /var: it goes into the folder."""
        upper, work = self._folder / "var" / "upper", self._folder / "var" / "work"
        upper.mkdir(parents=True)
        work.mkdir()
        return [f"mount -t overlay overlay -o lowerdir=/var,upperdir={upper},workdir={work} /var"]

    def _is_there(self) -> bool:
        assert self._unshare is not None
        if self._unshare.poll() is not None:
            raise StartFailed(f"unshare ended: {(self._folder / 'namespaces.log').read_text()}")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        if not children:
            return False
        self._first = int(children[0])
        return Path(f"/proc/{self._first}/root/run/ready").exists()

    def _make_network(self) -> None:
        net, inside = self.network, self._cable
        _run("ip", "link", "add", inside, "type", "veth", "peer", "name", "eth0", "netns", str(self._first))
        _run("ip", "address", "add", f"{net.outside}/30", "dev", inside)
        _run("ip", "link", "set", inside, "up")
        for command in (
            ("ip", "address", "add", f"{net.node}/30", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
            ("ip", "route", "add", "default", "via", net.outside),
            ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
        ):
            self.run(*command)
        for target in (net.pods, net.services):
            _run("ip", "route", "add", target, "via", net.node, "dev", inside)

    def _make_cgroups(self) -> None:
        for hierarchy in _hierarchies():
            folder = hierarchy / self.cgroup
            folder.mkdir()
            if (hierarchy / "cpuset.cpus").is_file():  # of the first version: empty until somebody says so
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    (folder / setting).write_text((hierarchy / setting).read_text())


# -- outside ----------------------------------------------------------------------------------------------------------


def _free_number() -> int:
    """Of a network that nobody has a route to: several runs on one machine do not meet."""
    routes = _run("ip", "-4", "route", "show")
    for number in range(1, 255):
        network = Network(number)
        if not any(text in routes for text in (str(network.link), network.pods, network.services)):
            return number
    raise Unavailable("all networks 10.244.N.0/30 are taken")


def _hierarchies() -> list[Path]:
    """Every hierarchy of the first version, or the one of the second."""
    if (_CGROUPS / "cgroup.controllers").is_file():
        return [_CGROUPS]
    return [folder for folder in _CGROUPS.iterdir() if folder.is_dir() and (folder / "tasks").is_file()]


def _remove_cgroups(name: str | None = None, *, left_over: bool = False) -> bool:
    """Remove the folders of `name`, or those of processes that are no more; tells whether all of them are gone."""
    for folder in (*_CGROUPS.glob(f"{NAME}-*"), *_CGROUPS.glob(f"*/{NAME}-*")):
        number = folder.name.rpartition("-")[2]
        if folder.name != name and not (left_over and number.isdigit() and not Path(f"/proc/{number}").exists()):
            continue
        for path, _, _ in os.walk(folder, topdown=False):
            try:
                os.rmdir(path)
            except OSError:  # its last processes are still ending
                return False
    return True


def _until(what: str, look: Callable[[], bool], error: type[Exception]) -> None:
    end = time.monotonic() + _START_SECONDS
    while not look():
        if time.monotonic() > end:
            raise error(f"{what}: not within {_START_SECONDS:.0f} s")
        time.sleep(0.05)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise StartFailed(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
