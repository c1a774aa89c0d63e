"""Several policies over the same requests: who is run how, and what all are measured against. Composition only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheaware.replay.hindsight import belady_hits, best_static
from cacheaware.replay.measures import unique_tokens
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.requests import Request
from cacheaware.replay.simulation import Outcome, Setup, Simulation
from cacheaware_operator.rebalance_terms import terms_of

BASELINES = (
    PolicyName.FCFS_LRU,
    PolicyName.LPM_LRU,
    PolicyName.STATIC_QUOTA,
    PolicyName.BEST_STATIC,
    PolicyName.BELADY,
)

Told = Callable[[PolicyName, int], None]  # a policy, and how many of its requests are done


@dataclass(frozen=True, slots=True)
class Limits:
    """What the traffic itself allows."""

    prompt_tokens: int
    unique_tokens: int  # any cache computes them once
    belady_hits: Mapping[str, int] | None = None  # tokens by tier; None: not asked for

    @property
    def infinite_hit_percent(self) -> float:
        return 100 * (self.prompt_tokens - self.unique_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def belady_hit_percent(self) -> float | None:
        if self.belady_hits is None or not self.prompt_tokens:
            return None
        return 100 * sum(self.belady_hits.values()) / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    setup: Setup
    limits: Limits
    outcomes: Sequence[Outcome]
    best_shares: Mapping[str, int] | None = None  # of best-static

    def of(self, policy: PolicyName) -> Outcome:
        return next(outcome for outcome in self.outcomes if outcome.policy is policy)


def compare(
    setup: Setup,
    requests: Sequence[Request],
    policies: Sequence[PolicyName],
    told: Told = lambda policy, done: None,
) -> Comparison:
    size = setup.block_size
    belady = belady_hits(requests, setup.capacity, size) if PolicyName.BELADY in policies else None
    limits = Limits(sum(request.prompt_tokens for request in requests), unique_tokens(requests, size), belady)
    best = None
    outcomes = []
    for policy in policies:
        if policy is PolicyName.BELADY:
            continue
        shares = None
        if policy is PolicyName.BEST_STATIC:
            shares = best = best_static(requests, setup.capacity, size, terms_of(setup.spec))
        outcomes.append(_run(setup, policy, requests, shares, told))
    return Comparison(setup, limits, outcomes, best)


def _run(
    setup: Setup, policy: PolicyName, requests: Sequence[Request], shares: Mapping[str, int] | None, told: Told
) -> Outcome:
    told(policy, 0)
    return Simulation(setup, policy, requests, shares=shares, progress=lambda done: told(policy, done)).run()
