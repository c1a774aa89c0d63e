"""Sends the demo's load through a pool's public URL and notes what each request got. The clients behave as users do:

gold waits for an answer, thinks, and sends the whole conversation again; silver's readers ask about a document
together, a few times; bronze asks again at once. Gold's conversations are opened before the crowd comes, and a run ends
with its last answer.

Gold thinks for as long as the crowd needs for a number of answers, not for seconds: so the pressure on the cache
between two turns, and the work of a run, are the same on a quick machine and on a slow or busy one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cacheaware.demo.load import Load, Message, flood, history, questions, turns


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it; times in seconds from the run's start."""

    tier: str
    started: float
    first_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None = None
    opening: bool = False  # a conversation's first turn, before the crowd comes

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


@dataclass(frozen=True, slots=True)
class Answer:
    served: Served
    text: str


@dataclass(slots=True)
class Client:
    """One OpenAI-style client of the pool."""

    session: aiohttp.ClientSession
    url: str
    keys: dict[str, str]  # tier -> API key
    model: str
    start: float = field(default_factory=time.monotonic)
    served: list[Served] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.start

    async def chat(
        self, tier: str, messages: list[Message], answer_tokens: int, *, opening: bool = False, **options: Any
    ) -> Answer:
        """Stream one greedy answer of exactly `answer_tokens` tokens, so that every run has the same work to do."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | options
        headers = {"Authorization": f"Bearer {self.keys[tier]}"}
        started, first, text, error = self.now(), None, "", None
        usage: dict[str, Any] = {}
        try:
            async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:300]}"
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = str(event["error"].get("message", event["error"]))
                    for choice in event.get("choices") or ():
                        if piece := (choice.get("delta") or {}).get("content"):
                            first = self.now() if first is None else first
                            text += piece
                    usage = event.get("usage") or usage
        except aiohttp.ClientError as broken:
            error = f"{type(broken).__name__}: {broken}"
        served = Served(
            tier=tier,
            started=started,
            first_token=first,
            ended=self.now(),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            output_tokens=usage.get("completion_tokens", 0),
            error=error or (None if usage else "the stream ended without usage"),
            opening=opening,
        )
        self.served.append(served)
        return Answer(served, text)


class Crowd:
    """Counts what bronze was answered: the clock by which gold thinks."""

    def __init__(self) -> None:
        self.answers = 0
        self._more = asyncio.Event()  # set at the next answer, and then replaced

    def answered(self) -> None:
        self.answers += 1
        self._more.set()
        self._more = asyncio.Event()

    async def wait(self, answers: int) -> None:
        """Until bronze was answered so many times more."""
        goal = self.answers + answers
        while self.answers < goal:
            await self._more.wait()


@dataclass(slots=True)
class Conversation:
    """One gold chat: all that was said so far, and what its user says next."""

    messages: list[Message]
    to_say: list[str]

    async def turn(self, client: Client, answer_tokens: int, *, opening: bool = False) -> None:
        self.messages.append({"role": "user", "content": self.to_say.pop(0)})
        answer = await client.chat("gold", self.messages, answer_tokens, opening=opening)
        self.messages.append({"role": "assistant", "content": answer.text})


async def converse(
    client: Client, load: Load, conversation: Conversation, number: int, crowd: Crowd | None, done: Callable[[], None]
) -> None:
    gold = load.gold
    delay = number / gold.conversations  # not all at once
    while conversation.to_say:
        if crowd is not None:
            await crowd.wait(round(gold.think_answers * delay))
        else:
            await asyncio.sleep(gold.think_seconds_alone * delay)
        await conversation.turn(client, gold.answer_tokens)
        done()
        delay = 1.0


async def read(client: Client, load: Load, run: int) -> None:
    """All readers together: the next questions come when the last ones were answered."""
    readers = [questions(load, run, reader) for reader in range(load.silver.readers)]
    for asked in zip(*readers, strict=True):
        answers = await asyncio.gather(
            *(client.chat("silver", messages, load.silver.answer_tokens) for messages in asked)
        )
        well = all(answer.served.error is None for answer in answers)
        await asyncio.sleep(load.silver.think_seconds if well else 1.0)


async def insist(client: Client, load: Load, run: int, number: int, crowd: Crowd) -> None:
    for messages in flood(load, run, number):
        answer = await client.chat("bronze", messages, load.bronze.answer_tokens)
        crowd.answered()
        if answer.served.error is not None:
            await asyncio.sleep(1.0)  # refused: a client that backs off, as the answer asks


async def drive(client: Client, load: Load, run: int, *, with_crowd: bool, done: Callable[[], None]) -> float:
    """Run the load once and return the seconds it took; `with_crowd` adds silver and bronze to gold.

    What every client got is in `client.served`; what the crowd has unfinished at gold's last answer is dropped.
    """
    gold = [
        Conversation(history(load, run, number), turns(load, run, number)) for number in range(load.gold.conversations)
    ]
    await asyncio.gather(*(each.turn(client, load.gold.answer_tokens, opening=True) for each in gold))
    began = client.now()
    crowd = Crowd() if with_crowd else None
    others: list[asyncio.Task[None]] = []
    try:
        if crowd is not None:
            others += [asyncio.create_task(insist(client, load, run, n, crowd)) for n in range(load.bronze.clients)]
            others.append(asyncio.create_task(read(client, load, run)))
        async with asyncio.TaskGroup() as group:
            for number, conversation in enumerate(gold):
                group.create_task(converse(client, load, conversation, number, crowd, done))
        return client.now() - began
    finally:
        for task in others:
            task.cancel()
        for result in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
