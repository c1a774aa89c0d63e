"""The KV API on its Unix socket: the ledger, quotas, public prefixes, steps; and that quotas hold under a flood."""

from __future__ import annotations

import asyncio
import json
import stat
from typing import Any

import aiohttp
import pytest

from cacheaware_api.wire import Ledger, StepReport, from_json
from cacheaware_engine.engine_testing import PATIENCE_S, HeldRunner, Served, SteppedEngine
from cacheaware_engine.loader import LoadedModel

SYSTEM = [{"role": "system", "content": "You are a careful assistant who answers in one short sentence."}]


def tier(name: str, nominal: int, **fields: Any) -> dict[str, Any]:
    quota = {"priority": 0, "weight": 1, "effective": nominal, "limit": 96, "lending": nominal}
    return {"name": name, "nominal": nominal, **quota, **fields}


def quotas(*tiers: dict[str, Any], uid: str = "a", number: int = 1, public: int = 0) -> dict[str, Any]:
    return {"revision": {"pool_uid": uid, "number": number}, "tiers": list(tiers), "public": public}


GOLD_AND_BRONZE = [tier("gold", 40, priority=10), tier("bronze", 30)]


async def complete(server: Served, tier: str, prompt: Any, max_tokens: int = 4, **fields: Any) -> Any:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "vllm_xargs": {"cacheaware_tier": tier}, **fields,
    }  # fmt: skip
    status, answer = await server.post("/v1/completions", body)
    assert status == 200, answer
    return answer


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_socket_is_its_owners_only(server: Served) -> None:
    assert stat.S_IMODE(server.kv_socket.stat().st_mode) == 0o600


async def test_the_ledger_accounts_for_every_block(server: Served) -> None:
    before = from_json(Ledger, await server.ledger())
    assert (before.capacity, before.free, before.block_size, before.max_sequences) == (96, 96, 4, 8)
    await complete(server, "gold", [1] * 21)
    after = from_json(Ledger, await server.ledger())
    assert after.sequence > before.sequence
    assert sum(one.held + one.cached for one in after.tiers.values()) + after.free == 96
    assert after.tiers["gold"].query_tokens_total == 21


async def test_a_long_poll_answers_when_something_changed_and_not_before(server: Served) -> None:
    sequence = (await server.ledger())["sequence"]
    waiting = asyncio.create_task(server.ledger(f"?after={sequence}&wait=30"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await complete(server, "gold", [1, 2, 3])
    assert (await waiting)["sequence"] > sequence


async def test_a_long_poll_ends_with_its_time(server: Served) -> None:
    sequence = (await server.ledger())["sequence"]
    assert (await server.ledger(f"?after={sequence}&wait=0"))["sequence"] == sequence
    assert (await server.ledger(f"?after={sequence}&wait=1"))["sequence"] == sequence


@pytest.mark.parametrize("query", ["?after=x", "?after=-1", "?after=1&wait=-1", "?after=1&wait=1e1", "?wait=99"])
async def test_a_bad_query_is_named(server: Served, query: str) -> None:
    async with server.kv.get(f"http://engine/kv/ledger{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] in ("after", "wait")


async def test_quotas_are_applied_and_answered_with_the_state(server: Served) -> None:
    status, applied = await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE, public=6))
    assert status == 200
    ledger = from_json(Ledger, applied)
    assert ledger.revision is not None
    assert (ledger.revision.pool_uid, ledger.revision.number) == ("a", 1)
    assert (ledger.tiers["gold"].nominal, ledger.public.share) == (40, 6)
    assert await server.ledger() == applied


async def test_an_older_number_is_409_an_equal_one_200_and_a_new_uid_wins(server: Served) -> None:
    second = quotas(*GOLD_AND_BRONZE, number=2)
    assert (await server.put("/kv/quotas", second))[0] == 200
    assert (await server.put("/kv/quotas", second))[0] == 200
    other = quotas(tier("gold", 10), number=2)
    for stale in (quotas(*GOLD_AND_BRONZE, number=1), other):
        status, answer = await server.put("/kv/quotas", stale)
        assert (status, answer["error"]["code"]) == (409, "stale_revision")
        assert (await server.ledger())["tiers"]["gold"]["nominal"] == 40
    status, applied = await server.put("/kv/quotas", quotas(tier("gold", 10), uid="b", number=1))
    assert (status, applied["tiers"]["gold"]["nominal"]) == (200, 10)


async def test_sums_that_do_not_fit_are_422_and_change_nothing(server: Served) -> None:
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE))
    before = await server.ledger()
    status, answer = await server.put("/kv/quotas", quotas(tier("gold", 90), tier("bronze", 20), number=2))
    assert (status, answer["error"]["code"]) == (422, "quota_refused")
    assert await server.ledger() == before


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param("/kv/quotas", {}, "revision", id="empty"),
        pytest.param("/kv/quotas", {**quotas(), "public": -1}, "public", id="negative share"),
        pytest.param("/kv/quotas", quotas(tier("gold", -1)), "tiers[0].nominal", id="negative quota"),
        pytest.param("/kv/quotas", quotas(tier("gold", 1, weight=True)), "tiers[0].weight", id="true as weight"),
        pytest.param("/kv/quotas", quotas(tier("gold", 1), tier("gold", 1)), "tiers", id="a name twice"),
        pytest.param("/kv/public", {"prefixes": [{"name": "a"}]}, "prefixes[0].text", id="neither text nor messages"),
        pytest.param(
            "/kv/public", {"prefixes": [{"name": "a", "messages": ["x"]}]}, "prefixes[0].messages[0]", id="text"
        ),
        pytest.param("/kv/public", {"prefixes": [{"name": "a", "text": "x"}] * 2}, "prefixes", id="a prefix twice"),
    ],
)
async def test_a_malformed_message_is_400_and_named(server: Served, path: str, body: Any, param: str) -> None:
    status, answer = await server.put(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


# -- public prefixes --------------------------------------------------------------------------------------------------


async def test_a_public_prefix_is_computed_ahead_and_shared_by_everyone(server: Served) -> None:
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE, public=26))
    status, _ = await server.put("/kv/public", {"prefixes": [{"name": "assistant", "messages": SYSTEM}]})
    assert status == 200
    ledger = from_json(Ledger, await server.idle())
    prefix = ledger.public.prefixes["assistant"]
    assert prefix.resident == prefix.blocks > 15
    assert ledger.public.cached == prefix.blocks
    assert all(one.query_tokens_total == 0 for one in ledger.tiers.values()), "prewarming is nobody's request"
    for salt, tier_name in (("one", "gold"), ("two", "bronze")):
        status, answer = await server.post(
            "/v1/chat/completions",
            {
                "model": "tiny", "messages": [*SYSTEM, {"role": "user", "content": f"I am {salt}"}], "max_tokens": 3,
                "cache_salt": salt, "vllm_xargs": {"cacheaware_tier": tier_name},
            },
        )  # fmt: skip
        assert (status, cached(answer)) == (200, prefix.blocks * 4)


async def test_text_behind_a_public_prefix_stays_private(server: Served) -> None:
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE, public=26))
    text = "Terms of use. " * 4
    await server.put("/kv/public", {"prefixes": [{"name": "terms", "text": text}]})
    await server.idle()
    prompt = text + "and a question of mine"
    await complete(server, "gold", prompt, cache_salt="one")
    assert cached(await complete(server, "gold", prompt, cache_salt="two")) == len(text) // 4 * 4
    assert cached(await complete(server, "gold", prompt, cache_salt="one")) > len(text)


async def test_public_prefixes_that_do_not_fit_are_422_with_both_numbers(server: Served) -> None:
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE, public=5))
    status, answer = await server.put("/kv/public", {"prefixes": [{"name": "long", "text": "x" * 60}]})
    assert status == 422
    assert "15" in answer["error"]["message"]
    assert "5" in answer["error"]["message"]
    assert (await server.ledger())["public"]["prefixes"] == {}


async def test_a_public_prefix_that_is_taken_back_leaves_the_cache(server: Served) -> None:
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE, public=20))
    await server.put("/kv/public", {"prefixes": [{"name": "a", "text": "x" * 60}]})
    await server.idle()
    await server.put("/kv/public", {"prefixes": []})
    ledger = from_json(Ledger, await server.idle())
    assert (ledger.public.cached, ledger.public.prefixes, ledger.free) == (0, {}, 96)


async def test_an_idle_engines_ledger_says_when_blocks_lapse(server: Served) -> None:
    await server.put("/kv/quotas", quotas(tier("gold", 40, retention_s=0.2)))
    await complete(server, "gold", [3] * 20)
    ledger = await server.idle()
    while ledger["tiers"]["gold"]["lapsed"] < 5:
        ledger = await server.ledger(f"?after={ledger['sequence']}&wait=10")
    assert ledger["tiers"]["gold"]["cached"] == ledger["tiers"]["gold"]["lapsed"]


# -- steps ------------------------------------------------------------------------------------------------------------


async def test_steps_are_reported_while_they_are_computed(server: Served) -> None:
    async with server.kv.get("http://engine/kv/steps") as response:
        assert response.content_type == "text/event-stream"
        await complete(server, "gold", [7] * 30, max_tokens=50)
        reports: list[StepReport] = []
        while sum(report.tokens for report in reports) < 30 + 49:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                reports.append(from_json(StepReport, json.loads(line[6:])))
    assert sum(report.steps for report in reports) == 50
    assert sum(report.tokens for report in reports) == 30 + 49
    assert sum(report.query_context for report in reports) == sum(range(1, 80))
    assert all(report.kv_bytes_read >= report.unique_kv_bytes >= 0 for report in reports)
    assert all(report.step_seconds > 0 for report in reports)


async def test_a_follower_that_goes_away_is_forgotten(server: Served) -> None:
    async with server.kv.get("http://engine/kv/steps"):
        assert server.engine._followers
    await complete(server, "gold", [1])
    await server.ledger("?after=1000000&wait=0")
    async with asyncio.timeout(PATIENCE_S):
        while server.engine._followers:
            await complete(server, "gold", [1])


# -- quotas hold ------------------------------------------------------------------------------------------------------


async def test_a_flood_does_not_evict_what_a_tier_is_entitled_to(server: Served) -> None:
    """Gold's conversation stays cached under a bronze flood with quotas, and is gone without them."""
    conversation = [(7 * position) % 250 for position in range(100)]

    async def flood(start: int) -> None:
        prompts = [[(start + number + 3 * position) % 250 for position in range(60)] for number in range(40)]
        await asyncio.gather(*(complete(server, "bronze", prompt, cache_salt="b") for prompt in prompts))

    await complete(server, "gold", conversation, cache_salt="g")
    await flood(0)
    assert cached(await complete(server, "gold", conversation, cache_salt="g")) < 96
    await server.put("/kv/quotas", quotas(*GOLD_AND_BRONZE))
    await complete(server, "gold", conversation, cache_salt="g")
    await flood(100)
    assert cached(await complete(server, "gold", conversation, cache_salt="g")) == 96
    ledger = from_json(Ledger, await server.idle())
    assert ledger.tiers["bronze"].evicted_total > 100
    server.stepped.assert_empty()


async def test_a_tier_within_its_nominal_does_not_wait_for_borrowers(held: tuple[Served, HeldRunner]) -> None:
    server, runner = held
    await server.put("/kv/quotas", quotas(tier("gold", 60, priority=10), tier("bronze", 6)))
    borrowing = [
        asyncio.create_task(complete(server, "bronze", [number] * 40, max_tokens=150, cache_salt=f"{number}"))
        for number in range(3)
    ]
    await server.given(3)
    # Gold, which needs fifty of the 96 blocks, will have to take some back.
    while (await server.ledger())["tiers"]["bronze"]["held"] < 60:
        runner.let(1)
        await runner.stopped()
    entitled = asyncio.create_task(complete(server, "gold", [99] * 200, max_tokens=3))
    await server.given(4)
    runner.let(40)  # the borrowers need a hundred more
    async with asyncio.timeout(PATIENCE_S):
        gold = await entitled
    assert gold["usage"]["completion_tokens"] == 3
    assert not any(task.done() for task in borrowing)
    runner.let()
    answers = await asyncio.gather(*borrowing)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [150] * 3
    ledger = await server.idle()
    assert ledger["tiers"]["bronze"]["preempted_total"] > 0


def test_a_request_that_waits_through_many_steps_is_counted_once(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=20, block_size=4)
    engine.submit([1] * 40, 30)
    engine.step()
    waiter = engine.submit([2] * 40, 3)
    for _ in range(5):
        engine.step()
        assert waiter.cached_tokens is None
    engine.run()
    assert waiter.cached_tokens == 0
    ledger = engine.engine.ledger()
    assert ledger.tiers["default"].query_tokens_total == 80
    assert 'vllm:prefix_cache_queries_total{model_name="tiny"} 80.0' in engine.metrics.exposition().decode()


async def test_a_client_of_another_kind_cannot_reach_the_kv_api_by_tcp(server: Served) -> None:
    async with aiohttp.ClientSession() as session, session.get(server.url + "/kv/ledger") as response:
        assert response.status == 404
