"""Who decides what the engine gets next: the production scheduler, and the queues of engines that have none.

A `Policy` is told what happens and gives requests out; what it costs to be compared is that it sees nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cacheaware.replay.requests import Request
from cacheaware.replay.virtual_engine import Run, StepResult, VirtualEngine
from cacheaware_api import durations, wire
from cacheaware_sidecar.budget import slots_of
from cacheaware_sidecar.costs import OutputLengths
from cacheaware_sidecar.scheduling import EngineView, FlushReason, Scheduler, Slots, Terms, Used, Waiting
from cacheaware_sidecar.tiers import promise_of

SHORTEST_GROUP = 256  # tokens; a block of a trace is a chunk here, however long


class PolicyName(StrEnum):
    CACHEAWARE = "cacheaware"  # the pool as its file says
    STATIC_QUOTA = "static-quota"  # the same without rebalancing: effective shares are the nominal ones
    BEST_STATIC = "best-static"  # the same with the one split that would have been best, known in hindsight
    NO_WINDOW = "no-window"  # as cacheaware, with every batchingWindow at 0
    FCFS_LRU = "fcfs-lru"  # first come, first served; one LRU for all
    LPM_LRU = "lpm-lru"  # longest cached prefix first; one LRU for all
    BELADY = "belady"  # no policy: the bound on hits of any that keeps as many tokens


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that goes to the engine now."""

    request: Request
    held: float = 0.0
    flush_reason: FlushReason = FlushReason.NOT_HELD
    predicted_tokens: int | None = None  # None: nobody predicts


class Policy(Protocol):
    """Every request that arrived is given out once by `next`, which is asked until it has none."""

    wake_at: float | None  # when to ask again if nothing happens until then

    @property
    def waiting(self) -> int: ...

    def arrived(self, request: Request) -> None: ...

    def next(self) -> Sent | None:
        """What goes to the engine now. Asked again and again, also while a step is being computed."""

    def first_token(self, run: Run) -> None: ...

    def finished(self, run: Run) -> None:
        """It has left the engine; also one that was refused there."""

    def stepped(self, result: StepResult) -> None: ...


class _Simple:
    """What the queues of engines have in common: they learn nothing."""

    wake_at: float | None = None

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._queue: deque[Request] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def arrived(self, request: Request) -> None:
        self._queue.append(request)

    def first_token(self, run: Run) -> None:
        pass

    def finished(self, run: Run) -> None:
        pass

    def stepped(self, result: StepResult) -> None:
        pass


class FirstCome(_Simple):
    """In the order of arrival; who finds no room holds up all that came later (vLLM's default)."""

    def next(self) -> Sent | None:
        return Sent(self._queue.popleft()) if self._queue and self._engine.hungry else None


class LongestPrefix(_Simple):
    """Of what waits, the request of which most is cached (SGLang's default: in the order of arrival beyond 128)."""

    MOST_COMPARED = 128

    def next(self) -> Sent | None:
        if not self._queue or not self._engine.hungry:
            return None
        place = 0
        if len(self._queue) <= self.MOST_COMPARED:
            cached = self._engine.cached_blocks
            place = max(range(len(self._queue)), key=lambda place: (cached(self._queue[place]), -place))
        request = self._queue[place]
        del self._queue[place]
        return Sent(request)


class CacheAware:
    """The production scheduler. Between it and the engine there is nothing, where a pool has a proxy and a network."""

    def __init__(
        self, engine: VirtualEngine, view: wire.View, clock: Callable[[], float], *, windows: bool = True
    ) -> None:
        self.wake_at: float | None = None
        self._engine = engine
        self._clock = clock
        self._promises = {tier.name: promise_of(tier) for tier in view.tiers}
        block_size = engine.pool.block_size
        self._scheduler = Scheduler(
            terms_of(view, windows=windows), clock, checkpoint_chunks=max(1, SHORTEST_GROUP // block_size)
        )
        self._outputs = OutputLengths()
        self._slots = Slots()
        self._requests: dict[str, Request] = {}  # that wait here
        self._ready: deque[Sent] = deque()
        self.quotas_changed()

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + len(self._ready)

    def quotas_changed(self) -> None:
        """The engine's slots follow from its quotas."""
        ledger = self._engine.pool.ledger()
        slots = slots_of(ledger, None)
        self._scheduler.set_engine(ledger.capacity * ledger.block_size, ledger.bytes_per_token, ledger.block_size)
        self._slots = Slots(slots.total, slots.nominal)

    def arrived(self, request: Request) -> None:
        promised = self._promises[request.tier].time_to_first_token
        self._requests[request.id] = request
        self._scheduler.add(
            Waiting(
                id=request.id,
                tier=request.tier,
                tenant=request.tenant,
                arrived=request.at,
                prompt_tokens=request.prompt_tokens,
                output_tokens=self._outputs.expected(request.tier, None),
                deadline=None if promised is None else request.at + promised,
                chunks=request.keys,
                chunk_tokens=self._engine.pool.block_size,
            )
        )

    def next(self) -> Sent | None:
        if not self._ready:
            decision = self._scheduler.next(EngineView(self._slots, self._engine.waiting))
            self.wake_at = decision.wake_at
            self._ready.extend(
                Sent(self._requests.pop(each.request.id), each.held, each.flush_reason, each.predicted_tokens)
                for each in decision.dispatches
            )
        return self._ready.popleft() if self._ready else None

    def first_token(self, run: Run) -> None:
        self._scheduler.first_byte(run.request.id)

    def refused(self, request: Request) -> None:
        """The engine did not take it."""
        self._scheduler.finished(request.id)

    def finished(self, run: Run) -> None:
        request = run.request
        if run.cached_tokens is None:
            self.refused(request)
            return
        self._outputs.learn(request.tier, run.generated)
        self._scheduler.finished(request.id, Used(request.prompt_tokens, run.generated, run.cached_tokens))

    def stepped(self, result: StepResult) -> None:
        if result.steps:
            pool = self._engine.pool
            self._scheduler.step(step_report(result, pool.block_size, pool.bytes_per_token))


def terms_of(view: wire.View, *, windows: bool = True) -> Mapping[str, Terms]:
    return {
        tier.name: Terms(tier.weight, tier.priority, durations.seconds(tier.batching_window) if windows else 0.0)
        for tier in view.tiers
    }


def step_report(result: StepResult, block_size: int, bytes_per_token: int) -> wire.StepReport:
    """As an engine reports steps."""
    read = round(result.context_read * bytes_per_token)
    return wire.StepReport(
        steps=result.steps,
        tokens=result.prompt_tokens + result.decoded_tokens,
        query_context=round(result.query_context + result.context),
        kv_bytes_read=read,
        unique_kv_bytes=read,
        step_seconds=result.seconds,
        groups=tuple(wire.StepGroup(group.members, group.chunks * block_size, cascade=True) for group in result.groups),
    )


def ordered(names: Sequence[PolicyName]) -> list[PolicyName]:
    """Each once, in the order of first mention."""
    return list(dict.fromkeys(names))
