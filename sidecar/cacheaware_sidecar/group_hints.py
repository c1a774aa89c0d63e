"""What the engine is told of groups that will grow: `PUT /kv/hints`, once a second at most and only what has changed.

A hint asks for free blocks side by side; it charges nobody and evicts nothing. `GroupHints` decides, `tell_hints` acts.
Nobody waits for it, and an engine that takes no hints is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from cacheaware_api import wire
from cacheaware_sidecar.engine_state import FAILURES, words
from cacheaware_sidecar.logs import values
from cacheaware_sidecar.scheduling.active_groups import GroupWorkingSet

log = logging.getLogger(__name__)

SHOWN_GROUPS = 16
TTL_SECONDS = 10.0  # how long a hint is to be believed, and how far it looks ahead
_PART = 10  # the engine sets aside at most one block in so many
_CHANGE = 0.25  # smaller changes of a group's blocks are not told
_PACE_SECONDS = 1.0
_NOT_TAKEN_SECONDS = 30.0


class GroupHints:
    """Remembers what the engine was told, so that it is told what differs from that, or will lapse soon."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, float]] = {}  # blocks, and when

    @property
    def blocks(self) -> Mapping[str, int]:
        """By group, as the engine was last told."""
        return {group: blocks for group, (blocks, _) in self._told.items()}

    def news(self, groups: Sequence[GroupWorkingSet], ledger: wire.Ledger, now: float) -> wire.Hints | None:
        """What to tell now; None: nothing. It counts as told: what fails lapses and is told again."""
        left = ledger.capacity // _PART
        wanted: dict[str, int] = {}
        for group in groups:
            blocks = min(left, math.ceil(group.growth_within(TTL_SECONDS) / ledger.block_size))
            if blocks:
                wanted[group.id] = blocks
                left -= blocks
        hints = {
            name: wire.GroupHint(blocks, TTL_SECONDS)
            for name, blocks in wanted.items()
            if self._differs(name, blocks, now)
        }
        gone = {name: at for name, (_, at) in self._told.items() if name not in wanted}
        hints |= {name: wire.GroupHint(0, 0.0) for name, at in gone.items() if at > now - TTL_SECONDS}
        for name in gone:
            del self._told[name]
        self._told |= {name: (blocks, now) for name, blocks in wanted.items() if name in hints}
        return wire.Hints(hints) if hints else None

    def _differs(self, group: str, blocks: int, now: float) -> bool:
        told, at = self._told.get(group, (0, 0.0))
        return abs(blocks - told) > _CHANGE * told or at <= now - TTL_SECONDS / 2


async def tell_hints(session: aiohttp.ClientSession, news: Callable[[], wire.Hints | None]) -> None:
    """Runs until cancelled. `session` goes to the engine's KV side."""
    while True:
        await asyncio.sleep(_PACE_SECONDS)
        hints = news()
        if hints is None:
            continue
        try:
            timeout = aiohttp.ClientTimeout(total=5)
            async with session.put("http://engine/kv/hints", json=wire.to_json(hints), timeout=timeout) as answer:
                if answer.status != 200:
                    said = (await answer.text(errors="replace"))[:200]
                    log.info("the engine takes no hints", extra=values(problem=f"{answer.status}: {said}"))
                    await asyncio.sleep(_NOT_TAKEN_SECONDS)
        except FAILURES as error:
            log.debug("the engine could not be told of groups", extra=values(problem=words(error)))
