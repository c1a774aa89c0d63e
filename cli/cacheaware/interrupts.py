"""Run something until it ends or a signal asks it to: the first asks, the second ends every process at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


async def until_signalled(run: Coroutine[Any, Any, int], kill: Callable[[], None]) -> int | None:
    """The exit code of `run`, which is cancelled at the first SIGINT, SIGTERM or SIGHUP; None if it ended by that.

    `kill` is called at every further signal, while `run` still cleans up.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run)
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            kill()
        else:
            asked = True
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for each in signals:
        loop.add_signal_handler(each, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not asked:
            raise
        return None
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
