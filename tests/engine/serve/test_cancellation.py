"""A request that is cancelled, at whatever stage, gives everything back once, and only it is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any

import aiohttp
import pytest

from cacheaware_engine.engine_testing import PATIENCE_S, HeldRunner, Output, Served, SteppedEngine
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.requests import Finish, RequestId
from cacheaware_engine.sampling_params import SamplingParams

LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 240, "ignore_eos": True}


def prompt_of(length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_a_thousand_random_cancellations_leave_nothing_behind(tiny: LoadedModel) -> None:
    rng = Random(20)
    engine = SteppedEngine(tiny, num_blocks=34, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    outputs: dict[RequestId, Output] = {}
    stages: Counter[str] = Counter()
    cancelled = number = 0
    while cancelled < 1000:
        while len(engine.engine.live) < 9:
            number += 1
            prompt = prompt_of(8, rng.randrange(3)) + prompt_of(rng.randrange(1, 30), number)
            request = RequestId(f"r{number}")
            outputs[request] = engine.submit(
                prompt, rng.randrange(1, 50), n=rng.choice([1, 1, 1, 2, 3]), request_id=request,
                sampling=SamplingParams(temperature=1.0, seed=number), tier=rng.choice(["gold", "bronze"]),
            )  # fmt: skip
        for _ in range(rng.choice([0, 0, 1, 2, 12])):
            engine.step()
        for request in rng.sample(engine.engine.live, min(len(engine.engine.live), rng.randrange(1, 5))):
            state = engine.engine._scheduler.get(request)
            assert state is not None
            prefill = "prompt" if any(sequence.generated == 0 for sequence in state.sequences) else "output"
            stages[f"{state.blocks.stage}, {prefill}{', n > 1' if len(state.sequences) > 1 else ''}"] += 1
            engine.engine.abort(request)
            engine.engine.abort(request)  # the second call finds nothing
            cancelled += 1
        if cancelled % 20 == 0:
            engine.engine.check_integrity()
    engine.run()
    engine.assert_empty()
    assert all(output.closed == 1 for output in outputs.values())
    for stage in ("waiting, prompt", "waiting, output", "running, prompt", "running, output"):
        assert stages[stage] > 5, stages
        assert stages[f"{stage}, n > 1"] > 0, stages


def test_an_id_that_begins_like_another_is_another_request(tiny: LoadedModel) -> None:
    engine = SteppedEngine(tiny, num_blocks=60)
    shorter = engine.submit([1, 2, 3], 30, request_id="a")
    longer = engine.submit([4, 5, 6], 30, request_id="ab")
    engine.step()
    engine.engine.abort(RequestId("a"))
    engine.run()
    assert len(shorter.tokens()) < 30
    assert (len(longer.tokens()), longer.finish()) == (30, Finish.LENGTH)


async def test_a_client_that_goes_away_stops_its_request_within_a_step(held: tuple[Served, HeldRunner]) -> None:
    server, runner = held
    for body, requests in (
        (LONG, 1),
        ({**LONG, "stream": True}, 1),
        ({**LONG, "n": 3}, 1),
        ({**LONG, "prompt": ["a", "b"]}, 2),
    ):
        call = asyncio.create_task(server.post("/v1/completions", body))
        await server.given(requests)
        runner.let(3)
        await runner.stopped()
        ledger = await server.ledger()
        assert ledger["running"] + ledger["waiting"] >= 1
        steps = server.engine.totals.steps
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await aborted(server, requests)
        runner.let()
        await server.idle()
        runner.let(0)
        assert server.engine.totals.steps - steps <= 2, "it did not run to its end"
    server.stepped.assert_empty()


async def aborted(server: Served, requests: int = 1) -> None:
    """Until the server has noticed that a client is gone, and the engine is to be told of it after its step."""
    async with asyncio.timeout(PATIENCE_S):
        while len(server.engine._commands) < requests:  # noqa: ASYNC110  # a thread has no event for it
            await asyncio.sleep(0.002)


async def test_two_calls_with_the_same_request_id_are_two_requests(server: Served) -> None:
    async def call() -> Any:
        headers = {"x-request-id": "same"}
        async with server.http.post(server.url + "/v1/completions", json=LONG, headers=headers) as response:
            return await response.json()

    gone, stays = asyncio.create_task(call()), asyncio.create_task(call())
    await server.ledger("?after=2&wait=10")
    gone.cancel()
    answer = await stays
    assert answer["usage"]["completion_tokens"] == 240


async def test_clients_that_go_away_at_any_moment_leave_nothing_behind(server: Served) -> None:
    rng = Random(4)

    async def visit(number: int) -> None:
        body = {
            **LONG,
            "prompt": prompt_of(rng.randrange(1, 60), number),
            "max_tokens": rng.randrange(1, 120),
            "stream": rng.random() < 0.5,
            "n": rng.choice([1, 2]),
        }
        timeout = aiohttp.ClientTimeout(total=rng.expovariate(10))
        try:
            async with server.http.post(server.url + "/v1/completions", json=body, timeout=timeout) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    await server.post("/v1/completions", {**LONG, "prompt": [1], "max_tokens": 1})  # one that stays, so a tier is there
    visits = [asyncio.create_task(visit(number)) for number in range(150)]
    await asyncio.gather(*visits)
    ledger = await server.idle()
    assert ledger["tiers"]["default"]["held"] == 0
    assert ledger["tiers"]["default"]["cached"] + ledger["free"] == ledger["capacity"]
    server.stepped.assert_empty()


async def test_a_reader_that_takes_nothing_holds_up_nobody(server: Served) -> None:
    """Its text is merged in its outbox while the step loop goes on; when it reads again it gets all of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=1)
    body = b'{"model": "tiny", "prompt": "Once", "max_tokens": 240, "ignore_eos": true, "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status, answer = await server.post("/v1/completions", {**LONG, "prompt": "Other"})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 240)
    await server.idle()
    received = b""
    while b"[DONE]" not in received:
        received += await reader.read(2**16)
    writer.close()
    await writer.wait_closed()
    assert b'"finish_reason":"length"' in received


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_cancelled_request_counts_as_aborted(held: tuple[Served, HeldRunner], path: str) -> None:
    server, runner = held
    body = {**LONG, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
    call = asyncio.create_task(server.post(path, body))
    runner.let(3)
    await runner.stopped()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await aborted(server)
    runner.let()
    await server.idle()
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in server.stepped.metrics.exposition().decode()
