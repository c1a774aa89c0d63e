"""The sidecar in front of the Torch engine with a tiny random model: what it predicts and hints, against what is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cacheaware_sidecar.testing_sidecar import SOON, Running, running_sidecar

pytest.importorskip("torch", reason="needs the engine extra")

BLOCK = 64  # tokens; the tiny model's are bytes, so a chunk of the prefix key has as many
DOCUMENT = "The library lends books, maps and records to everybody in the town. " * 20  # 1,360 bytes: a checkpoint


@pytest.fixture
async def real(folder: Path) -> AsyncIterator[tuple[Any, Running]]:
    from cacheaware_engine.engine_testing import SteppedEngine, load_for_test, served
    from cacheaware_engine.testing import save_tiny_model

    model = load_for_test(save_tiny_model(folder / "model", max_position_embeddings=4096))
    stepped = SteppedEngine(model, num_blocks=200, block_size=BLOCK, max_num_batched_tokens=512)
    async with (
        served(stepped, folder / "kv.sock", max_model_len=4096) as engine,
        running_sidecar(engine, folder, group_hints=True) as sidecar,
    ):
        yield engine, sidecar


async def ask(sidecar: Running, system: str, question: str) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "stream": True,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
    }
    async with sidecar.client.post(f"{sidecar.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


async def test_predicted_hits_come_within_a_block_of_the_engines_once_they_are_learned(
    real: tuple[Any, Running],
) -> None:
    _, sidecar = real
    lengths = {"a": 20, "b": 33, "c": 47, "d": 60}
    systems = [f"You are assistant {name}. " + f"Rule {name}. " * length for name, length in lengths.items()]
    for number in range(20):
        await ask(sidecar, systems[number % 4], f"{number}: what about number {number}?")
    _, explained = await sidecar.control("GET", "/pool/explain")
    learned = list(reversed(explained["decisions"]))[8:]
    assert len(learned) == 12
    assert min(decision["hitTokens"] for decision in learned) >= 2 * BLOCK, "there was something to predict"
    errors = [abs(decision["predictedHitTokens"] - decision["hitTokens"]) for decision in learned]
    assert max(errors) <= BLOCK, errors


async def test_blocks_are_set_aside_for_a_group_that_grows(real: tuple[Any, Running]) -> None:
    engine, sidecar = real

    async def set_aside() -> dict[str, int]:
        status, answer = await engine.put("/kv/hints", {"groups": {}})
        assert status == 200
        return dict(answer["set_aside"])

    await asyncio.gather(ask(sidecar, DOCUMENT, "Which books?"), ask(sidecar, DOCUMENT, "Which maps?"))
    async with asyncio.timeout(SOON):
        while not (found := await set_aside()):  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.05)
    _, said = await sidecar.control("GET", "/pool/status")
    (group,) = said["groups"]
    assert found == {group["id"]: group["hintedBlocks"]}
    assert 0 < group["hintedBlocks"] <= 20, "a tenth of the cache at most"
