"""A pool made of hit curves, for tests of the rebalancer: it obeys every decision and counts what would come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cacheaware_api import wire
from cacheaware_api.defaults import RebalancingMode
from cacheaware_operator.readings import Readings, ReplicaReading, TierReading
from cacheaware_operator.rebalance import decide
from cacheaware_operator.rebalance_terms import Terms, TierTerms
from cacheaware_operator.rebalance_values import Decision, State
from cacheaware_operator.reuse_curves import ReuseCounts, hits

BOUNDS = tuple(2.0 ** (half / 2) for half in range(4, 29))  # half octaves
BLOCK_TOKENS = 16


def tier(
    name: str,
    nominal: int,
    *,
    weight: int = 1,
    guaranteed: int = 0,
    limit: int = 100,
    time_to_first_token: float | None = None,
) -> TierTerms:
    return TierTerms(name, weight, nominal, guaranteed, limit, time_to_first_token)


def terms(
    *tiers: TierTerms, mode: RebalancingMode = RebalancingMode.AUTO, max_step: int = 10, min_gain: int = 1
) -> Terms:
    return Terms(mode, 30.0, max_step, min_gain, tiers)


def traffic(references: float, reach: float, *, repeats: float = 0.7) -> ReuseCounts:
    """References of which `repeats` come back within `reach`, most of them soon, so that each block of cache gains less
    than the one before; the rest are first uses.
    """
    cumulative = [references * repeats * min(1.0, (bound / reach) ** 0.25) for bound in BOUNDS]
    return ReuseCounts(BOUNDS, (*cumulative, references))


def loop(references: float, length: float) -> ReuseCounts:
    """References to the same blocks round and round: they hit all or nothing."""
    return ReuseCounts(BOUNDS, (*(references if bound > length else 0.0 for bound in BOUNDS), references))


def reuse_page(tier_name: str, counts: ReuseCounts) -> str:
    """As a sidecar's metrics show them."""
    bounds = [*(f"{bound:g}" for bound in counts.bounds), "+Inf"]
    return "".join(
        f'cacheaware_block_reuse_references_bucket{{tier="{tier_name}",le="{bound}"}} {count}\n'
        for bound, count in zip(bounds, counts.cumulative, strict=True)
    )


@dataclass(slots=True)
class CurvePool:
    """`epoch` lets traffic pass, asks the rebalancer, and hands out what it says; the next one acknowledges it."""

    terms: Terms
    capacity: int = 1000
    replicas: Sequence[str] = ("chat-0",)
    state: State = field(default_factory=State)
    now: float = 0.0
    view: wire.View | None = None
    applied: dict[str, wire.Revision | None] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # replicas that are ready and tell nothing
    held: dict[str, int] = field(default_factory=dict)  # blocks by tier
    first_token_p95: dict[str, float] = field(default_factory=dict)
    pace: dict[str, float] = field(default_factory=dict)
    honest: bool = True  # what is predicted comes true
    missed: float = 0.0  # part of all references that should hit and never do, whatever the share
    _counts: dict[tuple[str, str], ReuseCounts] = field(default_factory=dict)
    _hit_tokens: dict[tuple[str, str], float] = field(default_factory=dict)
    _last: dict[str, ReplicaReading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hand_out(self.terms.nominal)
        self.acknowledge()

    @property
    def shares(self) -> dict[str, int]:
        assert self.view is not None
        return {tier.name: tier.effective_percent for tier in self.view.tiers}

    def refer(self, tier: str, counts: ReuseCounts) -> None:
        """Traffic of one tier, the same on every replica."""
        for name in self.replicas:
            before = self._counts.get((name, tier))
            self._counts[name, tier] = counts if before is None else before.plus(counts)
            (hit,) = hits(counts, [self.capacity * self.shares.get(tier, 0) / 100])
            hit = max(0.0, hit - self.missed * counts.references)
            if not self.honest:
                hit = counts.references - hit  # the more was predicted, the less there is
            self._hit_tokens[name, tier] = self._hit_tokens.get((name, tier), 0.0) + BLOCK_TOKENS * hit

    def acknowledge(self) -> None:
        assert self.view is not None
        self.applied = dict.fromkeys(self.replicas, self.view.revision)

    def hand_out(self, shares: Mapping[str, int]) -> None:
        if self.view is not None and shares == self.shares:
            return
        number = 1 if self.view is None else self.view.revision.number + 1
        self.view = wire.View(
            revision=wire.Revision("pool-1", number),
            model="m",
            tiers=tuple(
                wire.ViewTier(name, 0, 1, wire.ViewQuota(), wire.ViewSLA(), share) for name, share in shares.items()
            ),
            sharing=wire.Sharing.TENANT,
            identity=wire.ViewIdentity(wire.IdentityType.OPEN),
        )

    def readings(self) -> Readings:
        for name in self.replicas:
            if name not in self.silent:
                self._last[name] = self._reading(name)
        return Readings(self.view, tuple(self.replicas), tuple(self._last[n] for n in self.replicas if n in self._last))

    def epoch(self, flow: Mapping[str, ReuseCounts] | None = None, *, acknowledged: bool = True) -> Decision:
        """An interval with this traffic, and the decision at its end."""
        self.now += self.terms.interval
        for name, counts in (flow or {}).items():
            self.refer(name, counts)
        if acknowledged:
            self.acknowledge()
        decision = decide(self.state, self.readings(), self.terms, self.now)
        self.state = decision.state
        self.hand_out(decision.effective)
        return decision

    def _reading(self, name: str) -> ReplicaReading:
        return ReplicaReading(
            name,
            self.now,
            self.capacity,
            self.applied.get(name),
            {
                tier.name: TierReading(
                    reuse=self._counts.get((name, tier.name), traffic(0, 1)),
                    prefill_seconds_per_block=self.pace.get(tier.name),
                    held_blocks=self.held.get(tier.name, 0),
                    hit_tokens=round(self._hit_tokens.get((name, tier.name), 0.0)),
                    query_tokens=round(BLOCK_TOKENS * self._counts.get((name, tier.name), traffic(0, 1)).references),
                    requests=10,
                    time_to_first_token_p95=self.first_token_p95.get(tier.name),
                )
                for tier in self.terms.tiers
            },
        )
