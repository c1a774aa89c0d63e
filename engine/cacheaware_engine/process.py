"""The engine process: servers at once, the model when it is loaded, and an orderly end.

Exit codes: 0 stopped on request, 1 the model could not be loaded or a step failed, 2 a setting that cannot work here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .app import create_app
from .engine_thread import EngineThread
from .errors import EngineError, Unavailable
from .kv_app import create_kv_app
from .listening import CannotListen, serving
from .logs import values
from .metrics import Metrics
from .service import ReadyModel, Service
from .settings import PROGRAM, Settings

if TYPE_CHECKING:
    from .startup import LoadedEngine

log = logging.getLogger(__name__)

T = TypeVar("T")

GOODBYE_S = 0.5  # once the engine has ended: for its last answers to reach their clients


async def run(settings: Settings) -> int:
    """Serve until told to stop, or until the engine breaks; returns the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    _stop_on_signals(loop, stop)
    service = Service(settings.served_model_name, settings.model, Metrics(settings.served_model_name))
    openai, kv = create_app(service, settings.max_body_bytes), create_kv_app(service)
    try:
        async with serving(openai, kv, settings.host, settings.port, settings.kv_socket) as port:
            log.info("listening", extra=values(host=settings.host, port=port, kv_socket=settings.kv_socket))
            loaded = await _unless(stop, _in_thread(lambda: _load(settings, service.metrics)))
            if loaded is None:
                return 0
            return await _live(settings, service, loaded, stop)
    except CannotListen as error:
        return _say(2, str(error))
    except EngineError as error:
        return _say(1, str(error))


def attach(service: Service, loaded: LoadedEngine, on_death: Callable[[BaseException], None]) -> EngineThread:
    """Start the step loop and let the service use it."""
    engine = EngineThread(loaded.engine, on_death)
    engine.start()
    service.metrics.follow(lambda: engine.ledger, lambda: engine.layout)
    now = int(time.time())
    service.loaded(
        ReadyModel(loaded.tokenizer, engine, loaded.limits, loaded.max_model_len, created=now, grammars=loaded.grammars)
    )
    return engine


async def _live(settings: Settings, service: Service, loaded: LoadedEngine, stop: asyncio.Event) -> int:
    death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    engine = attach(service, loaded, death.set_result)
    log.info("ready", extra=values(model=service.model_name))
    if await _unless(stop, death) is not None:
        log.error("the engine broke; the process ends", extra=values(reason=str(engine.death)))
        await asyncio.sleep(GOODBYE_S)
        return 1
    log.info("draining", extra=values(timeout_s=settings.drain_timeout))
    await service.drain(settings.drain_timeout)
    await engine.stop(Unavailable("this engine is shutting down: send the request elsewhere", code="draining"))
    log.info("stopped")
    return 0


def _load(settings: Settings, metrics: Metrics) -> LoadedEngine:
    from .startup import load  # torch takes seconds to import, and the servers answer meanwhile

    return load(settings, metrics)


async def _unless(stop: asyncio.Event, result: asyncio.Future[T]) -> T | None:
    """What `result` becomes; None if the stop comes first."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((stopped, result), return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        stopped.cancel()


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Run it on a daemon thread: unlike an executor's, it does not keep a process from ending that is told to."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # mypy: without an error there is a result

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = function()
        except BaseException as error:  # handed to whoever awaits the future
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            log.debug("the process ends before the model was loaded")

    threading.Thread(target=work, name="load", daemon=True).start()
    return future


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The first signal asks for an orderly end, the second ends the process."""

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("second signal: ending at once", extra=values(signal=number.name))
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _say(code: int, message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code
