"""The whole loop on simulated caches: prompts, the sidecar's histogram and page, curves, decisions, and real hits."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cacheaware_api import wire
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.readings import Page, readings_of
from cacheaware_operator.rebalance import decide
from cacheaware_operator.rebalance_terms import Terms
from cacheaware_operator.rebalance_values import Decision, Skip, State
from cacheaware_operator.testing_rebalance import BLOCK_TOKENS, CurvePool, terms, tier
from cacheaware_sidecar.metrics import WorkingSetCollector
from cacheaware_sidecar.prefix_key import CHUNK_BYTES, PrefixKey
from cacheaware_sidecar.working_set import WorkingSets

Prompts = Callable[[random.Random, float], list[int]]  # the blocks of a prompt at a time

CAPACITY = 2000
PROMPTS_AN_EPOCH = 60


def conversations(first: int, people: int) -> Prompts:
    """So many people talk over a common start; each is about as likely to speak next."""

    def prompt(rng: random.Random, now: float) -> list[int]:
        who = first + 1000 * (1 + rng.randrange(people))
        return [*range(first, first + 8), *range(who, who + 20)]

    return prompt


def one_off(first: int) -> Prompts:
    """A batch over one instruction: hardly anything comes back."""

    def prompt(rng: random.Random, now: float) -> list[int]:
        document = first + 1000 * (1 + rng.randrange(10**6))
        return [*range(first, first + 8), *range(document, document + 40)]

    return prompt


@dataclass(slots=True)
class Lru:
    size: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def resize(self, size: int) -> None:
        self.size = size
        while len(self.blocks) > size:
            self.blocks.popitem(last=False)

    def use(self, prompt: list[int]) -> int:
        """How many leading blocks hit; a block counts only where all before it do."""
        hits = 0
        for block in prompt:
            if block not in self.blocks:
                break
            hits += 1
        for block in reversed(prompt):  # the tail goes first
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        self.resize(self.size)
        return hits


@dataclass(slots=True)
class SimulatedPool:
    """One replica, whose cache is split as decided: the most that quotas can do."""

    wanted: Terms
    prompts: Mapping[str, Prompts]
    rng: random.Random
    moves: bool = True
    state: State = field(default_factory=State)
    now: float = 0.0
    hits: dict[str, int] = field(default_factory=dict)
    queries: dict[str, int] = field(default_factory=dict)
    caches: dict[str, Lru] = field(default_factory=dict)
    sets: WorkingSets = field(default_factory=WorkingSets)
    curves: CurvePool = field(init=False)  # for its views

    def __post_init__(self) -> None:
        self.curves = CurvePool(self.wanted)
        self.sets.keep([each.name for each in self.wanted.tiers])
        self.caches = {each.name: Lru(CAPACITY * each.nominal // 100) for each in self.wanted.tiers}

    def epoch(self) -> Decision:
        self.now += self.wanted.interval
        for _ in range(PROMPTS_AN_EPOCH):
            for name, prompts in self.prompts.items():
                self._serve(name, prompts(self.rng, self.now))
        snapshot = Snapshot(self.curves.view, (ReplicaSnapshot("chat-0", (), ready=True, status=self._status()),))
        readings = readings_of(snapshot, {"chat-0": Page(self._page(), self.now)})
        decision = decide(self.state, readings, self.wanted, self.now)
        self.state = decision.state
        if self.moves:
            self.curves.hand_out(decision.effective)
            for name, share in decision.effective.items():
                self.caches[name].resize(CAPACITY * share // 100)
        return decision

    def weighted_hits(self) -> float:
        """Of all weighted references so far."""
        weights = {each.name: each.weight for each in self.wanted.tiers}
        return sum(weights[name] * self.hits.get(name, 0) for name in weights) / sum(
            weights[name] * self.queries.get(name, 0) for name in weights
        )

    def _serve(self, name: str, prompt: list[int]) -> None:
        self.hits[name] = self.hits.get(name, 0) + self.caches[name].use(prompt)
        self.queries[name] = self.queries.get(name, 0) + len(prompt)
        chunks = tuple(hashlib.blake2b(f"{name} {block}".encode(), digest_size=16).digest() for block in prompt)
        key = PrefixKey(chunks, len(chunks) * CHUNK_BYTES)
        self.sets.refer(name, key, chunk_tokens=BLOCK_TOKENS, block_size=BLOCK_TOKENS)

    def _page(self) -> str:
        registry = CollectorRegistry()
        registry.register(WorkingSetCollector(self.sets.tiers))
        return generate_latest(registry).decode()

    def _status(self) -> wire.PoolStatus:
        assert self.curves.view is not None
        accounts = {
            name: wire.TierLedger(
                nominal=0,
                effective=0,
                limit=0,
                held=0,
                cached=len(cache.blocks),
                lapsed=0,
                borrowed=0,
                lent=0,
                slots=wire.Slots(1, 0),
                evicted_total=0,
                reclaimed_total=0,
                preempted_total=0,
                hit_tokens_total=BLOCK_TOKENS * self.hits.get(name, 0),
                query_tokens_total=BLOCK_TOKENS * self.queries.get(name, 0),
            )
            for name, cache in self.caches.items()
        }
        ledger = wire.Ledger(
            sequence=1,
            revision=self.curves.view.revision,
            block_size=BLOCK_TOKENS,
            bytes_per_token=1,
            capacity=CAPACITY,
            free=0,
            public=wire.PublicLedger(0, 0, 0, {}),
            tiers=accounts,
            running=0,
            waiting=0,
        )
        return wire.PoolStatus(
            applied=self.curves.view.revision,
            capacity=CAPACITY,
            ledger=ledger,
            tiers={},
            enforcement=wire.Enforcement.ENGINE,
            conditions=(),
            key_algorithm="test",
        )


def pair(wanted: Terms, prompts: Mapping[str, Prompts], epochs: int) -> tuple[SimulatedPool, SimulatedPool]:
    """The same prompts with rebalancing and with nominal shares."""
    pools = [SimulatedPool(wanted, prompts, random.Random(17), moves=moves) for moves in (True, False)]
    for pool in pools:
        for _ in range(epochs):
            pool.epoch()
    return pools[0], pools[1]


TALK_AND_BATCH: dict[str, Prompts] = {"gold": conversations(0, 90), "bronze": one_off(10**8)}


def test_a_tier_that_comes_back_gets_the_cache_of_one_that_does_not() -> None:
    moved, nominal = pair(terms(tier("gold", 40), tier("bronze", 60)), TALK_AND_BATCH, 25)
    assert moved.curves.shares["gold"] >= 80
    assert moved.weighted_hits() > 1.25 * nominal.weighted_hits()


def test_it_settles_within_minutes_and_stays() -> None:
    pool = SimulatedPool(terms(tier("gold", 40), tier("bronze", 60)), TALK_AND_BATCH, random.Random(3))
    decisions = [pool.epoch() for _ in range(40)]
    assert not any(decision.moves for decision in decisions[15:])
    assert decisions[-1].skipped is Skip.GAIN_TOO_SMALL
    assert decisions[-1].state.failures == 0
    verdicts = [decision.verdict for decision in decisions if decision.verdict is not None]
    assert verdicts
    assert not any(verdict.failed for verdict in verdicts)


def test_two_tiers_alike_are_left_alone() -> None:
    alike: dict[str, Prompts] = {"gold": conversations(0, 60), "bronze": conversations(10**8, 60)}
    moved, nominal = pair(terms(tier("gold", 50), tier("bronze", 50)), alike, 25)
    assert abs(moved.curves.shares["gold"] - 50) <= 10
    assert moved.weighted_hits() == pytest.approx(nominal.weighted_hits(), rel=0.05)


def test_weight_buys_hits_of_the_tier_at_the_price_of_all_hits() -> None:
    alike: dict[str, Prompts] = {"gold": conversations(0, 120), "bronze": conversations(10**8, 90)}

    def served(weight: int) -> tuple[float, float]:
        pool = SimulatedPool(
            terms(tier("gold", 50, weight=weight), tier("bronze", 50)), alike, random.Random(5), moves=True
        )
        for _ in range(25):
            pool.epoch()
        ratio = {name: pool.hits[name] / pool.queries[name] for name in pool.hits}
        return ratio["gold"], sum(pool.hits.values()) / sum(pool.queries.values())

    equal, weighted = served(1), served(8)
    assert weighted[0] > equal[0] + 0.1
    assert weighted[1] <= equal[1] + 0.01


def test_it_follows_traffic_that_changes_places() -> None:
    """In the sixth minute the tiers swap their habits."""

    def either(before: Prompts, after: Prompts) -> Prompts:
        return lambda rng, now: (before if now < 360 else after)(rng, now)

    swapped: dict[str, Prompts] = {
        "gold": either(conversations(0, 90), one_off(10**8)),
        "bronze": either(one_off(2 * 10**8), conversations(3 * 10**8, 90)),
    }
    pool = SimulatedPool(terms(tier("gold", 50), tier("bronze", 50)), swapped, random.Random(9))
    for _ in range(11):
        pool.epoch()
    assert pool.curves.shares["gold"] >= 70
    for _ in range(30):
        pool.epoch()
    assert pool.curves.shares["bronze"] >= 70
    assert pool.state.distrusted_until is None
