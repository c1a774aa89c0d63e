"""`BlockPool` and the slow reference model, driven side by side: accounts, decisions and victims are the same.

After every step the twins compare every block and every account, and the pool checks itself. At the end of each run
arrivals stop and everything has to end.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from cacheaware_api import wire
from cacheaware_engine.blocks import PUBLIC

from .twins import Text, Twins

TIERS = ("bronze", "gold", "silver")
BITS = st.integers(0, 1)  # two tokens: texts coincide often


@st.composite
def quotas(draw: Any, capacity: int, slots: int) -> tuple[list[wire.TierQuota], int]:
    """Shares whose sums fit; some tier may be left out, some share may be nothing."""
    public = draw(st.integers(0, 3))
    nominal_left = effective_left = capacity - public
    tiers = []
    for name in TIERS:
        if draw(st.integers(0, 9)) == 0:
            continue
        nominal = draw(st.integers(0, nominal_left)) if slots else 0
        slots -= nominal > 0
        nominal_left -= nominal
        effective = draw(st.one_of(st.just(min(nominal, effective_left)), st.integers(0, effective_left)))
        effective_left -= effective
        tiers.append(
            wire.TierQuota(
                name=name,
                priority=draw(st.sampled_from((0, 50, 100))),
                weight=1,
                nominal=nominal,
                effective=effective,
                limit=min(capacity, nominal + draw(st.sampled_from((capacity, capacity, 4, 0)))),
                lending=draw(st.sampled_from((nominal, nominal, nominal // 2, 0))),
                retention_s=draw(st.sampled_from((None, None, 0, 3, 20))),
            )
        )
    return tiers, public


class TwinMachine(RuleBasedStateMachine):
    private = False

    @initialize(capacity=st.integers(8, 20), slots=st.integers(1, 8), adjacent=st.booleans(), data=st.data())
    def start(self, capacity: int, slots: int, adjacent: bool, data: st.DataObject) -> None:
        self.twins = Twins(capacity, slots, private=self.private, adjacent=adjacent)
        if data.draw(st.integers(0, 9)):  # else: all share one LRU until the first quotas arrive
            self.change_quotas(data)

    def texts(self, data: st.DataObject, *, running: bool) -> Text:
        requests = self.twins.pool.running if running else self.twins.pool.waiting
        return self.twins.texts[data.draw(st.sampled_from([request.id for request in requests]))]

    def some_run(self) -> bool:
        return bool(self.twins.pool.running)

    def some_wait(self) -> bool:
        return bool(self.twins.pool.waiting)

    @precondition(lambda self: len(self.twins.texts) < 12)
    @rule(
        tier=st.sampled_from(TIERS),
        scope=st.sampled_from((b"a", b"a", b"b")),
        prompt=st.lists(BITS, min_size=1, max_size=7),
        behind=st.booleans(),
        extra=st.integers(0, 8),
        n=st.sampled_from((1, 1, 1, 1, 2, 3)),
        tail=st.integers(0, 1),
    )
    def arrive(self, tier: str, scope: bytes, prompt: list[int], behind: bool, extra: int, n: int, tail: int) -> None:
        if behind:
            prompt = next(iter(self.twins.prefixes.values()), []) + prompt
        self.twins.submit(tier, tier.encode() if self.private else scope, prompt, extra, n, tail)

    @precondition(lambda self: any(self.twins.prefixes.values()))
    @rule()
    def prewarm(self) -> None:
        for prefix in self.twins.prefixes.values():
            if prefix:
                self.twins.submit(PUBLIC, b"", prefix, 0)

    @rule(token=BITS)
    def step(self, token: int) -> None:
        self.twins.step(token)

    @rule()
    def offer_all(self) -> None:
        self.twins.offer_all()

    @precondition(some_wait)
    @rule(data=st.data(), idle=st.booleans())
    def offer_one_out_of_turn(self, data: st.DataObject, idle: bool) -> None:
        self.twins.admit(self.texts(data, running=False), idle=idle)

    @precondition(some_run)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self.twins.compute(self.texts(data, running=True))

    @precondition(some_run)
    @rule(data=st.data(), token=BITS)
    def decode(self, data: st.DataObject, token: int) -> None:
        text = self.texts(data, running=True)
        self.twins.decode(text, data.draw(st.sampled_from(text.request.live)), token)

    @precondition(some_run)
    @rule(data=st.data(), running=st.booleans())
    def finish_one_sequence(self, data: st.DataObject, running: bool) -> None:
        text = self.texts(data, running=running or not self.some_wait())
        self.twins.finish(text, data.draw(st.sampled_from(text.request.live)))

    @precondition(some_run)
    @rule(data=st.data(), running=st.booleans())
    def abort(self, data: st.DataObject, running: bool) -> None:
        self.twins.release(self.texts(data, running=running or not self.some_wait()))

    @rule(seconds=st.sampled_from((1, 3, 10)))
    def time_passes(self, seconds: int) -> None:
        self.twins.tick(seconds)

    @rule(data=st.data())
    def change_quotas(self, data: st.DataObject) -> None:
        self.twins.set_quotas(*data.draw(quotas(self.twins.pool.capacity, self.twins.pool.max_sequences)))

    @precondition(lambda self: self.twins.reference.tiers[PUBLIC].limit > 0)
    @rule(prefixes=st.dictionaries(st.sampled_from("xy"), st.lists(BITS, min_size=1, max_size=3)))
    def change_public_prefixes(self, prefixes: dict[str, list[int]]) -> None:
        self.twins.set_public(prefixes)

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.twins.drain()


class PrivateTwinMachine(TwinMachine):
    """No two tiers share a prefix: what the rules grant can always be had (asserted by the twins)."""

    private = True


BOUNDED = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(TwinMachine, id="prefixes shared across tiers"),
        pytest.param(PrivateTwinMachine, id="prefixes private to a tier"),
    ],
)
def test_the_pool_and_the_reference_agree(machine: type[TwinMachine]) -> None:
    run_state_machine_as_test(machine, settings=BOUNDED)
