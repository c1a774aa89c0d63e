"""What vLLM's steps cost, summed for those who follow `GET /kv/steps`.

A step's time is from when it was scheduled, or the one before it was done, to when its results are in: with steps in
flight at once, times neither overlap nor leave gaps. KV bytes are those of the contexts read; unique ones count what
several requests share once, as all blocks that are held.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cacheaware_engine.step_reports import StepTotals, query_context


@dataclass(frozen=True, slots=True)
class _Scheduled:
    at: float
    tokens: int
    query_context: int
    context: int  # tokens that are read, of each request its own


class StepCosts:
    def __init__(self, bytes_per_token: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals = StepTotals()
        self._bytes_per_token = bytes_per_token
        self._clock = clock
        self._under_way: deque[_Scheduled] = deque()
        self._last_done = clock()
        self.held_tokens: Callable[[], int] = lambda: 0  # tokens of all blocks in use

    def scheduled(self, output: Any, requests: Mapping[str, Any]) -> None:
        if not output.total_num_scheduled_tokens:
            return
        attended = context = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            end = requests[request_id].num_computed_tokens
            attended += end if tokens == 1 else query_context(end - tokens, end)
            context += end
        self._under_way.append(_Scheduled(self._clock(), output.total_num_scheduled_tokens, attended, context))

    def computed(self, output: Any) -> None:
        if not output.total_num_scheduled_tokens or not self._under_way:
            return
        step, now = self._under_way.popleft(), self._clock()
        read = step.context * self._bytes_per_token
        self.totals = self.totals.plus(
            tokens=step.tokens,
            query_context=step.query_context,
            kv_bytes_read=read,
            unique_kv_bytes=min(read, self.held_tokens() * self._bytes_per_token),
            seconds=now - max(step.at, self._last_done),
        )
        self._last_done = now
