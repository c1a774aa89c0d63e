"""`cacheaware up`: run a pool file on this machine until Ctrl-C, and apply its edits while it runs.

An edit that needs a restart is not applied and said so: restarting an engine empties its cache and cuts its streams, so
when that happens is left to whoever runs the pool (end `cacheaware up` and start it again). The rest of such an edit is
applied. An edit that is invalid, or that makes it another pool, changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

from cacheaware import quick_start
from cacheaware.display import Display
from cacheaware.file_watch import FileWatch
from cacheaware.interrupts import until_signalled
from cacheaware.local_pool import LocalPool, Options
from cacheaware.model_fetch import ModelUnavailable, OnProgress, fetch_model
from cacheaware.state_file import AlreadyRunning
from cacheaware.validate import render
from cacheaware_api.conditions import Reason
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.objects import PoolFile, read_pool_file
from cacheaware_operator.errors import EditRefused, NotOnOneMachine, OperatorError, QuotasRefused, StartFailed
from cacheaware_operator.events import of_moves
from cacheaware_operator.fleet import PartSnapshot, PartState
from cacheaware_operator.one_machine import without_effect
from cacheaware_operator.reconciler import Pass

WATCH_SECONDS = 0.3  # two looks must agree, so an edit is picked up within a second

Fetch = Callable[[str, OnProgress], Awaitable[Path]]


def main(path: Path, options: Options, display: Display, fetch: Fetch = fetch_model) -> int:
    """Run the pool in the file at `path`; the exit code: 0 when asked to stop, 1 when it could not run."""
    try:
        content = path.read_bytes()
        pool_file = read_pool_file(content)
    except OSError as error:
        display.problem(f"{path}: cannot be read: {error.strerror or error}")
        return 1
    except ObjectInvalid as error:
        for problem in error.problems:
            display.problem(render(path, problem))
        return 1
    serving = _Serving(path, content, pool_file, dataclasses.replace(options, file=path), display, fetch)
    with contextlib.suppress(KeyboardInterrupt):  # before our own handlers are set
        code = asyncio.run(until_signalled(serving.run(), serving.kill))
        return 0 if code is None else code
    return 0


class _Serving:
    """One run of `up`, from the valid file to the last process gone."""

    def __init__(
        self, path: Path, content: bytes, pool_file: PoolFile, options: Options, display: Display, fetch: Fetch
    ) -> None:
        self._path = path
        self._content = content
        self._pool_file = pool_file
        self._options = options
        self._display = display
        self._fetch = fetch
        self._pool: LocalPool | None = None

    async def run(self) -> int:
        display = self._display
        try:
            await self._serve()
        except asyncio.CancelledError:
            display.line("Stopped.")
            raise
        except NotOnOneMachine as error:
            for reason in error.reasons:
                display.problem(f"{self._path}: {reason}")
        except ModelUnavailable as error:
            display.problem(f"{self._path}: spec.model.source: {error}")
        except StartFailed as error:
            _show_failure(error, display)
        except (OperatorError, AlreadyRunning, OSError) as error:
            display.problem(f"cacheaware up: {error}")
        return 1

    def kill(self) -> None:
        if self._pool is not None:
            self._display.line("Ending everything at once.")
            self._pool.kill()

    async def _serve(self) -> None:
        display = self._display
        for notice in without_effect(self._pool_file.pool.spec):
            display.line(f"Note: {notice}.")
        events = _Events(display)
        async with LocalPool.start(self._pool_file, self._options, events, self._get_model) as pool:
            self._pool = pool
            try:
                await pool.ready()
                display.progress_done()
                events.started = True
                for line in quick_start.lines(pool.wanted, pool.replicas):
                    display.line(line)
                await _watch(FileWatch(self._path, self._content), self._path, pool, display)
            except asyncio.CancelledError:
                display.progress_done()
                display.line("Stopping: running requests may finish (Ctrl-C again ends them at once).")
                raise

    async def _get_model(self, source: str) -> Path:
        self._display.progress(f"Getting the model {source}")
        try:
            return await self._fetch(source, self._display.progress)
        finally:
            self._display.progress_done()


async def _watch(watch: FileWatch, path: Path, pool: LocalPool, display: Display) -> None:
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        pool.check()
        content = watch.poll()
        if content is not None:
            await _apply_edit(content, path, pool, display)


async def _apply_edit(content: bytes, path: Path, pool: LocalPool, display: Display) -> None:
    before = pool.last
    try:
        found = pool.edit(read_pool_file(content))
    except ObjectInvalid as error:
        _not_applied([render(path, problem) for problem in error.problems], path, display)
    except (EditRefused, NotOnOneMachine) as error:
        _not_applied([f"{path}: {reason}" for reason in error.reasons], path, display)
    except OperatorError as error:
        _not_applied([f"{path}: {error}"], path, display)
    else:
        if not found:
            display.line(f"{path} was written; nothing in it changed.")
        for sentence in found.live:
            display.line(f"Changed: {sentence}")
        for sentence in found.no_effect:
            display.line(f"Changed, without effect here: {sentence}")
        for sentence in found.needs_restart:
            display.problem(f"Not applied: {sentence}: stop `cacheaware up` and start it again for this one")
        if found.live:
            await _tell_acknowledged(before, pool, display)


def _not_applied(lines: list[str], path: Path, display: Display) -> None:
    for line in lines:
        display.problem(line)
    display.problem(f"{path} was not applied; the pool runs on as before.")


async def _tell_acknowledged(before: Pass | None, pool: LocalPool, display: Display) -> None:
    try:
        done = await pool.acknowledged()
    except TimeoutError:
        display.problem("The engines have not acknowledged the change yet; `cacheaware status` tells when they do.")
        return
    except QuotasRefused as error:
        display.problem(f"Not in force: {error}. The engine keeps the quotas it has until the file is edited again.")
        return
    except StartFailed as error:
        _show_failure(error, display)
        display.problem("The other replicas run on; lower spec.replicas to give up this one.")
        return
    number = done.view.revision.number
    if before is not None and before.view.revision == done.view.revision:
        display.line(f"Applied; the view is still revision {number}.")
    else:
        replicas = len(done.snapshot.replicas)
        display.line(f"Applied: revision {number}, acknowledged by {replicas} engine{'s' if replicas != 1 else ''}.")


class _Events:
    """Told of every pass: shows what is started, what ends and comes back, and quota that moves."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._before: dict[tuple[str, str], PartSnapshot] = {}
        self._prefix_problem: str | None = None
        self.started = False

    def __call__(self, done: Pass) -> None:
        parts = {(replica.name, str(part.name)): part for replica in done.snapshot.replicas for part in replica.parts}
        if not self.started:
            waiting = [
                f"{replica} {name} ({part.message})"
                for (replica, name), part in parts.items()
                if part.state is not PartState.READY
            ]
            if parts:
                self._display.progress(f"Starting: {', '.join(waiting)}" if waiting else "Handing out quotas")
        else:
            for key, part in parts.items():
                self._tell(key, self._before.get(key), part)
        self._before = parts
        self._tell_prefix_problem(done)
        for event in of_moves(done.moves):
            self._display.line(f"Quota moved: {event.message}")

    def _tell_prefix_problem(self, done: Pass) -> None:
        """Public prefixes that do not fit keep nobody from being served; still their author should know."""
        problem = next((each.message for each in done.status.conditions if each.reason == Reason.SHARE_TOO_SMALL), None)
        if problem is not None and problem != self._prefix_problem:
            self._display.problem(f"Public prefixes are not resident: {problem}")
        self._prefix_problem = problem

    def _tell(self, key: tuple[str, str], before: PartSnapshot | None, part: PartSnapshot) -> None:
        name = f"{key[0]}: the {key[1]}"
        if before is None:
            return
        # Between two passes it may have ended and be ready again.
        ended = part.restarts > before.restarts or (part.state is PartState.FAILED and before.state is not part.state)
        if ended:
            self._display.problem(f"{name} {part.ended} (log: {part.log})")
        if part.state is PartState.READY and (ended or before.state is not PartState.READY):
            self._display.line(f"{name} is ready again.")


def _show_failure(error: StartFailed, display: Display) -> None:
    display.progress_done()
    display.problem(f"cacheaware up: {error.part} {error.reason}")
    for line in error.last_lines:
        display.problem(f"    {line}")
    if error.log is not None:
        display.problem(f"Its whole output: {error.log}")
