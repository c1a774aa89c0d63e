"""`cacheaware explain`: what decided how a request was treated, and where the pool's file says so."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from cacheaware.explain import PoolLines, explained, last_decisions, table, to_lines
from cacheaware.pool_status import NotRunning
from cacheaware.replay.trace_formats import TraceFormat, trace_file
from cacheaware.state_file import PoolIdentity, ReplicaAddress, State
from cacheaware_api import wire
from cacheaware_sidecar.scheduling import FlushReason

POOL = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: prompts}
---
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  tiers:
  - name: gold
    weight: 4
    sla:
      timeToFirstToken: 2s
  - name: bronze
    batchingWindow: 200ms
"""
DECISION = wire.Decision("a", 100.0, "bronze", 3.0, 200.0, "window", "answered", prompt_tokens=640, hit_tokens=512)


class TestWhatDecides:
    @pytest.mark.parametrize(
        ("decision", "field"),
        [
            pytest.param(DECISION, ("batchingWindow",), id="the window"),
            pytest.param(
                dataclasses.replace(DECISION, flush_reason="slack"), ("sla", "timeToFirstToken"), id="the SLA"
            ),
            pytest.param(dataclasses.replace(DECISION, queue_ms=900.0), ("weight",), id="the tier's share"),
            pytest.param(dataclasses.replace(DECISION, flush_reason="idle"), None, id="nothing in the file"),
        ],
    )
    def test_is_a_field_of_the_tier(self, decision: wire.Decision, field: tuple[str, ...] | None) -> None:
        assert explained(decision).field == field

    @pytest.mark.parametrize("reason", FlushReason)
    def test_every_reason_of_the_scheduler_has_words(self, reason: FlushReason) -> None:
        assert explained(dataclasses.replace(DECISION, flush_reason=str(reason))).why != str(reason)


class TestLines:
    @pytest.mark.parametrize(
        ("tier", "field", "said"),
        [
            pytest.param("bronze", ("batchingWindow",), "pool.yaml:15 batchingWindow: 200ms", id="a field"),
            pytest.param(
                "gold", ("sla", "timeToFirstToken"), "pool.yaml:13 sla.timeToFirstToken: 2s", id="inside another"
            ),
            pytest.param("bronze", ("weight",), "weight (not set: its default)", id="a default"),
            pytest.param("silver", ("weight",), "", id="a tier that is gone"),
        ],
    )
    def test_are_those_of_the_pools_file(self, tmp_path: Path, tier: str, field: tuple[str, ...], said: str) -> None:
        path = tmp_path / "pool.yaml"
        path.write_text(POOL)
        assert PoolLines(path).where(tier, field) == said

    @pytest.mark.parametrize("content", [pytest.param(None, id="gone"), pytest.param("{", id="broken")])
    def test_a_file_that_cannot_be_read_is_no_reason_to_fail(self, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "pool.yaml"
        if content is not None:
            path.write_text(content)
        assert PoolLines(path).where("gold", ("weight",)) == ""


class Control:
    """The control side of a sidecar, as far as explain asks it."""

    def __init__(self, decisions: list[wire.Decision], status: int = 200) -> None:
        self._decisions = decisions
        self._status = status

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        shown = self._decisions[: int(request.query["n"])]
        return web.json_response(wire.to_json({"decisions": shown, "advice": []}), status=self._status)

    async def serve(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_get("/pool/explain", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def state(*urls: str) -> State:
    replicas = tuple(ReplicaAddress(f"chat-{n}", url, url, url, "/kv.sock") for n, url in enumerate(urls))
    return State(1, 0.0, "/folder", "pool.yaml", PoolIdentity("default", "chat", "uid", 1, {}), replicas, "secret")


async def test_shows_the_last_decisions_of_all_replicas_newest_first() -> None:
    one, first = await Control([dataclasses.replace(DECISION, request_id="new", time=300.0), DECISION]).serve()
    two, second = await Control([dataclasses.replace(DECISION, request_id="mid", time=200.0)]).serve()
    broken, third = await Control([], status=500).serve()
    try:
        found = await last_decisions(state(first, second, third), 2)
    finally:
        for runner in (one, two, broken):
            await runner.cleanup()
    assert [each.request_id for each in found] == ["new", "mid"]


async def test_a_pool_of_which_no_sidecar_answers_is_told() -> None:
    runner, url = await Control([], status=401).serve()
    try:
        with pytest.raises(NotRunning, match=r"no sidecar of pool chat answers: .* answered 401"):
            await last_decisions(state(url), 5)
    finally:
        await runner.cleanup()


def test_the_table_names_the_line_that_decides(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(POOL)
    console = Console(file=io.StringIO(), width=200)
    console.print(table([DECISION], PoolLines(tmp_path / "pool.yaml")))
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "pool.yaml:15 batchingWindow: 200ms" in said
    assert "512" in said


def test_its_lines_are_a_trace_that_replay_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(to_lines([dataclasses.replace(DECISION, time=101.0), DECISION]) + "\n")
    file = trace_file(path)
    assert file.format is TraceFormat.EXPLAIN
    assert [each.at for each in file.read(16).requests] == [0.0, 1.0]
