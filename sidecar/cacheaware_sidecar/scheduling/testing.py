"""An engine in virtual time for tests of the scheduler: prompts first come first served, then one token a step.

It is as simple as an engine can be that still rewards order and shared prefixes. Its steps cost what `prices` say.
"""

from __future__ import annotations

import dataclasses

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.scheduling.cost_model import StepPrices
from cacheaware_sidecar.scheduling.requests import Used, Waiting


class VirtualClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass(slots=True)
class Running:
    request: Waiting
    left: float  # tokens of its prompt to compute
    cached: float
    output_left: int
    first_token_at: float | None = None

    def used(self) -> Used:
        prompt = round(self.request.prompt_tokens)
        return Used(prompt, round(self.request.output_tokens), round(min(self.cached, prompt - 1)))


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """What one step did: first tokens, requests that ended, and its report."""

    first_tokens: tuple[str, ...]
    ended: tuple[str, ...]
    report: StepReport


class ToyEngine:
    """Caches every chunk for ever; a prompt hits what was computed when it came."""

    def __init__(self, prices: StepPrices, step_tokens: int = 256) -> None:
        self._prices = prices
        self._step_tokens = step_tokens
        self.running: dict[str, Running] = {}
        self.cached: set[bytes] = set()
        self.computed_tokens = 0.0

    @property
    def idle(self) -> bool:
        return not self.running

    def submit(self, request: Waiting) -> None:
        matched = 0
        while matched < len(request.chunks) and request.chunks[matched] in self.cached:
            matched += 1
        cached = min(matched * request.chunk_tokens, request.prompt_tokens - 1)
        self.running[request.id] = Running(
            request, request.prompt_tokens - cached, cached, max(1, round(request.output_tokens))
        )

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def step(self, now: float) -> tuple[float, Stepped]:
        """Run one step that begins now; returns when it ends, and what it did."""
        budget, tokens, attended = float(self._step_tokens), 0.0, 0.0
        first: list[str] = []
        ended: list[str] = []
        decoding = [one for one in self.running.values() if not one.left]
        for one in decoding:
            one.output_left -= 1
            budget, tokens, attended = budget - 1, tokens + 1, attended + one.request.prompt_tokens
        for one in [one for one in self.running.values() if one.left]:
            part = min(one.left, max(0.0, budget))
            attended += part * (one.request.prompt_tokens - one.left + part / 2)
            one.left, budget, tokens = one.left - part, budget - part, tokens + part
            self.computed_tokens += part
            if not one.left:
                self.cached.update(one.request.chunks)
                one.output_left -= 1
                first.append(one.request.id)
        seconds = self._prices.step + self._prices.token * tokens + self._prices.context * attended
        for request_id in first:
            self.running[request_id].first_token_at = now + seconds
        ended = [request_id for request_id, one in self.running.items() if not one.left and one.output_left <= 0]
        report = StepReport(1, round(tokens), round(attended), 0, 0, seconds)
        return now + seconds, Stepped(tuple(first), tuple(ended), report)
