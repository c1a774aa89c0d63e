"""`cacheaware up` as a process of its own, over stand-in parts, with ways to wait for what it says and does.

For tests. The stand-ins are those of `cacheaware_operator.testing`: real processes, ports and signals, no model.
"""

from __future__ import annotations

import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from cacheaware import state_file
from cacheaware.state_file import State

DEADLINE = 200.0  # seconds: far more than anything here takes, and far less than a hang

# `cacheaware up` with stand-ins for the engine and the sidecar, and without a model to fetch.
UP_WITH_STAND_INS = """
import sys
from pathlib import Path
from rich.console import Console
from cacheaware.display import display
from cacheaware.local_pool import Options
from cacheaware.up import main
from cacheaware_operator import testing
from cacheaware_operator.local_fleet import Programs

async def fetch(source, on_progress):
    return Path(source.removeprefix("file://"))

options = Options(port=int(sys.argv[2]), programs=Programs(testing.ENGINE, testing.SIDECAR))
sys.exit(main(Path(sys.argv[1]), options, display(Console(), Console(stderr=True)), fetch))
"""


POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  model: {name: tiny, source: "file:///models/tiny"}
  engine: {type: Torch}
  tiers:
  - name: gold
    weight: 4
    quota: {nominalPercent: 50}
  - name: bronze
    quota: {nominalPercent: 30}
  defaultTier: bronze
  identity: {type: Open}
"""


class UpProcess:
    """A running `up`; everything that it prints arrives in `lines`."""

    def __init__(
        self, file: Path, environment: dict[str, str], state_home: Path, *, port: int = 0, code: str = UP_WITH_STAND_INS
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(file), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.state_home = state_home
        self.lines: list[str] = []
        self._incoming: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._incoming.put(line.rstrip("\n"))
        self._incoming.put(None)

    def expect(self, text: str) -> str:
        """Wait for the next line that contains `text`."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                line = self._incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                said = "\n".join(self.lines)
                raise AssertionError(f"no line with {text!r} within {DEADLINE:g} s; so far:\n{said}") from None
            if line is None:
                raise AssertionError(f"ended without a line with {text!r}; it said:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if text in line:
                return line

    def ready(self) -> State:
        self.expect("is ready")
        self.expect("Ctrl-C stops it")
        return self.state()

    def state(self) -> State:
        (state,) = state_file.read_all(self.state_home / "cacheaware")
        return state

    def until(self, condition: Callable[[State], bool]) -> State:
        """Wait until the state file says so. It is replaced at each change; there is no event to wait for."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            state = self.state()
            if condition(state):
                return state
            threading.Event().wait(0.05)
        raise AssertionError(f"the state never became as expected: {self.state()}")

    def pids(self) -> list[int]:
        return [part.pid for part in self.state().parts if part.pid is not None]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end: the exit code, and everything it said."""
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        while (line := self._incoming.get(timeout=DEADLINE)) is not None:
            self.lines.append(line)
        return code, "\n".join(self.lines)

    def clean_up(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        for child in children:
            if child.is_running():
                child.kill()
        self._reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        for state in state_file.read_all(self.state_home / "cacheaware"):
            if state.pid == self.process.pid:
                shutil.rmtree(state.folder, ignore_errors=True)  # killed, it could not do so itself


def all_gone(pids: Iterable[int]) -> bool:
    """Whether every process ends before the deadline."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def nobody_listens(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
