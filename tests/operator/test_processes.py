"""Supervision of one part, with real processes. Back-off runs on a clock that the test moves."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from cacheaware_operator import ports, tether
from cacheaware_operator.fleet import PartName, PartState
from cacheaware_operator.processes import Health, PartCommand, Probe, SupervisedPart
from cacheaware_operator.sidecar_client import engine_health
from cacheaware_operator.testing import ENGINE

PATIENCE = 120  # seconds for a process to start, to be ready or to end: far more than any of it takes


class HandClock:
    """A clock that stands still; a sleep ends when the test lets it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sleeps: asyncio.Queue[tuple[float, asyncio.Event]] = asyncio.Queue()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        over = asyncio.Event()
        self.sleeps.put_nowait((seconds, over))
        await over.wait()

    async def next_sleep(self) -> tuple[float, asyncio.Event]:
        async with asyncio.timeout(PATIENCE):
            return await self.sleeps.get()


class Supervision:
    """A supervised stand-in engine, and a way to wait for what happens to it."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.session = session
        self.clock = HandClock()
        self.changed = asyncio.Event()
        (self.port,) = ports.free_ports(1)
        self.part: SupervisedPart | None = None

    def start(self, environment: dict[str, str] | None = None, **options: float) -> SupervisedPart:
        command = PartCommand(
            name=PartName.ENGINE,
            arguments=(*ENGINE, "--port", str(self.port)),
            environment={**os.environ, **(environment or {})},
            log_file=self.folder / "engine.log",
            probe_seconds=0.02,
            **options,
        )
        self.part = SupervisedPart(
            command,
            lambda: engine_health(self.session, f"http://127.0.0.1:{self.port}"),
            on_change=self.changed.set,
            clock=self.clock,
        )
        self.part.start()
        return self.part

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def until_state(self, state: PartState) -> None:
        assert self.part is not None
        part = self.part
        await self.until(lambda: part.snapshot.state is state)


@pytest.fixture
async def supervision(tmp_path: Path) -> AsyncIterator[Supervision]:
    async with aiohttp.ClientSession() as session:
        it = Supervision(tmp_path, session)
        yield it
        if it.part is not None:
            it.part.kill()
            await it.part.stop()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_part_is_starting_until_it_says_that_it_is_ready(supervision: Supervision, tmp_path: Path) -> None:
    part = supervision.start({"STANDIN_LOADING": str(tmp_path / "loaded")})
    await supervision.until(lambda: part.snapshot.message == "loading")
    assert part.snapshot.state is PartState.STARTING
    (tmp_path / "loaded").touch()
    await supervision.until_state(PartState.READY)


async def test_a_part_that_is_ready_no_more_is_not_ready_rather_than_starting(
    supervision: Supervision, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    loaded.touch()
    supervision.start({"STANDIN_LOADING": str(loaded)})
    await supervision.until_state(PartState.READY)
    loaded.unlink()
    await supervision.until_state(PartState.NOT_READY)


async def test_a_killed_part_is_started_again_after_waits_that_double(supervision: Supervision) -> None:
    part = supervision.start()
    for restarts, expected in enumerate([1, 2, 4], start=1):
        await supervision.until_state(PartState.READY)
        pid = part.snapshot.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        delay, over = await supervision.clock.next_sleep()
        assert delay == expected
        assert part.snapshot.state is PartState.RESTARTING
        assert part.snapshot.restarts == restarts
        assert "SIGKILL" in part.snapshot.message
        over.set()
    await supervision.until_state(PartState.READY)


async def test_a_minute_of_health_resets_the_wait(supervision: Supervision) -> None:
    part = supervision.start()
    for healthy, expected in ((0, 1), (0, 2), (60, 1)):
        await supervision.until_state(PartState.READY)
        supervision.clock.time += healthy
        assert part.snapshot.pid is not None
        os.kill(part.snapshot.pid, signal.SIGKILL)
        delay, over = await supervision.clock.next_sleep()
        assert delay == expected
        over.set()


async def test_a_part_that_cannot_start_fails_for_good_and_its_last_words_are_kept(supervision: Supervision) -> None:
    part = supervision.start({"STANDIN_EXIT": "2:--threads: expected a number, got 'many'"})
    await supervision.until_state(PartState.FAILED)
    assert "exit code 2" in part.snapshot.message
    assert part.last_lines() == ["--threads: expected a number, got 'many'"]
    assert supervision.clock.sleeps.empty()


async def test_a_program_that_does_not_exist_fails_for_good(supervision: Supervision, tmp_path: Path) -> None:
    command = PartCommand(PartName.ENGINE, ("/nonexistent/engine",), dict(os.environ), tmp_path / "log")

    async def never_asked() -> Probe:
        return Probe(Health.NOT_READY)

    supervision.part = SupervisedPart(command, never_asked, on_change=supervision.changed.set)
    supervision.part.start()
    await supervision.until_state(PartState.FAILED)
    assert supervision.part.last_lines() == ["could not start /nonexistent/engine: No such file or directory"]


async def test_a_part_that_reports_itself_broken_is_replaced(supervision: Supervision, tmp_path: Path) -> None:
    answers = [Probe(Health.READY), Probe(Health.BROKEN, "step loop died")]

    async def probe() -> Probe:
        return answers.pop(0) if answers else Probe(Health.NOT_READY)

    command = PartCommand(
        PartName.ENGINE, (*ENGINE, "--port", str(supervision.port)), dict(os.environ), tmp_path / "log", probe_seconds=0
    )
    supervision.part = SupervisedPart(command, probe, on_change=supervision.changed.set, clock=supervision.clock)
    supervision.part.start()
    delay, _ = await supervision.clock.next_sleep()
    assert delay == 1
    assert supervision.part.snapshot.state is PartState.RESTARTING


async def test_stopping_ends_the_part_and_nothing_is_started_again(supervision: Supervision) -> None:
    part = supervision.start()
    await supervision.until_state(PartState.READY)
    pid = part.snapshot.pid
    assert pid is not None
    await part.stop()
    assert gone(pid)
    assert part.snapshot.state is PartState.STOPPED
    assert part.snapshot.restarts == 0


async def test_stopping_while_it_is_being_started_leaves_nothing(supervision: Supervision) -> None:
    part = supervision.start({"STANDIN_STUBBORN": "1"})
    await asyncio.sleep(0)  # the start has begun, and there is no process yet
    async with asyncio.timeout(PATIENCE):
        await part.stop()
    assert part.snapshot.state is PartState.STOPPED
    assert part.snapshot.pid is None


async def test_stopping_does_not_wait_for_a_back_off_to_end(supervision: Supervision) -> None:
    part = supervision.start()
    await supervision.until_state(PartState.READY)
    assert part.snapshot.pid is not None
    os.kill(part.snapshot.pid, signal.SIGKILL)
    await supervision.clock.next_sleep()
    async with asyncio.timeout(PATIENCE):
        await part.stop()
    assert part.snapshot.state is PartState.STOPPED


async def test_a_part_that_ignores_sigterm_is_killed_after_its_grace(supervision: Supervision) -> None:
    part = supervision.start({"STANDIN_STUBBORN": "1"}, grace_seconds=0.1)
    await supervision.until_state(PartState.READY)
    pid = part.snapshot.pid
    assert pid is not None
    await part.stop()
    assert gone(pid)


async def test_what_a_part_started_itself_ends_with_it(supervision: Supervision, tmp_path: Path) -> None:
    part = supervision.start({"STANDIN_CHILD": str(tmp_path / "child")})
    await supervision.until_state(PartState.READY)
    grandchild = psutil.Process(int((tmp_path / "child").read_text()))
    await part.stop()
    await asyncio.to_thread(psutil.wait_procs, [grandchild], PATIENCE)
    assert gone(grandchild.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent")
def test_a_tethered_command_dies_when_its_parent_is_killed() -> None:
    command = "import signal; print('up', flush=True); signal.pause()"
    parent_code = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, {tether.__file__!r}, str(os.getpid()), sys.executable, "-c", {command!r}],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=PATIENCE)
    assert not alive


def test_a_tethered_command_does_not_start_when_its_parent_has_already_ended() -> None:
    strangers_pid = "1"
    result = subprocess.run(
        [sys.executable, tether.__file__, strangers_pid, sys.executable, "-c", "print('started')"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "started" not in result.stdout
