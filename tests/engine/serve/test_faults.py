"""A step that fails ends its requests with an error, and then the process; a request's own fault ends only itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from cacheaware_engine.engine_testing import HeldRunner, Served, SteppedEngine, served
from cacheaware_engine.errors import Unavailable
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.runner import ModelRunner, SequenceWork, StepOutput

BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


class FailingRunner:
    """A model that computes so many steps and then fails."""

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        self._runner = runner
        self._steps = steps
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.bytes_per_token, self.kv_form = runner.bytes_per_token, runner.kv_form

    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        self._steps -= 1
        if self._steps < 0:
            raise RuntimeError("the device is on fire")
        return self._runner.forward(work)

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def failing(model: LoadedModel, steps: int) -> SteppedEngine:
    return SteppedEngine(model, num_blocks=96, block_size=4, wrap=lambda runner: FailingRunner(runner, steps))


async def test_a_failed_step_fails_its_requests_and_says_so_everywhere(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(failing(tiny, 3), tmp_path / "kv.sock") as server:
        calls = [server.post("/v1/completions", {**BODY, "prompt": prompt}) for prompt in ("a", "b", ["c", "d"])]
        for status, answer in await asyncio.gather(*calls):
            assert status == 500
            assert "the device is on fire" in answer["error"]["message"]
        assert "Traceback" in caplog.text
        async with server.http.get(server.url + "/health") as response:
            assert response.status == 500
            assert await response.json() == {"status": "dead", "reason": "the device is on fire"}
        status, answer = await server.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (500, "engine_broke")
        status, answer = await server.put("/kv/public", {"prefixes": []})
        assert status == 500
        server.stepped.pool.check_integrity()
    (death,) = server.deaths  # its thread, which tells of it last, has ended now
    assert isinstance(death, RuntimeError)


async def test_a_stream_that_began_ends_with_an_error_event(tiny: LoadedModel, tmp_path: Path) -> None:
    async with served(failing(tiny, 5), tmp_path / "kv.sock") as server:
        async with server.http.post(server.url + "/v1/completions", json={**BODY, "stream": True}) as response:
            assert response.status == 200
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert "the device is on fire" in error["message"]


async def test_what_waits_fails_too(tiny: LoadedModel, tmp_path: Path) -> None:
    async with served(failing(tiny, 4), tmp_path / "kv.sock") as server:
        long = {**BODY, "prompt": [5] * 120, "max_tokens": 100}
        for status, _ in await asyncio.gather(*(server.post("/v1/completions", long) for _ in range(4))):
            assert status == 500


async def test_a_stopped_engine_ends_what_is_live(held: tuple[Served, HeldRunner]) -> None:
    server, runner = held
    call = asyncio.create_task(server.post("/v1/completions", BODY))
    runner.let(3)
    await runner.stopped()
    stopping = asyncio.create_task(server.engine.stop(Unavailable("going down")))
    await asyncio.sleep(0)  # it is told, and ends after its step
    runner.let()
    await stopping
    status, answer = await call
    assert (status, answer["error"]["message"]) == (503, "going down")


async def test_a_log_line_tells_of_a_request_and_not_what_it_said(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with served(SteppedEngine(tiny, num_blocks=96), tmp_path / "kv.sock") as server:
        await server.post("/v1/completions", {**BODY, "prompt": "SECRET words", "max_tokens": 3, "stop": "SECRET"})
    (record,) = [record for record in caplog.records if record.message == "request"]
    said = record.__dict__["values"]
    assert (said["prompt_tokens"], said["output_tokens"], said["finish"], said["cached_tokens"]) == (12, 3, "length", 0)
    assert said["ttft_s"] > 0
    assert "SECRET" not in json.dumps(said)
