"""What the engine's steps cost, followed as it tells: `GET /kv/steps`, server-sent events, for the cost model.

Nobody waits for it. An engine that does not tell is asked again now and then; the scheduler does without until then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

import aiohttp

from cacheaware_api import wire
from cacheaware_sidecar.engine_state import FAILURES, RETRY_SECONDS, words
from cacheaware_sidecar.logs import values

log = logging.getLogger(__name__)

_NOT_TOLD_SECONDS = 30.0  # before an engine that has no such path is asked again
_LONGEST_REPORT = 64 * 1024


class _NotTold(Exception):
    """This engine does not report its steps."""


async def follow_steps(session: aiohttp.ClientSession, on_step: Callable[[wire.StepReport], None]) -> None:
    """Runs until cancelled. `session` goes to the engine's KV side."""
    while True:
        try:
            await _follow(session, on_step)
            await asyncio.sleep(RETRY_SECONDS)
        except _NotTold as error:
            log.info("the engine does not tell what its steps cost", extra=values(problem=str(error)))
            await asyncio.sleep(_NOT_TOLD_SECONDS)
        except (*FAILURES, wire.WireError, ValueError) as error:
            log.debug("the engine's steps cannot be followed", extra=values(problem=words(error)))
            await asyncio.sleep(RETRY_SECONDS)


async def _follow(session: aiohttp.ClientSession, on_step: Callable[[wire.StepReport], None]) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)  # an idle engine is silent
    async with session.get("http://engine/kv/steps", timeout=timeout) as answer:
        if answer.status != 200 or answer.content_type != "text/event-stream":
            raise _NotTold(f"GET /kv/steps answered {answer.status} {answer.content_type}")
        rest = b""
        async for data in answer.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data:"):
                    on_step(wire.from_json(wire.StepReport, json.loads(event[5:])))
            if len(rest) > _LONGEST_REPORT:
                raise ValueError(f"a report of more than {_LONGEST_REPORT} bytes")
