"""`cacheaware explain --request`: what would happen to a request now, in words."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cacheaware import state_file
from cacheaware.__main__ import app
from cacheaware.explain import PoolLines
from cacheaware.foresee import Answer, BadRequestFile, request_of, table
from cacheaware.state_file import PoolIdentity, ReplicaAddress, State
from cacheaware_api import wire
from cacheaware_sidecar.scheduling import FlushReason, WaitsFor
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import CONTROL_TOKEN, running_sidecar, view_json

POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  tiers:
  - name: gold
    batchingWindow: 200ms
  - name: bronze
  defaultTier: bronze
  identity:
    type: APIKeys
    apiKeys: {secretRef: {name: keys}}
"""
KEYS = {"key-of-acme": {"tenant": "acme", "tiers": ["gold"], "defaultTier": "gold"}}
HELD = wire.Foreseen(
    wire.Course.HOLD,
    "prefix-ready",
    tenant="acme",
    tier="gold",
    tier_by="key",
    scope="tenant",
    prompt_tokens=640,
    prompt_blocks=40,
    cached_tokens=512,
    waiting_before=3,
    hold_at_most_ms=200.0,
    time_to_first_token_ms=900.0,
    promised_ms=800.0,
    in_time=False,
    fields=("identity.apiKeys", "sharing", "tiers[gold].batchingWindow"),
)


class TestRequest:
    @pytest.mark.parametrize(
        ("body", "path"),
        [
            pytest.param({"messages": []}, "/v1/chat/completions", id="a chat"),
            pytest.param({"prompt": "Hi"}, "/v1/completions", id="a completion"),
            pytest.param({"input": "Hi"}, "/v1/responses", id="a response"),
        ],
    )
    def test_goes_where_its_body_says(self, body: Any, path: str) -> None:
        assert request_of(json.dumps(body)) == (path, body)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "{}", '{"model": "m"}', '{"prompt": "a", "messages": []}', '"prompt"', "1"]
    )
    def test_that_is_none_is_told_in_words(self, text: str) -> None:
        with pytest.raises(BadRequestFile, match="the request"):
            request_of(text)


def printed(told: wire.Foreseen, folder: Path) -> str:
    (folder / "pool.yaml").write_text(POOL)
    console = Console(file=io.StringIO(), width=200)
    console.print(table([Answer("chat-0", told)], PoolLines(folder / "pool.yaml")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestTable:
    def test_tells_what_would_happen_and_the_lines_that_decide(self, tmp_path: Path) -> None:
        said = printed(HELD, tmp_path)
        for words in (
            "is held for company until the prefix that it shares is computed, 200 ms at most",
            "tenant acme",
            "gold, by the key's default",
            "about 640 tokens (40 blocks), 512 of them probably cached",
            "3 of its tier",
            "after about 900 ms, too late: promised within 800 ms",
            "pool.yaml:12 identity.apiKeys",
            "pool.yaml:7 batchingWindow: 200ms",
        ):
            assert words in said
        assert "sharing\n" in said.replace(" ", "")  # the file does not say it

    def test_tells_a_refusal_as_a_client_would_read_it(self, tmp_path: Path) -> None:
        told = wire.Foreseen(
            wire.Course.REFUSE, "tier-not-allowed", 403, "you may not use tier 'gold'", tenant="acme", key="one"
        )
        said = printed(told, tmp_path)
        assert "is refused: 403 tier-not-allowed" in said
        assert "you may not use tier 'gold'" in said
        assert "tenant acme (key one)" in said

    @pytest.mark.parametrize("reason", WaitsFor)
    def test_every_reason_to_wait_has_words(self, tmp_path: Path, reason: WaitsFor) -> None:
        assert "waits until" in printed(
            dataclasses.replace(HELD, course=wire.Course.WAIT, reason=str(reason)), tmp_path
        )

    @pytest.mark.parametrize("reason", [FlushReason.PREFIX_READY, FlushReason.WINDOW, FlushReason.SLACK])
    def test_every_reason_to_be_held_has_words(self, tmp_path: Path, reason: FlushReason) -> None:
        assert "is held for company until" in printed(dataclasses.replace(HELD, reason=str(reason)), tmp_path)


class TestCommand:
    """Against a sidecar as `cacheaware up` runs it, in front of an engine that records what it is asked."""

    @pytest.fixture
    async def engine(self, tmp_path: Path, state_home: Path) -> AsyncIterator[StubEngine]:
        (tmp_path / "pool.yaml").write_text(POOL)
        with tempfile.TemporaryDirectory(prefix="ca-") as name:
            wanted = view_json(identity={"type": "APIKeys"}, sharing="Tenant")
            async with (
                StubEngine(Path(name) / "kv.sock") as engine,
                running_sidecar(engine, Path(name), wanted=wanted, keys=KEYS) as sidecar,
            ):
                replica = ReplicaAddress("chat-0", sidecar.url, sidecar.control_url, engine.url, str(engine.kv_socket))
                started = state_file.process_started(os.getpid())
                assert started is not None
                identity = PoolIdentity("default", "chat", "uid", 1, {})
                file = str(tmp_path / "pool.yaml")
                state = State(os.getpid(), started, name, file, identity, (replica,), CONTROL_TOKEN)
                state_file.write(state_file.path_for("default", "chat", state_home / "cacheaware"), state)
                yield engine

    async def invoke(self, environment: dict[str, str], *arguments: str, text: str | None = None) -> tuple[int, str]:
        runner = CliRunner(env=environment)
        result = await asyncio.to_thread(runner.invoke, app, ["explain", *arguments], input=text)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    async def test_prints_a_table_of_a_file(
        self, engine: StubEngine, environment: dict[str, str], tmp_path: Path
    ) -> None:
        (tmp_path / "body.json").write_text(json.dumps({"prompt": "How are you? " * 20}))
        file = str(tmp_path / "body.json")
        code, said = await self.invoke(environment, "--request", file, "--key", "key-of-acme")
        assert code == 0, said
        for words in ("goes to the engine at once", "tenant acme (key key-0)", "its tenant", "pool.yaml:12"):
            assert words in said
        assert "key-of-acme" not in said
        assert engine.requests == []

    async def test_prints_lines_of_standard_input(self, engine: StubEngine, environment: dict[str, str]) -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})
        code, said = await self.invoke(
            {**environment, "CACHEAWARE_KEY": "key-of-acme"}, "--request", "-", "--lines", text=body
        )
        assert code == 0, said
        told = json.loads(said)
        assert (told["replica"], told["course"], told["tier"]) == ("chat-0", "go", "gold")

    async def test_an_answer_that_is_a_refusal_is_an_answer(
        self, engine: StubEngine, environment: dict[str, str]
    ) -> None:
        code, said = await self.invoke(environment, "--request", "-", text='{"prompt": "Hi"}')
        assert code == 0
        assert "is refused: 401 unknown-key" in said

    async def test_a_long_prompt_can_be_asked_about(self, engine: StubEngine, environment: dict[str, str]) -> None:
        text = json.dumps({"prompt": "x" * 2_000_000})
        code, said = await self.invoke(environment, "--request", "-", "--key", "key-of-acme", text=text)
        assert code == 0
        assert "about 500000 tokens" in said

    async def test_a_question_that_no_sidecar_takes_is_told_with_its_reason(
        self, engine: StubEngine, environment: dict[str, str]
    ) -> None:
        text = json.dumps({"prompt": "x" * 9_000_000})
        code, said = await self.invoke(environment, "--request", "-", text=text)
        assert code == 1
        assert "answered 413 the body has more than" in said

    @pytest.mark.parametrize(
        ("file", "text", "says"),
        [
            pytest.param("-", "{", "the request is not JSON", id="no JSON"),
            pytest.param("nowhere.json", None, "No such file", id="no file"),
        ],
    )
    async def test_what_cannot_be_asked_ends_with_2(
        self, environment: dict[str, str], file: str, text: str | None, says: str
    ) -> None:
        code, said = await self.invoke(environment, "--request", file, text=text)
        assert code == 2
        assert says in said

    async def test_a_pool_that_does_not_run_ends_with_1(self, environment: dict[str, str]) -> None:
        code, said = await self.invoke(environment, "--request", "-", text='{"prompt": "Hi"}')
        assert code == 1
        assert "no pool runs here" in said
