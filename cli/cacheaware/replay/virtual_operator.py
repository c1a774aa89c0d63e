"""The operator of a replay: the production rebalancer once an interval, on the figures a sidecar would show it.

What is between the two in a pool (a metrics page, a ledger, a view) is built from the same parts; nothing is decided
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cacheaware.replay.requests import Request
from cacheaware.replay.virtual_engine import Run
from cacheaware_api import wire
from cacheaware_api.defaults import RebalancingMode
from cacheaware_api.quota import quotas_for
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec
from cacheaware_engine.blocks import BlockPool
from cacheaware_operator.readings import Readings, ReplicaReading, TierReading
from cacheaware_operator.rebalance import decide
from cacheaware_operator.rebalance_terms import terms_of
from cacheaware_operator.rebalance_values import Decision, Move, Skip, State
from cacheaware_operator.reuse_curves import ReuseCounts
from cacheaware_operator.view import build_view
from cacheaware_sidecar.figures import Figures, Sample
from cacheaware_sidecar.metering import Usage
from cacheaware_sidecar.prefix_key import CHUNK_BYTES, PrefixKey
from cacheaware_sidecar.reuse_histogram import BOUNDS
from cacheaware_sidecar.working_set import WorkingSets

REPLICA = "replay-0"
UID = "replay"


def view_of(spec: CacheAwarePoolSpec, shares: Mapping[str, int], previous: wire.View | None = None) -> wire.View:
    """Public prefixes are text, which a trace does not have; their share stays reserved."""
    texts = {prefix.name: "" for prefix in spec.public_prefixes}
    return build_view(spec, uid=UID, prefix_texts=texts, effective_percent=shares, previous=previous)


@dataclass(frozen=True, slots=True)
class Round:
    """One look of the rebalancer: what moved, or why nothing did."""

    at: float
    moves: tuple[Move, ...]
    skipped: Skip | None
    effective: Mapping[str, int]


class VirtualOperator:
    """`shares` fixed: they are handed out once, and nothing is ever moved."""

    def __init__(
        self, spec: CacheAwarePoolSpec, pool: BlockPool, clock: Callable[[], float], shares: Mapping[str, int] | None
    ) -> None:
        self.rounds: list[Round] = []
        self._spec = spec
        self._pool = pool
        self._clock = clock
        self._terms = terms_of(spec)
        self._moves = shares is None and self._terms.mode is not RebalancingMode.OFF
        self._state = State()
        self._sets = WorkingSets()
        self._sets.keep([tier.name for tier in spec.tiers])
        self._figures = Figures()
        self.view = view_of(spec, shares or self._terms.nominal)
        self._pool.set_quotas(quotas_for(self.view, pool.capacity))
        self.next_round: float | None = self._clock() + self._terms.interval if self._moves else None

    def first_token(self, run: Run, sent_at: float) -> None:
        """The engine computed a prompt: what a sidecar notes of it."""
        if not self._moves:
            return
        request, size = run.request, self._pool.block_size
        usage = Usage(request.prompt_tokens, 0, run.cached_tokens)
        self._sets.refer(request.tier, _prefix_key(request), chunk_tokens=size, block_size=size)
        self._sets.first_token(request.tier, usage, self._clock() - sent_at, block_size=size)
        now = self._clock()
        self._figures.add(
            request.tier, Sample(now, request.prompt_tokens, run.cached_tokens, time_to_first_token=now - request.at)
        )

    def hold_round(self) -> bool:
        """True if shares changed."""
        now = self._clock()
        decision = decide(self._state, self._readings(now), self._terms, now)
        self._state = decision.state
        self.next_round = now + self._terms.interval
        made = () if decision.skipped is Skip.DRY_RUN else decision.moves
        self.rounds.append(Round(now, made, decision.skipped, decision.effective))
        return self._hand_out(decision)

    def _hand_out(self, decision: Decision) -> bool:
        wanted = view_of(self._spec, decision.effective, self.view)
        if wanted is self.view:
            return False
        self.view = wanted
        self._pool.set_quotas(quotas_for(wanted, self._pool.capacity))
        return True

    def _readings(self, now: float) -> Readings:
        ledger, sets = self._pool.ledger(), self._sets.tiers()
        tiers = {}
        for name, account in ledger.tiers.items():
            figures, known = self._figures.of(name, 0, now), sets[name]
            tiers[name] = TierReading(
                reuse=ReuseCounts(BOUNDS, tuple(known.references)),
                prefill_seconds_per_block=known.prefill_seconds_per_block,
                held_blocks=account.held,
                hit_tokens=account.hit_tokens_total,
                query_tokens=account.query_tokens_total,
                requests=figures.requests,
                time_to_first_token_p95=figures.time_to_first_token_p95,
            )
        reading = ReplicaReading(REPLICA, now, ledger.capacity, ledger.revision, tiers)
        return Readings(self.view, (REPLICA,), (reading,))


def _prefix_key(request: Request) -> PrefixKey:
    """A chunk for each block; the rest of the prompt has none."""
    return PrefixKey(request.keys, len(request.keys) * CHUNK_BYTES)
