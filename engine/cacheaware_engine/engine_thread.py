"""Runs an `Engine` on a thread of its own, and lets the event loop talk to it.

Whatever the servers want of the engine is a command, run between two steps, so no request ever waits on a lock in the
middle of a step. After commands and steps the last ledger and step totals are published for whoever reads them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cacheaware_api.wire import Ledger

from .errors import EngineBroke, Unavailable
from .outbox import Outbox
from .requests import RequestId, Submission
from .step_reports import StepTotals

if TYPE_CHECKING:
    from .blocks import Layout
    from .engine import Engine  # it loads torch; the servers answer before that is done

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_LOOK_S = 1.0  # how often an idle engine looks at its ledger: retention runs out without any command
RETRY_S = 0.02  # waiters and nothing admitted, which only time (retention) can change


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    future: Future[Any]
    priority: int | None = None  # of a submission; those that arrive for the same step start in this order


class EngineThread:
    """The step loop. Made on the event loop that its outboxes and followers belong to."""

    def __init__(self, engine: Engine, on_death: Callable[[BaseException], None]) -> None:
        """`on_death` is called on the event loop, once, if a step fails."""
        self._engine = engine
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._followers: set[asyncio.Event] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.death: BaseException | None = None
        self.ledger: Ledger = engine.ledger()
        self.totals: StepTotals = engine.totals
        self._told: StepTotals = engine.totals  # what followers have heard of

    @property
    def layout(self) -> Layout:
        """How blocks lie, at most a second ago while steps run."""
        return self._engine.layout

    # -- for the event loop -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    async def stop(self, error: Exception | None = None) -> None:
        """End the loop after its current step; what is still live ends with `error`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        if error is not None and self.death is None:
            self._engine.fail_all(error)

    def outbox(self, requests: int) -> Outbox:
        return Outbox(self._loop, requests)

    async def submit(self, submission: Submission, outbox: Outbox) -> None:
        """The request waits or runs from now on. Raises `BadRequest` for what can never run."""
        command = self._enqueue(lambda engine: engine.submit(submission, outbox), submission.priority)
        await asyncio.wrap_future(command.future)

    def abort(self, request_id: RequestId) -> None:
        """Forget the request before the next step, whatever it is doing. It may have ended already."""
        if self.death is None and not self._stopping:
            self._enqueue(lambda engine: engine.abort(request_id))

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run `command` between two steps."""
        result: T = await asyncio.wrap_future(self._enqueue(command).future)
        return result

    @contextmanager
    def following(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever ledger or totals may have changed; the follower clears it."""
        event = asyncio.Event()
        self._followers.add(event)
        try:
            yield event
        finally:
            self._followers.discard(event)

    def _enqueue(self, run: Callable[[Engine], Any], priority: int | None = None) -> _Command:
        command = _Command(run, Future(), priority)
        with self._wake:
            if self.death is not None:
                raise EngineBroke(f"the engine broke: {self.death}")
            if self._stopping:
                raise Unavailable("the engine is stopping")
            self._commands.append(command)
            self._wake.notify()
        return command

    def _notify(self) -> None:
        for event in self._followers:
            event.set()

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            worked = False
            while True:
                commands = self._take(0 if worked else RETRY_S if self._engine.busy else IDLE_LOOK_S)
                if self._stopping:
                    break
                self._execute(commands)
                if self._engine.busy:
                    worked = self._engine.step(self._publish)
                else:
                    worked = False
                    if not commands:
                        self._publish()
            self._refuse(commands, Unavailable("the engine is stopping"))
        except BaseException as error:
            log.exception("a step failed; the engine stops")
            self._die(error)

    def _take(self, wait_s: float) -> list[_Command]:
        """Commands given since the last call; waits at most so long for one."""
        with self._wake:
            if not self._commands and not self._stopping and wait_s:
                self._wake.wait(wait_s)
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _execute(self, commands: list[_Command]) -> None:
        """Run them, then publish, then answer: who has an answer finds it in the ledger."""
        answers: list[Callable[[], None]] = []
        for submissions, group in itertools.groupby(commands, key=lambda command: command.priority is not None):
            for command in sorted(group, key=lambda command: command.priority or 0) if submissions else group:
                if not command.future.set_running_or_notify_cancel():
                    continue  # whoever asked for it is gone
                try:
                    result = command.run(self._engine)
                    answers.append(functools.partial(command.future.set_result, result))
                except Exception as error:  # refused; it is the caller's to answer, and the loop goes on
                    answers.append(functools.partial(command.future.set_exception, error))
        if answers:
            self._publish()
        for answer in answers:
            answer()

    def _publish(self) -> None:
        before = self.ledger.sequence
        self.ledger, self.totals = self._engine.ledger(), self._engine.totals
        if self._followers and (self.ledger.sequence != before or self.totals is not self._told):
            self._told = self.totals
            self._on_event_loop(self._notify)

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self.death = error
            commands = list(self._commands)
            self._commands.clear()
        broke = EngineBroke(f"the engine broke: {error}")
        self._refuse(commands, broke)
        self._engine.fail_all(broke)
        self._on_event_loop(self._on_death, error)
        self._on_event_loop(self._notify)

    def _refuse(self, commands: list[_Command], error: Exception) -> None:
        for command in commands:
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(error)

    def _on_event_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed already")
