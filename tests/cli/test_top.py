"""`cacheaware top`: what is added up over replicas, what is shown of it, and what happens when nobody answers."""

from __future__ import annotations

import dataclasses
import io
import re
import tempfile
from pathlib import Path

import aiohttp
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cacheaware import top
from cacheaware.__main__ import app
from cacheaware.pool_status import NotRunning
from cacheaware.top_frame import PUBLIC, Answer, Frame, frame
from cacheaware.top_screen import screen
from cacheaware_api import wire
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import CONTROL_TOKEN, running_sidecar

GOLD = wire.TierLedger(
    nominal=500,
    effective=450,
    limit=1000,
    held=300,
    cached=300,
    lapsed=0,
    borrowed=100,
    lent=0,
    slots=wire.Slots(4, 3),
    evicted_total=0,
    reclaimed_total=40,
    preempted_total=2,
    hit_tokens_total=0,
    query_tokens_total=0,
)
BRONZE = dataclasses.replace(GOLD, nominal=300, effective=350, held=50, cached=150, borrowed=0, lent=100)


def status(
    *, reclaimed: int = 40, requests: int = 10, hit: float | None = 60.0, p95: float | None = 0.25
) -> wire.PoolStatus:
    gold = dataclasses.replace(GOLD, reclaimed_total=reclaimed)
    return wire.PoolStatus(
        applied=wire.Revision("pool-1", 3),
        capacity=1000,
        ledger=wire.Ledger(
            sequence=7,
            revision=wire.Revision("pool-1", 3),
            block_size=16,
            bytes_per_token=1024,
            capacity=1000,
            free=150,
            public=wire.PublicLedger(50, 20, 30, {}),
            tiers={"gold": gold, "bronze": BRONZE},
            running=5,
            waiting=1,
        ),
        tiers={
            "gold": wire.TierFigures(2, requests, hit, 0.1, p95, 97.0),
            "bronze": wire.TierFigures(7, 0),
        },
        enforcement=wire.Enforcement.ENGINE,
        conditions=(wire.Condition("IdentityEnforced", "False", "Open", "anyone may use any tier"),),
        key_algorithm="test",
    )


def shown(of: Frame, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(screen(of))
    return out.getvalue()


class TestFrame:
    def test_blocks_queues_and_requests_are_sums_over_replicas(self) -> None:
        found = frame("default/chat", [Answer("a", status()), Answer("b", status())], at=0.0)
        assert (found.capacity, found.free, found.queued, found.running, found.waiting) == (2000, 300, 18, 10, 2)
        gold = next(each for each in found.tiers if each.name == "gold")
        assert (gold.held, gold.cached, gold.nominal, gold.borrowed, gold.requests) == (600, 600, 1000, 200, 20)

    def test_a_hit_rate_is_weighed_by_requests_and_a_latency_is_the_slowest_replicas(self) -> None:
        busy, idle = status(requests=90, hit=80.0, p95=0.2), status(requests=10, hit=30.0, p95=4.0)
        found = frame("p", [Answer("a", busy), Answer("b", idle)], at=0.0)
        gold = next(each for each in found.tiers if each.name == "gold")
        assert (gold.hit_percent, gold.time_to_first_token_p95) == (75.0, 4.0)
        assert found.hit_percent == 75.0

    def test_what_was_not_seen_is_not_zero(self) -> None:
        bronze = next(each for each in frame("p", [Answer("a", status())], 0.0).tiers if each.name == "bronze")
        assert (bronze.hit_percent, bronze.time_to_first_token_p95, bronze.attainment_percent) == (None, None, None)

    def test_the_public_share_is_a_line_where_there_is_one(self) -> None:
        found = frame("p", [Answer("a", status())], 0.0)
        public = found.tiers[-1]
        assert (public.name, public.nominal, public.held, public.cached) == (PUBLIC, 50, 20, 30)

    def test_rates_need_two_frames_of_the_same_replicas(self) -> None:
        first = frame("p", [Answer("a", status(reclaimed=40))], at=10.0)
        assert first.tiers[0].reclaimed_a_second is None
        second = frame("p", [Answer("a", status(reclaimed=50))], at=14.0, previous=first)
        assert (second.tiers[0].reclaimed_a_second, second.tiers[0].preempted_a_second) == (2.5, 0.0)
        more = frame("p", [Answer("a", status()), Answer("b", status())], at=16.0, previous=second)
        assert more.tiers[0].reclaimed_a_second is None

    def test_an_engine_that_was_started_anew_has_no_negative_rate(self) -> None:
        first = frame("p", [Answer("a", status(reclaimed=40))], at=10.0)
        assert frame("p", [Answer("a", status(reclaimed=1))], 12.0, first).tiers[0].reclaimed_a_second is None

    def test_who_does_not_answer_and_what_is_not_true_is_told(self) -> None:
        found = frame("p", [Answer("a", status()), Answer("b", None, "it does not answer")], 0.0)
        assert (found.answered, found.capacity) == (1, 1000)
        assert found.problems() == [
            ("b", "it does not answer"),
            ("a", "IdentityEnforced=False (Open) anyone may use any tier"),
        ]


class TestScreen:
    def test_it_shows_what_the_frame_says(self) -> None:
        before = frame("default/chat", [Answer("chat-0", status(reclaimed=30))], at=0.0)
        text = shown(frame("default/chat", [Answer("chat-0", status())], at=4.0, previous=before))
        lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
        assert lines == [
            "default/chat 1 of 1 replicas 850 of 1,000 KV blocks used (85 %) hit 60 %",
            "9 queued 5 running, 1 waiting in the engine",
            "",
            "TIER QUEUE RUN REQ/5M BLOCKS HELD CACHED NOMINAL EFFECT BORROW LENT RECL/S PREE/S HIT TTFT P50 P95 SLA",
            "gold 2 3 10 ████████████▒▒▒▒▒▒▒▒|▒▒▒ 300 300 500 450 100 0 2.5 0 60 % 100 ms 250 ms 97 %",
            "bronze 7 3 0 ██▒▒▒▒▒▒····|··········· 50 150 300 350 0 100 0 0 - - - -",
            "(public) █▒|····················· 20 30 50 50 0 0 0 0 - - - -",
            "",
            "█ held ▒ cached | nominal; beyond it: borrowed. TTFT of the slowest replica.",
            "",
            "chat-0 IdentityEnforced=False (Open) anyone may use any tier",
        ]

    def test_before_anybody_answers_there_is_still_something_to_see(self) -> None:
        text = shown(frame("default/chat", [Answer("chat-0", None, "it does not answer")], at=0.0))
        assert "0 of 1 replicas" in text
        assert "KV blocks not known yet" in text
        assert "it does not answer" in text

    def test_a_terminal_of_eighty_columns_has_every_figure(self) -> None:
        before = frame("default/chat", [Answer("chat-0", status(reclaimed=30))], at=0.0)
        text = shown(frame("default/chat", [Answer("chat-0", status())], at=4.0, previous=before), 80)
        lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
        assert lines[:12] == [
            "default/chat 1 of 1 replicas 850 of 1,000 KV blocks used (85 %) hit 60 %",
            "9 queued 5 running, 1 waiting in the engine",
            "",
            "TIER QUEUE RUN REQ/5M HIT TTFT P50 P95 SLA RECL/S PREE/S",
            "gold 2 3 10 60 % 100 ms 250 ms 97 % 2.5 0",
            "bronze 7 3 0 - - - - 0 0",
            "(public) - - - - 0 0",
            "",
            "TIER BLOCKS HELD CACHED NOMINAL EFFECT BORROW LENT",
            "gold ████████████▒▒▒▒▒▒▒▒|▒▒▒ 300 300 500 450 100 0",
            "bronze ██▒▒▒▒▒▒····|··········· 50 150 300 350 0 100",
            "(public) █▒|····················· 20 30 50 50 0 0",
        ]
        assert "…" not in text

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_no_width_breaks_it(self, width: int) -> None:
        assert all(len(line) <= width for line in shown(frame("p", [Answer("a", status())], 0.0), width).splitlines())


class TestAsking:
    async def test_a_real_sidecar(self) -> None:
        with tempfile.TemporaryDirectory(prefix="ca-") as name:
            async with (
                StubEngine(Path(name) / "kv.sock") as engine,
                running_sidecar(engine, Path(name)) as sidecar,
                aiohttp.ClientSession() as session,
            ):
                found = await top.once(top.from_url(sidecar.control_url, CONTROL_TOKEN), session)
                assert [each.name for each in found.tiers] == ["gold", "bronze"]
                assert found.capacity == engine.capacity
                refused = await top.once(top.from_url(sidecar.control_url, "wrong"), session)
                assert (refused.answered, refused.answers[0].status) == (0, None)
                assert "401" in refused.answers[0].problem

    async def test_nobody_there(self) -> None:
        out = io.StringIO()
        answered = await top.print_once(top.from_url("http://127.0.0.1:1", "t"), Console(file=out, width=120))
        assert not answered
        assert "does not answer" in out.getvalue()

    async def test_it_ends_when_the_pool_does(self) -> None:
        asked = 0

        def replicas() -> list[top.Replica]:
            nonlocal asked
            asked += 1
            if asked == 3:
                raise NotRunning("pool default/chat does not run here")
            return [top.Replica("chat-0", "http://127.0.0.1:1", "t")]

        with pytest.raises(NotRunning):
            await top.watch(top.Source("default/chat", replicas), Console(file=io.StringIO()), interval=0.001)


class TestCommand:
    def test_a_url_needs_a_token(self, environment: dict[str, str]) -> None:
        result = CliRunner(env=environment).invoke(app, ["top", "--url", "http://127.0.0.1:1"])
        assert (result.exit_code, "--token" in result.output) == (2, True)

    def test_no_pool_is_1_and_says_how_to_start_one(self, environment: dict[str, str]) -> None:
        result = CliRunner(env=environment).invoke(app, ["top", "--once"])
        assert result.exit_code == 1
        assert "cacheaware up -f FILE" in result.output

    def test_nobody_at_the_url_is_1(self, environment: dict[str, str]) -> None:
        result = CliRunner(env={**environment, "CACHEAWARE_TOKEN": "t"}).invoke(
            app, ["top", "--once", "--url", "http://127.0.0.1:1"]
        )
        assert (result.exit_code, "does not answer" in result.output) == (1, True)
