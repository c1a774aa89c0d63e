"""What tiers get in vLLM, by examples: its own scheduler and blocks, a model that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm runs these in its environment")

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cacheaware_api import wire
from cacheaware_engine.blocks import block_keys
from cacheaware_engine.vllm_plugin.agreement import assert_agreement
from cacheaware_engine.vllm_plugin.errors import PluginRefused
from cacheaware_engine.vllm_plugin.scheduler import TierScheduler
from cacheaware_engine.vllm_plugin.testing import Rig

BLOCK = 4


def tier(name: str, nominal: int, limit: int = 1000, priority: int = 0, lending: int | None = None) -> wire.TierQuota:
    lending = nominal if lending is None else lending
    return wire.TierQuota(name, priority, 1, nominal, nominal, max(limit, nominal), lending)


def quotas(rig: Rig, *tiers: wire.TierQuota, public: int = 0, number: int = 1) -> None:
    rig.scheduler.control.set_quotas(wire.Quotas(wire.Revision("pool", number), tiers, public))


def prompt(blocks: int, start: int) -> list[int]:
    """As long as so many blocks, and like no other start's."""
    return [start + place % 2 for place in range(blocks * BLOCK)]


def run_alone(rig: Rig, name: str, tokens: list[int], **options: Any) -> int:
    """The answer is awaited; returns how many prompt tokens were hit."""
    before = rig.scheduler.control.ledger().tiers
    request = rig.add(name, tokens, **options)
    rig.drain()
    assert rig.finished[request] == "length"
    was = before[name].hit_tokens_total if name in before else 0
    return int(rig.scheduler.control.ledger().tiers[name].hit_tokens_total) - was


@pytest.fixture(params=[pytest.param(2, id="two steps under way"), pytest.param(1, id="one step at a time")])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(TierScheduler, tmp_path, blocks=40, block_size=BLOCK, depth=request.param)
    yield made
    made.drain()
    assert_agreement(made.scheduler)


def test_a_flood_does_not_evict_what_a_tier_has_within_its_quota(rig: Rig) -> None:
    quotas(rig, tier("gold", 20, priority=100), tier("bronze", 20))
    chat = prompt(10, 10)
    run_alone(rig, "gold", chat)
    for number in range(12):
        run_alone(rig, "bronze", prompt(8, 50 + number * 3))
    assert run_alone(rig, "gold", [*chat, 3, 4, 5]) == 40


def test_the_same_flood_wipes_it_out_where_all_share_one_lru(rig: Rig) -> None:
    chat = prompt(10, 10)
    run_alone(rig, "gold", chat)
    for number in range(12):
        run_alone(rig, "bronze", prompt(8, 50 + number * 3))
    assert run_alone(rig, "gold", [*chat, 3, 4, 5]) == 0


def test_an_entitled_request_is_scheduled_within_three_steps_of_a_pool_full_of_borrowers(rig: Rig) -> None:
    quotas(rig, tier("gold", 20, priority=100), tier("bronze", 10))
    for number in range(4):
        rig.add("bronze", prompt(8, 50 + number * 3), max_tokens=100, priority=0)
    for _ in range(6):
        rig.step()
    assert rig.scheduler.control.ledger().tiers["bronze"].held > 30
    wanted = rig.add("gold", prompt(8, 10), priority=-100)
    scheduled = [wanted in rig.step() for _ in range(3)]
    assert any(scheduled)
    assert rig.scheduler.control.ledger().tiers["bronze"].preempted_total >= 1


def test_a_request_that_reaches_its_tiers_limit_ends_with_length_and_loses_no_token(rig: Rig) -> None:
    quotas(rig, tier("gold", 6, limit=6), tier("bronze", 20))
    ended = rig.add("gold", prompt(3, 10), max_tokens=100)
    rig.drain()
    assert rig.finished[ended] == "length"
    # Six blocks of four hold 24 tokens; what is sampled from the last of them needs no place any more.
    assert len(rig.tokens[ended]) == 24 - 12 + 1


def test_a_request_that_can_never_fit_ends_without_tokens_and_harms_nobody(rig: Rig) -> None:
    quotas(rig, tier("gold", 6, limit=6), tier("bronze", 20))
    small = rig.add("gold", prompt(2, 10))
    large = rig.add("gold", prompt(7, 30))
    rig.drain()
    assert (rig.finished[large], rig.tokens[large]) == ("length", [])
    assert len(rig.tokens[small]) == 8


def test_a_request_of_a_tier_that_does_not_exist_ends_with_an_error(rig: Rig) -> None:
    quotas(rig, tier("gold", 6))
    request = rig.add("silver", prompt(2, 10))
    rig.drain()
    assert rig.finished[request] == "error"


def test_a_session_with_streamed_input_ends_with_an_error(rig: Rig) -> None:
    request = rig.add("gold", prompt(2, 10), fields={"resumable": True})
    rig.drain()
    assert rig.finished[request] == "error"


def test_the_sequences_of_n_are_let_in_and_counted_as_so_many_requests(rig: Rig) -> None:
    """vLLM hands its scheduler one request for each; nothing says that they belong together."""
    quotas(rig, tier("gold", 40))
    for _ in range(3):
        rig.add("gold", prompt(4, 10), max_tokens=4)
    rig.step()
    assert rig.scheduler.control.ledger().running == 3
    rig.drain()
    assert rig.scheduler.control.ledger().tiers["gold"].query_tokens_total == 3 * 16


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="tokens alone"),
        pytest.param({"lora_request": LoRARequest("formal", 1, "/adapters/formal")}, id="an adapter"),
    ],
)
def test_only_what_tokens_alone_decide_is_public(rig: Rig, fields: dict[str, Any]) -> None:
    text = prompt(3, 10)
    quotas(rig, tier("gold", 20), public=3)
    rig.scheduler.accounts.pool.set_public({"assistant": block_keys(text, BLOCK)})
    run_alone(rig, "gold", [*text, 5], salt="a", fields=fields)
    assert rig.scheduler.control.ledger().public.prefixes["assistant"].resident == (0 if fields else 3)
    assert run_alone(rig, "gold", [*text, 5], salt="b", fields=fields) == (0 if fields else 12)
    assert run_alone(rig, "gold", [*text, 6], salt="a", fields=fields) == 12, "its own it hits in any case"


def test_requests_that_arrive_together_with_one_prefix_compute_it_once(rig: Rig) -> None:
    quotas(rig, tier("gold", 40))
    shared = prompt(6, 10)
    for number in range(3):
        rig.add("gold", [*shared, 90 + number])
    rig.drain()
    ledger = rig.scheduler.control.ledger().tiers["gold"]
    assert ledger.hit_tokens_total == 2 * 24


def test_equal_blocks_that_two_requests_compute_are_held_beside_each_other(tmp_path: Path) -> None:
    """One may not read the cache, so it computes what is there: four blocks of prompt and one of the same answer."""
    rig = Rig(TierScheduler, tmp_path, blocks=40, block_size=BLOCK, max_num_seqs=4)
    quotas(rig, tier("gold", 40))
    first, second = rig.add("gold", prompt(4, 10)), rig.add("gold", prompt(4, 10), skip_reading_prefix_cache=True)
    copies = 0
    while rig.scheduler.has_requests():
        rig.step()
        assert_agreement(rig.scheduler)
        copies = max(copies, len(getattr(rig.scheduler.accounts.of(second), "copies", ())))
    rig.drain()
    assert copies == 5
    assert rig.tokens[first] == rig.tokens[second]
    assert rig.scheduler.control.ledger().tiers["gold"].held == 0


def test_a_public_prefix_is_shared_across_salts_and_nothing_behind_it_is(rig: Rig) -> None:
    text = prompt(3, 10)
    quotas(rig, tier("gold", 20), public=3)
    rig.scheduler.accounts.pool.set_public({"assistant": block_keys(text, BLOCK)})
    own = prompt(2, 60)
    run_alone(rig, "gold", text + own, salt="a")
    assert rig.scheduler.control.ledger().public.prefixes["assistant"].resident == 3
    assert run_alone(rig, "gold", [*text, *own, 5], salt="b") == 12
    assert run_alone(rig, "gold", [*text, *own, 5], salt="a") == 20


def test_without_a_public_prefix_another_salt_hits_nothing(rig: Rig) -> None:
    quotas(rig, tier("gold", 20))
    run_alone(rig, "gold", prompt(5, 10), salt="a")
    assert run_alone(rig, "gold", [*prompt(5, 10), 5], salt="b") == 0


def test_a_preempted_request_resumes_with_a_hit_and_answers_as_if_alone(rig: Rig) -> None:
    quotas(rig, tier("gold", 30, priority=100), tier("bronze", 4))
    low = rig.add("bronze", prompt(8, 50), max_tokens=30, priority=0)
    for _ in range(8):
        rig.step()
    for number in range(3):
        rig.add("gold", prompt(9, 10 + number * 3), max_tokens=4, priority=-100)
    rig.drain()
    request = rig.requests[low]
    assert request.num_preemptions >= 1
    assert rig.tokens[low] == [rig.next_token(request, request.num_prompt_tokens + place) for place in range(30)]


def test_idle_cache_never_idles_the_engine(rig: Rig) -> None:
    quotas(rig, tier("gold", 30, lending=0, priority=100), tier("bronze", 5))
    assert run_alone(rig, "bronze", prompt(7, 10)) == 0


def test_slots_that_a_tier_is_due_come_back_to_it(tmp_path: Path) -> None:
    rig = Rig(TierScheduler, tmp_path, blocks=200, block_size=BLOCK, max_num_seqs=4)
    quotas(rig, tier("gold", 100, priority=100), tier("bronze", 100))
    for number in range(4):
        rig.add("bronze", prompt(2, 30 + number * 3), max_tokens=100)
    for _ in range(3):
        rig.step()
    wanted = rig.add("gold", prompt(2, 10), priority=-100)
    assert any(wanted in rig.step() for _ in range(3))
    rig.drain()


def test_without_contention_steps_are_those_of_vllms_own_scheduler(tmp_path: Path) -> None:
    def steps(scheduler_class: Any) -> list[list[str]]:
        rig = Rig(scheduler_class, tmp_path, blocks=400, block_size=BLOCK, max_num_seqs=16)
        for number in range(16):
            rig.add("gold", prompt(3, 10 + number * 3), max_tokens=12)
        made = []
        while rig.scheduler.has_requests():
            made.append(rig.step())
        return made

    assert steps(TierScheduler) == steps(AsyncScheduler)


def test_a_set_up_that_quotas_cannot_be_kept_in_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Uncached(TierScheduler):
        def __init__(self, *, vllm_config: Any, **rest: Any) -> None:
            vllm_config.cache_config.enable_prefix_caching = False
            super().__init__(vllm_config=vllm_config, **rest)

    with pytest.raises(PluginRefused, match="prefix caching is off: leave out --no-enable-prefix-caching"):
        Rig(Uncached, tmp_path, blocks=10)
