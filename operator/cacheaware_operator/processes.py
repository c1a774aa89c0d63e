"""Supervise one child process: start it tied to us, watch its health, start it again when it ends, stop it.

What a part is and when to try again is decided elsewhere (`commands.py`, `backoff.py`); here are processes, signals and
log files. A child has a session of its own, so Ctrl-C in a terminal reaches only us, and its whole group is ended with
it. On Linux it also dies with us (`tether.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cacheaware_operator import backoff, tether
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState

_SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}
_TAIL_BYTES = 16 * 1024  # of a log, read when its last lines are wanted


class Clock(Protocol):
    """Time for back-off, so that tests need not wait for it."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Health(StrEnum):
    READY = "Ready"
    NOT_READY = "NotReady"  # does not answer, or answers that it is not ready
    BROKEN = "Broken"  # answers that it will never be ready again


@dataclass(frozen=True, slots=True)
class Probe:
    """One answer to "are you well?"; `message` is the part's own words."""

    health: Health
    message: str = ""


@dataclass(frozen=True, slots=True)
class PartCommand:
    """How to start one part of a replica."""

    name: PartName
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # all of it: nothing is inherited besides
    log_file: Path
    grace_seconds: float = 35.0  # from SIGTERM to SIGKILL: the parts drain for at most 30
    probe_seconds: float = field(default=0.25)  # between two questions


class SupervisedPart:
    """One part and all the processes that it is over time. Call from one event loop, on the main thread.

    The main thread, because the kernel ends a tied child when the thread that started it ends.
    """

    def __init__(
        self,
        command: PartCommand,
        probe: Callable[[], Awaitable[Probe]],
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self.command = command
        self._probe = probe
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._snapshot = PartSnapshot(command.name, PartState.STARTING, log=str(command.log_file))
        self._restarts = 0
        self._failures = 0  # exits in a row
        self._ended = ""  # how the last run ended
        self._ever_ready = False
        self._ready_since: float | None = None
        self._log_start = 0  # offset of this run's first line

    @property
    def snapshot(self) -> PartSnapshot:
        return self._snapshot

    def start(self) -> None:
        assert self._task is None, "a part is started once"
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.command.name}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the grace; returns when no process is left."""
        self._stopping.set()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(self.command.grace_seconds):
                    await process.wait()
            except TimeoutError:
                self.kill()
        if self._task is not None:
            await self._task

    def kill(self) -> None:
        """End the process and its group at once; `stop` still has to be awaited."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of what the latest run wrote."""
        try:
            with self.command.log_file.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []

    # -- the supervising task ------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while not self._stopping.is_set():
            self._set(PartState.STARTING, "has not answered yet")
            code = await self._run_once()
            if self._stopping.is_set():
                break
            healthy = 0.0 if self._ready_since is None else self._clock.now() - self._ready_since
            restart = backoff.after_exit(backoff.Exit(code, self._ever_ready, healthy), self._failures)
            ended = f"ended ({backoff.describe_exit(code, _SIGNAL_NAMES)})"
            if restart is None:
                self._ended = ended
                self._set(PartState.FAILED, ended)
                return
            self._failures = restart.failures
            self._restarts += 1
            self._ended = f"{ended}; starts again in {restart.delay:g} s"
            self._set(PartState.RESTARTING, self._ended)
            await self._sleep_unless_stopping(restart.delay)
        self._set(PartState.STOPPED, "")

    async def _run_once(self) -> int:
        """Start the process and watch it until it ends; its exit code."""
        self._ready_since = None
        command = (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.command.arguments)
        with self.command.log_file.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.command.environment),
                start_new_session=True,
            )
        if self._stopping.is_set():  # asked to stop while it was being started: it has nothing to finish yet
            _kill_group(process.pid)
        watching = asyncio.create_task(self._watch_health(process))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            _kill_group(process.pid)  # what it may have started itself

    async def _watch_health(self, process: asyncio.subprocess.Process) -> None:
        while True:
            probe = await self._probe()
            if self._stopping.is_set():
                return
            match probe.health:
                case Health.READY:
                    self._ever_ready = True
                    if self._ready_since is None:
                        self._ready_since = self._clock.now()
                    elif self._clock.now() - self._ready_since >= backoff.HEALTHY_AFTER:
                        self._failures = 0
                    self._set(PartState.READY, probe.message)
                case Health.NOT_READY:
                    state = PartState.STARTING if self._ready_since is None else PartState.NOT_READY
                    self._set(state, probe.message)
                case Health.BROKEN:
                    self._set(PartState.NOT_READY, probe.message)
                    _kill_group(process.pid)
                    return
            await asyncio.sleep(self.command.probe_seconds)

    async def _sleep_unless_stopping(self, seconds: float) -> None:
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({sleeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sleeping, stopping):
            task.cancel()
        await asyncio.gather(sleeping, stopping, return_exceptions=True)

    def _set(self, state: PartState, message: str) -> None:
        running = self._process is not None and self._process.returncode is None
        snapshot = PartSnapshot(
            name=self.command.name,
            state=state,
            restarts=self._restarts,
            failures=self._failures,
            message=message,
            pid=self._process.pid if running and self._process else None,
            log=str(self.command.log_file),
            ended=self._ended,
        )
        if snapshot != self._snapshot:
            self._snapshot = snapshot
            self._on_change()


def _kill_group(pid: int) -> None:
    """A child leads its own session, so its process group has its pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
