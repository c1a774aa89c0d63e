"""`python -m cacheaware_sidecar`: settings, logs, signals and exit codes. The sidecar itself is `sidecar.py`.

Exit codes: 0 after SIGTERM or SIGINT, 1 when a part of it failed, 2 for a bad setting, file or port, named on stderr.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from prometheus_client import disable_created_metrics

from cacheaware_sidecar import logs
from cacheaware_sidecar.log_handler import BackgroundHandler
from cacheaware_sidecar.metrics import DroppedLinesCollector
from cacheaware_sidecar.secret_files import SecretsError
from cacheaware_sidecar.settings import Settings, parse
from cacheaware_sidecar.sidecar import Sidecar
from cacheaware_sidecar.view_source import ViewRefused

log = logging.getLogger(__name__)

_COLLECT_EVERY = 20_000  # objects that were made and are still there


def main(arguments: Sequence[str] | None = None, make_sidecar: Callable[[Settings], Sidecar] = Sidecar) -> NoReturn:
    settings = parse(arguments)
    lines = logs.configure(settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for
    try:
        sidecar = make_sidecar(settings)
    except (ViewRefused, SecretsError) as error:
        _fail(str(error))
    # What was imported lives as long as the process; what requests leave is little and seldom in cycles.
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 10, 10)
    try:
        with asyncio.Runner(loop_factory=_fast_loop()) as runner:
            well = runner.run(_serve(sidecar, lines))
            if sidecar.no_accounts is not None:
                log.error("the engine keeps no accounts: estimating", extra=logs.values(why=sidecar.no_accounts))
                sidecar = make_sidecar(dataclasses.replace(settings, kv_socket=None, no_accounts=sidecar.no_accounts))
                well = runner.run(_serve(sidecar, lines))
    except OSError as error:
        _fail(f"--host/--port or --control-host/--control-port: {error.strerror or error}")
    sys.exit(0 if well else 1)


async def _serve(sidecar: Sidecar, lines: BackgroundHandler) -> bool:
    """Until SIGTERM or SIGINT, then drained; a second signal ends it at once. False: a part of it failed."""
    sidecar.metrics.registry.register(DroppedLinesCollector(lambda: lines.dropped))
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with sidecar.serving():
        await _first_of(stop.wait(), sidecar.failed.wait())
        if not sidecar.failed.is_set():
            await _first_of(sidecar.drain(), at_once.wait())
    return not sidecar.failed.is_set()


async def _first_of(*work: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; nothing depends on it."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _fail(problem: str) -> NoReturn:
    sys.stderr.write(f"cacheaware-sidecar: {problem}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
