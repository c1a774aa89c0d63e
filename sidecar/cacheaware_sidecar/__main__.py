"""`python -m cacheaware_sidecar`: settings, logs, signals and exit codes. The sidecar itself is `sidecar.py`.

Exit codes: 0 after SIGTERM or SIGINT, 1 when a part of it failed, 2 for a bad setting, file or port, named on stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from cacheaware_sidecar import logs
from cacheaware_sidecar.secret_files import SecretsError
from cacheaware_sidecar.settings import parse
from cacheaware_sidecar.sidecar import Sidecar
from cacheaware_sidecar.view_source import ViewRefused


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    settings = parse(arguments)
    logs.configure(settings.log_level, settings.log_format)
    with contextlib.suppress(ImportError):  # faster where it is installed; nothing depends on it
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        sidecar = Sidecar(settings)
    except (ViewRefused, SecretsError) as error:
        _fail(str(error))
    try:
        asyncio.run(_serve(sidecar))
    except OSError as error:
        _fail(f"--host/--port or --control-host/--control-port: {error.strerror or error}")
    sys.exit(0)


async def _serve(sidecar: Sidecar) -> None:
    """Until SIGTERM or SIGINT, then drained; a second signal ends it at once."""
    stop, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with sidecar.serving():
        await stop.wait()
        waits = {asyncio.create_task(sidecar.drain()), asyncio.create_task(at_once.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def _fail(problem: str) -> NoReturn:
    sys.stderr.write(f"cacheaware-sidecar: {problem}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
