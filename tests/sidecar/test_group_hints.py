"""Hints to the engine: what is told, when again, and that a real engine sets blocks aside for the group it meant."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import aiohttp
import pytest

from cacheaware_api import wire
from cacheaware_sidecar.group_hints import TTL_SECONDS, GroupHints
from cacheaware_sidecar.scheduling.active_groups import GroupWorkingSet
from cacheaware_sidecar.settings import parse
from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import SOON, Running, eventually, running_sidecar

DOCUMENT = "The library lends books, maps and records to everybody in the town. " * 20  # 1,360 bytes: a checkpoint


def ledger(capacity: int = 1000) -> wire.Ledger:
    return dataclasses.replace(StubEngine(None).ledger(), capacity=capacity)


def working_set(name: str, growth: int, rate: float = 1.0) -> GroupWorkingSet:
    return GroupWorkingSet(name, "gold", 256, 1, 256, growth, rate)


def told(hints: wire.Hints | None) -> dict[str, int] | None:
    return None if hints is None else {group: hint.expected_blocks for group, hint in hints.groups.items()}


class TestWhatIsTold:
    def test_the_blocks_of_the_next_seconds(self) -> None:
        hints = GroupHints()
        news = hints.news([working_set("docs", growth=80)], ledger(), 0.0)
        assert news == wire.Hints({"docs": wire.GroupHint(50, TTL_SECONDS)}), "10 s of 80 tokens, in blocks of 16"
        assert hints.blocks == {"docs": 50}

    def test_a_tenth_of_the_cache_at_most_the_first_ones_first(self) -> None:
        groups = [working_set("docs", growth=100), working_set("code", growth=160), working_set("chat", growth=16)]
        assert told(GroupHints().news(groups, ledger(), 0.0)) == {"docs": 63, "code": 37}

    def test_nothing_for_a_group_that_does_not_grow(self) -> None:
        assert GroupHints().news([working_set("docs", growth=0)], ledger(), 0.0) is None

    def test_what_has_hardly_changed_is_not_told_again_before_it_lapses(self) -> None:
        hints = GroupHints()
        hints.news([working_set("docs", growth=80)], ledger(), 0.0)
        assert hints.news([working_set("docs", growth=90)], ledger(), 1.0) is None
        assert told(hints.news([working_set("docs", growth=120)], ledger(), 2.0)) == {"docs": 75}
        assert hints.news([working_set("docs", growth=120)], ledger(), 6.0) is None
        assert told(hints.news([working_set("docs", growth=120)], ledger(), 7.0)) == {"docs": 75}, "before it lapses"

    def test_a_group_that_is_gone_is_taken_back_once_unless_it_has_lapsed(self) -> None:
        hints = GroupHints()
        hints.news([working_set("docs", growth=80)], ledger(), 0.0)
        assert told(hints.news([], ledger(), 1.0)) == {"docs": 0}
        assert hints.news([], ledger(), 2.0) is None
        hints.news([working_set("docs", growth=80)], ledger(), 3.0)
        assert hints.news([], ledger(), 3.0 + TTL_SECONDS) is None


def test_without_the_engines_accounts_there_is_nobody_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--engine-url http://127.0.0.1:1 --view-file v --secrets-dir s --estimate-only --group-hints"
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert "--group-hints" in capsys.readouterr().err


async def two_at_once(sidecar: Running, engine: StubEngine | None = None) -> None:
    """Two that share a document make a group; `engine` keeps them until both have come."""

    async def ask(question: str) -> None:
        body = {
            "max_tokens": 4,
            "stream": True,
            "messages": [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}],
        }
        async with sidecar.client.post(f"{sidecar.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    gate = asyncio.Event()
    if engine is not None:
        engine.behaviour = Behaviour(hold=gate, prompt_tokens=400, cached_tokens=300)
    both = [asyncio.create_task(ask(question)) for question in ("Which books?", "Which maps?")]
    if engine is not None:
        await engine.count(2)
        gate.set()
    await asyncio.gather(*both)


async def test_by_default_the_engine_is_told_nothing_and_the_status_shows_the_working_set(
    engine: StubEngine, sidecar: Running
) -> None:
    await two_at_once(sidecar, engine)
    _, status = await sidecar.control("GET", "/pool/status")
    (group,) = wire.from_json(wire.PoolStatus, status).groups
    assert (group.tier, group.conversations, group.hinted_blocks) == ("bronze", 1, None)
    assert group.id == engine.requests[1].json["vllm_xargs"]["cacheaware_group"]
    assert group.growth_tokens == 100 + 7, "what was not cached, and the answer"
    _, explained = await sidecar.control("GET", "/pool/explain")
    assert explained["groups"] == status["groups"]
    assert engine.hints == []


async def shows_what_it_told(sidecar: Running, engine: StubEngine) -> bool:
    _, status = await sidecar.control("GET", "/pool/status")
    (hint,) = engine.hints[-1].groups.values()
    return bool(status["groups"][0]["hintedBlocks"] == hint.expected_blocks > 0)


async def test_switched_on_the_engine_is_told_of_the_group_that_its_requests_name(
    engine: StubEngine, folder: Path
) -> None:
    async with running_sidecar(engine, folder, group_hints=True) as sidecar:
        await two_at_once(sidecar, engine)
        await eventually(lambda: bool(engine.hints))
        (name,) = engine.hints[0].groups
        assert name == engine.requests[1].json["vllm_xargs"]["cacheaware_group"]
        async with asyncio.timeout(SOON):
            while not await shows_what_it_told(sidecar, engine):  # noqa: ASYNC110  # it tells of fewer as time goes by
                await asyncio.sleep(0.01)


async def test_an_engine_that_takes_no_hints_serves_all_the_same(folder: Path) -> None:
    class Deaf(StubEngine):
        async def _put_hints(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
            await super()._put_hints(request)
            raise aiohttp.web.HTTPNotFound

    async with (
        Deaf(folder / "kv.sock") as engine,
        running_sidecar(engine, folder, group_hints=True) as sidecar,
    ):
        await two_at_once(sidecar, engine)
        await eventually(lambda: bool(engine.hints))
        engine.behaviour = Behaviour()
        await two_at_once(sidecar)
        assert not sidecar.sidecar.failed.is_set()
