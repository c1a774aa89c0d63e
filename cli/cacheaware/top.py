"""`cacheaware top`: a running pool, live. It asks the sidecars' control side again and again, and shows each look.

Where to ask comes from the state of a local `cacheaware up`, read anew each time (replicas come and go), or from a URL
and a token.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

import aiohttp
from rich.console import Console
from rich.live import Live

from cacheaware.pool_status import NotRunning
from cacheaware.state_file import State
from cacheaware.top_frame import Answer, Frame, frame
from cacheaware.top_screen import screen
from cacheaware_operator.errors import Unreachable
from cacheaware_operator.sidecar_client import SidecarClient


@dataclasses.dataclass(frozen=True, slots=True)
class Replica:
    name: str
    control_url: str
    token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where to ask. `replicas` may raise `NotRunning`."""

    title: str
    replicas: Callable[[], Sequence[Replica]]


def from_state(find: Callable[[], State]) -> Source:
    """The pool that `find` finds now; raises `NotRunning`."""
    state = find()

    def replicas() -> Sequence[Replica]:
        current = find()
        return [Replica(each.name, each.control_url, current.token) for each in current.replicas]

    return Source(f"{state.pool.namespace}/{state.pool.name}", replicas)


def from_url(url: str, token: str) -> Source:
    return Source(url, lambda: [Replica(url.partition("://")[2] or url, url, token)])


async def once(source: Source, session: aiohttp.ClientSession, previous: Frame | None = None) -> Frame:
    """Ask every replica now; one that does not answer is a line in the frame. Raises `NotRunning`."""
    answers = await asyncio.gather(*(_ask(replica, session) for replica in source.replicas()))
    return frame(source.title, answers, time.monotonic(), previous)


async def _ask(replica: Replica, session: aiohttp.ClientSession) -> Answer:
    try:
        return Answer(replica.name, await SidecarClient(session, replica.control_url, replica.token).status())
    except Unreachable as error:
        return Answer(replica.name, None, str(error))


async def print_once(source: Source, console: Console) -> bool:
    """One frame; False if no replica answered."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        shown = await once(source, session)
    console.print(screen(shown))
    return shown.answered > 0


async def watch(source: Source, console: Console, interval: float) -> None:
    """Until the pool ends (`NotRunning`) or the caller cancels."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        current = await once(source, session)
        with Live(screen(current), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                live.refresh()
                await asyncio.sleep(interval)
                current = await once(source, session, current)
                live.update(screen(current))


def main(source: Source, console: Console, *, interval: float, just_once: bool) -> int:
    """The exit code: 0, or 1 where `just_once` found nobody. Raises `NotRunning`."""
    try:
        if just_once:
            return 0 if asyncio.run(print_once(source, console)) else 1
        asyncio.run(watch(source, console, interval))
    except KeyboardInterrupt:
        return 0
    except NotRunning as error:
        console.print(str(error), soft_wrap=True)
        return 1
    return 0
