"""vLLM's own scheduler and blocks under the plugin, driven at random: accounts stay exact, answers stay what they are.

After every step the pool's accounts are worked out anew and compared with vLLM's blocks, one by one. At the end of each
run arrivals stop and every request has to end, with the tokens that it would have got alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm runs these in its environment")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from cacheaware_api import wire
from cacheaware_engine.blocks import QuotaRefused, block_keys
from cacheaware_engine.vllm_plugin.agreement import assert_agreement
from cacheaware_engine.vllm_plugin.scheduler import TierScheduler
from cacheaware_engine.vllm_plugin.testing import Rig

TIERS = ("bronze", "gold", "silver")
BLOCK = 4
PUBLIC_TEXT = [7, 7, 7, 7, 8, 8, 8, 8]


class SchedulerMachine(RuleBasedStateMachine):
    depth = 2

    @initialize(blocks=st.integers(12, 30), slots=st.integers(2, 6), budget=st.sampled_from((8, 16, 64)))
    def start(self, blocks: int, slots: int, budget: int) -> None:
        self.rig = Rig(
            TierScheduler,
            Path(tempfile.mkdtemp()),
            blocks=blocks,
            block_size=BLOCK,
            max_num_seqs=slots,
            max_batched=budget,
            max_model_len=128,
            depth=self.depth,
        )
        self.scheduler = self.rig.scheduler
        self.pool = self.scheduler.accounts.pool
        self.revision = 0
        self.live: list[str] = []

    @property
    def running(self) -> list[str]:
        return [each for each in self.live if each not in self.rig.finished]

    @precondition(lambda self: len(self.running) < 14)
    @rule(
        tier=st.sampled_from(TIERS),
        salt=st.sampled_from((None, "a", "b")),
        prompt=st.lists(st.sampled_from(([1] * BLOCK, [2] * BLOCK, [3, 4, 5, 6])), min_size=1, max_size=5),
        rest=st.lists(st.integers(3, 9), max_size=3),
        behind=st.booleans(),
        max_tokens=st.sampled_from((1, 2, 5, 14)),
        unread=st.sampled_from((False, False, False, True)),
    )
    def arrive(
        self, tier: str, salt: str | None, prompt: list[list[int]], rest: list[int], behind: bool, max_tokens: int,
        unread: bool,
    ) -> None:  # fmt: skip
        tokens = (PUBLIC_TEXT if behind else []) + [token for block in prompt for token in block] + rest
        priority = -TIERS.index(tier)
        extra: dict[str, Any] = {"skip_reading_prefix_cache": True} if unread else {}
        self.live.append(self.rig.add(tier, tokens, max_tokens=max_tokens, salt=salt, priority=priority, **extra))
        assert_agreement(self.scheduler)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            assert_agreement(self.scheduler)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(self.running)))
        assert_agreement(self.scheduler)

    @rule(data=st.data())
    def change_quotas(self, data: st.DataObject) -> None:
        left = effective_left = self.pool.capacity - 2
        tiers: list[wire.TierQuota] = []
        for name in TIERS:
            if data.draw(st.integers(0, 9)) == 0:
                continue
            nominal = data.draw(st.integers(0, left)) if len(tiers) < self.pool.max_sequences else 0
            effective = data.draw(st.integers(0, effective_left))
            left, effective_left = left - nominal, effective_left - effective
            tiers.append(
                wire.TierQuota(
                    name,
                    priority=data.draw(st.sampled_from((0, 50, 100))),
                    weight=1,
                    nominal=nominal,
                    effective=effective,
                    limit=min(self.pool.capacity, nominal + data.draw(st.sampled_from((0, 6, 100)))),
                    lending=data.draw(st.sampled_from((0, nominal // 2, nominal))),
                    retention_s=data.draw(st.sampled_from((None, None, 0.0))),
                )
            )
        self.revision += 1
        self.scheduler.control.set_quotas(wire.Quotas(wire.Revision("pool", self.revision), tuple(tiers), 2))
        assert_agreement(self.scheduler)

    @rule(public=st.booleans())
    def change_public_prefixes(self, public: bool) -> None:
        prefixes = {"assistant": block_keys(PUBLIC_TEXT, BLOCK)} if public else {}
        try:
            self.pool.set_public(prefixes)
        except QuotaRefused:
            assert self.pool.quotas is None
        assert_agreement(self.scheduler)

    @rule(running=st.booleans())
    def forget_the_cache(self, running: bool) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=running)
        assert_agreement(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(600):
            if not self.scheduler.has_requests() and not self.rig._under_way:
                break
            self.rig.step()
            assert_agreement(self.scheduler)
        assert not self.running, f"after 600 steps these have not ended: {self.running}"
        ledger = self.pool.ledger()
        assert (ledger.running, ledger.waiting) == (0, 0)
        assert ledger.public.held == 0
        assert all(tier.held == 0 for tier in ledger.tiers.values())
        for request_id in self.live:
            check_answer(self.rig, request_id)


class SynchronousMachine(SchedulerMachine):
    depth = 1


def check_answer(rig: Rig, request_id: str) -> None:
    """As alone: token by token what belongs at each position, and all of them unless quotas or a client ended it."""
    request, tokens = rig.requests[request_id], rig.tokens[request_id]
    alone: list[Any] = [rig.next_token(request, request.num_prompt_tokens + place) for place in range(14)]
    assert tokens == alone[: len(tokens)]
    if rig.finished[request_id] == "length":
        assert len(tokens) <= request.sampling_params.max_tokens


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(SchedulerMachine, id="two steps under way"),
        pytest.param(SynchronousMachine, id="one step at a time"),
    ],
)
def test_accounts_agree_with_vllm_after_every_step(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
