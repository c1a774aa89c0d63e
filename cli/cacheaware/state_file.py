"""The file that a running `cacheaware up` leaves for `status` and its kind: where the pool is and how to ask it.

`$XDG_STATE_HOME/cacheaware/<namespace>-<pool>.json`, readable by its owner alone because it holds the control token. A
file whose process is gone is stale: it is told apart by the process's start time, since pids are used again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cacheaware_api import wire
from cacheaware_operator.local_folder import replace_file

FOLDER_PREFIX = "cacheaware-"


class StateUnreadable(Exception):
    """A state file that is not ours to read, or not what we write."""


class AlreadyRunning(Exception):
    """Another `cacheaware up` runs this pool."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    name: str
    url: str
    control_url: str
    engine_url: str
    kv_socket: str


@dataclass(frozen=True, slots=True)
class PartRecord:
    replica: str
    name: str
    state: str
    restarts: int
    failures: int = 0
    message: str = ""
    pid: int | None = None
    log: str | None = None


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """Which object runs: enough to compute its status from what the sidecars say."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class State:
    pid: int
    started: float  # the process's start, seconds since the epoch
    folder: str  # its private working folder
    file: str  # the pool file that it watches
    pool: PoolIdentity
    replicas: tuple[ReplicaAddress, ...]
    token: str
    parts: tuple[PartRecord, ...] = ()
    revision: wire.Revision | None = None  # of the view last handed out
    status: Mapping[str, Any] | None = None

    def is_running(self) -> bool:
        """Whether the process that wrote this still runs (and not another that got its pid)."""
        return process_started(self.pid) == self.started


def process_started(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    home = environment.get("XDG_STATE_HOME", "")
    # The XDG rules say that a relative path there is to be ignored.
    root = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return root / "cacheaware"


def path_for(namespace: str, pool: str, folder: Path) -> Path:
    return folder / f"{namespace}-{pool}.json"


def write(path: Path, state: State) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, json.dumps(wire.to_json(state), indent=1))


def claim(path: Path, make: Callable[[], State]) -> State:
    """Take the pool's name: write the state that `make` gives, unless a running process holds it (`AlreadyRunning`).

    What a process that was killed left behind, the file and its working folder, is cleaned up.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            old = read(path)
        except StateUnreadable:
            old = None  # nobody can use it: as good as none
        if old is not None and old.is_running():
            raise AlreadyRunning(
                f"pool {old.pool.namespace}/{old.pool.name} runs already: `cacheaware up` with pid {old.pid}; "
                f"stop that one first (kill {old.pid})"
            )
        if old is not None and Path(old.folder).name.startswith(FOLDER_PREFIX):
            shutil.rmtree(old.folder, ignore_errors=True)
        state = make()
        write(path, state)
        return state


def release(path: Path, state: State) -> None:
    """Give the name back, unless somebody else has taken it meanwhile."""
    with _locked(path.parent):
        try:
            current = read(path)
        except StateUnreadable:
            current = None
        if current is not None and (current.pid, current.started) == (state.pid, state.started):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time decides who holds a name; the lock goes with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(path: Path) -> State | None:
    """The state in `path`, None if there is no such file."""
    try:
        return wire.from_json(State, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # WireError and bad JSON or UTF-8 are ValueErrors
        raise StateUnreadable(f"{path}: {error}; remove it if no `cacheaware up` runs") from None


def read_all(folder: Path) -> Iterator[State]:
    """Every readable state in the folder, by file name; one that cannot be read is skipped."""
    for path in sorted(folder.glob("*.json")):
        try:
            state = read(path)
        except StateUnreadable:
            continue
        if state is not None:
            yield state
