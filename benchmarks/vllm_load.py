"""Loads that go straight to a vLLM: conversations beside a flood that wipes the cache, and sixteen requests at once.

Gold is four conversations that fit its nominal share of the cache; bronze asks what nobody asks again, and brings in
more between two turns of a conversation than the rest of the cache holds.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from e2e.vllm_servers import MODEL_NAME, Server, Unavailable

from cacheaware_api import wire

CONVERSATIONS = 4
FLOODS = 2
GOLD_PERCENT = 64  # of the cache, as in the demo
WORDS = ("alpha", "beta", "gamma", "delta", "class", "value", "index", "print", "range", "list", "tuple", "object")


@dataclass(frozen=True, slots=True)
class Shape:
    chats: int  # of gold, in each flood
    prompt_words: int
    steady_tokens: int


@dataclass(slots=True)
class Seen:
    """What one server's clients saw, a figure for each round but for the first tokens."""

    first_tokens: list[float] = field(default_factory=list)  # seconds to gold's first token under the flood
    hits: list[float] = field(default_factory=list)  # of gold's hit tokens alone, the part that it had under the flood
    rates: list[float] = field(default_factory=list)  # output tokens a second, both tiers
    steady: list[float] = field(default_factory=list)  # seconds a step of 16 requests
    evicted: list[int] = field(default_factory=list)  # blocks during the flood, where the server says so


@dataclass(frozen=True, slots=True)
class Answer:
    first_token: float
    seconds: float
    tokens: int
    cached: int


def quotas(blocks: int) -> wire.Quotas:
    gold, bronze = blocks * GOLD_PERCENT // 100, blocks * 20 // 100
    tiers = (
        wire.TierQuota("gold", 100, 4, gold, gold, blocks, gold),
        wire.TierQuota("bronze", 0, 1, bronze, bronze, blocks, bronze),
    )
    return wire.Quotas(wire.Revision("flood", 1), tiers, 0)  # another pool than the demo's, whose quotas follow


async def contended(session: aiohttp.ClientSession, server: Server, seen: Seen, shape: Shape, number: int) -> None:
    """Gold alone, then the same conversations beside those who flood the cache."""
    salt = f"{server.name}-{number}"
    alone = await _chats(session, server, shape, f"{salt}-alone", pause=0)
    made, stop = 0, asyncio.Event()

    def one_more() -> None:
        nonlocal made
        made += 1

    async def flood(which: int) -> None:
        count = 0
        while not stop.is_set():
            words = _text(shape.prompt_words, zlib.crc32(f"{salt} {which} {count}".encode()))
            await _complete(session, server, words, "bronze", f"{salt}-flood-{which}", on_token=one_more)
            count += 1

    evicted = await _evicted(server)
    began = time.perf_counter()
    flooding = [asyncio.create_task(flood(which)) for which in range(FLOODS)]
    beside = await _chats(session, server, shape, f"{salt}-beside", pause=0.3)
    elapsed = time.perf_counter() - began
    total = made + sum(answer.tokens for answer in beside)
    stop.set()
    await asyncio.gather(*flooding)
    seen.first_tokens += [each.first_token for each in beside[CONVERSATIONS:]]  # the first ones compute their prompts
    seen.hits.append(sum(answer.cached for answer in beside) / max(1, sum(answer.cached for answer in alone)))
    seen.rates.append(total / elapsed)
    if evicted is not None:
        seen.evicted.append((await _evicted(server) or 0) - evicted)


async def uncontended(session: aiohttp.ClientSession, server: Server, seen: Seen, shape: Shape, number: int) -> None:
    """Sixteen at once, of one tier, that fit: seconds a step once all of them decode."""
    salt = f"{server.name}-{number}-steady"
    prompts = [_text(20, 1000 + each) for each in range(16)]
    tokens = shape.steady_tokens
    answers = await asyncio.gather(*(_complete(session, server, prompt, "gold", salt, tokens) for prompt in prompts))
    seen.steady.append(statistics.median((each.seconds - each.first_token) / (tokens - 1) for each in answers))


async def _chats(
    session: aiohttp.ClientSession, server: Server, shape: Shape, salt: str, pause: float
) -> list[Answer]:  # fmt: skip
    """Four conversations in turn, each at its prompt again."""
    prompts = [_text(shape.prompt_words, 100 + number) for number in range(CONVERSATIONS)]
    answers = []
    for number in range(shape.chats):
        prompt = f"{prompts[number % CONVERSATIONS]} q{number}"
        answers.append(await _complete(session, server, prompt, "gold", salt))
        await asyncio.sleep(pause)
    return answers


async def _complete(
    session: aiohttp.ClientSession, server: Server, prompt: str, tier: str, salt: str, tokens: int = 8,
    on_token: Callable[[], None] = lambda: None,
) -> Answer:  # fmt: skip
    body: dict[str, Any] = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
        "priority": -100 if tier == "gold" else 0, "vllm_xargs": {"cacheaware_tier": tier},
    }  # fmt: skip
    began, first = time.perf_counter(), None
    usage: dict[str, Any] = {}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Unavailable(f"the {server.name} server answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    first = first if first is not None else time.perf_counter() - began
                    on_token()
                usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        first or 0.0, time.perf_counter() - began, usage["completion_tokens"], details.get("cached_tokens") or 0
    )


async def _evicted(server: Server) -> int | None:
    """Blocks that made room for others so far; None where nobody counts them."""
    if server.kv_socket is None:
        return None
    return sum(tier.evicted_total for tier in (await server.ledger()).tiers.values())


def _text(words: int, seed: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words))
