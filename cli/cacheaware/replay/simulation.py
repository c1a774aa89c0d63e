"""One policy over one stream of requests, in virtual time. Composition: the clock, and who is told what and when.

    arrivals → policy → virtual engine (BlockPool) → policy           and once an interval the virtual operator

The clock jumps from event to event: the next arrival, the end of a step, the moment a policy wants to be asked again,
the rebalancer's next round. Nothing is random, so a run is a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheaware.replay.engine_cost import EngineCost
from cacheaware.replay.measures import Served, TierMeasures, measure
from cacheaware.replay.policies import CacheAware, FirstCome, LongestPrefix, Policy, PolicyName, Sent
from cacheaware.replay.requests import Request
from cacheaware.replay.virtual_engine import StepResult, VirtualEngine
from cacheaware.replay.virtual_operator import Round, VirtualOperator, view_of
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType
from cacheaware_engine.blocks import BlockPool
from cacheaware_operator.rebalance_terms import terms_of
from cacheaware_sidecar.tiers import promise_of

ONE_CACHE = "all"  # the tier that an engine without tiers charges everything to
SAMPLES = 200  # of the blocks in use, over a run

Progress = Callable[[int], None]  # requests done so far


@dataclass(frozen=True, slots=True)
class Setup:
    """What all policies of a comparison have in common."""

    spec: CacheAwarePoolSpec
    cost: EngineCost
    capacity: int  # blocks
    block_size: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks in use at one moment, held and cached, by who pays."""

    at: float
    blocks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of the traffic."""

    policy: PolicyName
    seconds: float  # virtual, until the last token
    everything: TierMeasures
    tiers: Mapping[str, TierMeasures]
    computed_tokens: int  # of prompts, again after a yield too
    preempted: int
    rounds: Sequence[Round] = ()
    usage: Sequence[Usage] = ()
    effective: Mapping[str, int] | None = None  # shares in percent at the end; None: there are none
    served: Sequence[Served] = ()


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """`shares` are effective percentages that stay; None: as the pool's rebalancing decides."""

    def __init__(
        self,
        setup: Setup,
        policy: PolicyName,
        requests: Sequence[Request],
        *,
        shares: Mapping[str, int] | None = None,
        progress: Progress = lambda done: None,
    ) -> None:
        self._setup = setup
        self._name = policy
        self._requests = requests
        self._progress = progress
        self._clock = _Clock()
        # A token counts as a byte: only ratios of what steps read matter to a cost model.
        pool = BlockPool(
            setup.capacity, setup.block_size, setup.cost.max_sequences, bytes_per_token=1, clock=self._clock
        )
        self._pool = pool
        shares_reads = setup.spec.engine.type is EngineType.TORCH
        self._engine = VirtualEngine(pool, setup.cost, self._clock, shares_reads=shares_reads)
        self._operator: VirtualOperator | None = None
        self._policy: Policy
        match policy:
            case PolicyName.FCFS_LRU:
                self._policy = FirstCome(self._engine)
            case PolicyName.LPM_LRU:
                self._policy = LongestPrefix(self._engine)
            case PolicyName.BELADY:
                raise ValueError("belady is a bound, not a policy: see `hindsight`")
            case _:
                if policy is PolicyName.STATIC_QUOTA:
                    shares = terms_of(setup.spec).nominal
                self._operator = VirtualOperator(setup.spec, pool, self._clock, shares)
                windows = policy is not PolicyName.NO_WINDOW
                self._cacheaware = CacheAware(self._engine, self._operator.view, self._clock, windows=windows)
                self._policy = self._cacheaware
        self._served: dict[str, Served] = {}
        self._done = 0
        self._computed = 0
        self._preempted = 0
        self._usage: list[Usage] = []

    def run(self) -> Outcome:
        arrivals, place = self._requests, 0
        last = arrivals[-1].at if arrivals else 0.0
        sampled = last / SAMPLES
        while True:
            moments = [self._engine.ends, self._policy.wake_at]
            if place < len(arrivals):
                moments.append(arrivals[place].at)
            elif self._engine.empty and not self._policy.waiting:
                break
            if self._operator is not None:
                moments.append(self._operator.next_round)
            at = min((moment for moment in moments if moment is not None), default=None)
            assert at is not None, f"{self._policy.waiting} requests wait for nothing"
            self._clock.now = max(self._clock.now, at)
            if self._engine.ends is not None and self._engine.ends <= self._clock.now:
                self._came_of(self._engine.finish())
            while place < len(arrivals) and arrivals[place].at <= self._clock.now:
                self._policy.arrived(arrivals[place])
                place += 1
            self._hold_round()
            self._work(arrivals[place].at if place < len(arrivals) else float("inf"))
            if self._clock.now >= sampled * len(self._usage):
                self._sample()
        return self._outcome()

    def _work(self, next_arrival: float) -> None:
        """Give the engine what it may have; between two steps start the next."""
        while True:
            between = self._engine.ends is None
            if between:
                self._engine.begin()
            while (sent := self._policy.next()) is not None:
                self._send(sent)
            if not between:
                return
            horizon = min(
                next_arrival,
                self._policy.wake_at or float("inf"),
                (self._operator.next_round if self._operator is not None else None) or float("inf"),
            )
            result = self._engine.start(horizon)
            if result is None:
                return
            self._came_of(result)
            if not result.finished and not result.refused:
                return

    def _send(self, sent: Sent) -> None:
        request = sent.request
        reason = None if self._operator is None else str(sent.flush_reason)
        served = Served(request, self._clock.now, sent.held, reason, sent.predicted_tokens)
        self._served[request.id] = served
        why = self._engine.submit(request, ONE_CACHE if self._operator is None else request.tier)
        if why is not None:
            served.refused = True
            self._one_done()
            if self._operator is not None:
                self._cacheaware.refused(request)

    def _came_of(self, result: StepResult) -> None:
        now = self._clock.now
        self._computed += result.prompt_tokens
        self._preempted += result.preempted
        self._policy.stepped(result)
        for run in result.first_tokens:
            served = self._served[run.request.id]
            served.first_token_at, served.cached_tokens = now, run.cached_tokens or 0
            served.admitted_at, served.waited_for = run.admitted_at, run.waited_for
            self._policy.first_token(run)
            if self._operator is not None:
                self._operator.first_token(run, served.sent_at)
        for run in result.finished:
            served = self._served[run.request.id]
            served.ended_at, served.output_tokens = now, run.generated
            self._policy.finished(run)
            self._one_done()
        for run in result.refused:
            self._served[run.request.id].refused = True
            self._policy.finished(run)
            self._one_done()

    def _one_done(self) -> None:
        self._done += 1
        self._progress(self._done)

    def _hold_round(self) -> None:
        operator = self._operator
        if operator is None or operator.next_round is None or operator.next_round > self._clock.now:
            return
        if operator.hold_round():
            self._cacheaware.quotas_changed()

    def _sample(self) -> None:
        ledger = self._pool.ledger()
        blocks = {name: tier.held + tier.cached for name, tier in ledger.tiers.items()}
        self._usage.append(Usage(self._clock.now, blocks))

    def _outcome(self) -> Outcome:
        spec, operator = self._setup.spec, self._operator
        view = view_of(spec, terms_of(spec).nominal)
        promises = {tier.name: promise_of(tier) for tier in view.tiers}
        served = [self._served[request.id] for request in self._requests]
        seconds = self._clock.now - (self._requests[0].at if self._requests else 0.0)
        return Outcome(
            policy=self._name,
            seconds=seconds,
            everything=measure(served, promises, seconds),
            tiers={
                name: measure([each for each in served if each.request.tier == name], promises, seconds)
                for name in promises
            },
            computed_tokens=self._computed,
            preempted=self._preempted,
            rounds=() if operator is None else tuple(operator.rounds),
            usage=tuple(self._usage),
            effective=None if operator is None else {t.name: t.effective_percent for t in operator.view.tiers},
            served=served,
        )
