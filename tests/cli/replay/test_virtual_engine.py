"""The virtual engine: steps cost what the model says, leaps change nothing, and blocks are the pool's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware.replay.engine_cost import ENGINES, EngineCost, engine_cost
from cacheaware.replay.errors import ReplayError
from cacheaware.replay.policies import step_report
from cacheaware.replay.requests import Request
from cacheaware.replay.virtual_engine import Run, VirtualEngine
from cacheaware_api.wire import StepGroup
from cacheaware_engine.blocks import BlockPool

COST = EngineCost(1e-3, 2e-3, 1e-4, 1e-8, 1e-7, max_batched_tokens=64, max_sequences=8)
BLOCK = 4


class Bench:
    """An engine with its clock, and what came of every request."""

    def __init__(
        self, capacity: int, cost: EngineCost = COST, longest_leap: float = math.inf, *, shares_reads: bool = False
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(capacity, BLOCK, cost.max_sequences, clock=lambda: self.now)
        self.engine = VirtualEngine(self.pool, cost, lambda: self.now, shares_reads=shares_reads)
        self.longest_leap = longest_leap
        self.steps = 0
        self.first: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.refused: set[str] = set()
        self.runs: dict[str, Run] = {}

    def serve(self, requests: list[Request]) -> None:
        """Until all have ended; who comes during a step is submitted at its end."""
        coming = sorted(requests, key=lambda request: request.at)
        while coming or not self.engine.empty:
            if self.engine.empty and self.now < coming[0].at:
                self.now = coming[0].at
            self.engine.begin()
            while coming and coming[0].at <= self.now:
                request = coming.pop(0)
                if self.engine.submit(request, request.tier) is not None:
                    self.refused.add(request.id)
            horizon = min(self.now + self.longest_leap, coming[0].at if coming else math.inf)
            result = self.engine.start(horizon)
            if result is None:
                assert self.engine.ends is not None
                self.now = self.engine.ends
                result = self.engine.finish()
            self.steps += result.steps
            self.first |= {run.request.id: self.now for run in result.first_tokens}
            self.ended |= {run.request.id: self.now for run in result.finished}
            self.runs |= {run.request.id: run for run in result.finished}
            self.refused |= {run.request.id for run in result.refused}


def request(number: int, prompt: int, output: int, at: float = 0.0, family: int | None = None) -> Request:
    """Those of a family share as much as both have."""
    start = f"f{family}" if family is not None else f"r{number}"
    keys = tuple(f"{start}/{depth}".encode() for depth in range(prompt // BLOCK))
    return Request(f"r{number}", at, "gold", "t", prompt, output, keys)


class TestTime:
    def test_a_lone_prompt_takes_its_chunks_and_an_answer_its_steps(self) -> None:
        bench = Bench(capacity=100)
        bench.serve([request(0, prompt=100, output=3)])
        chunks = COST.step(64, 64 * 65 / 2, 0) + COST.step(36, 36 * 64 + 36 * 37 / 2, 0)
        assert bench.first["r0"] == pytest.approx(chunks)
        # The first token came with the prompt; two more steps read 101 and 102 tokens.
        assert bench.ended["r0"] - chunks == pytest.approx(COST.step(1, 0, 101) + COST.step(1, 0, 102))
        assert bench.steps == 4

    def test_a_cached_prefix_is_not_computed_again_but_for_the_last_token(self) -> None:
        bench = Bench(capacity=100)
        bench.serve([request(0, 40, 1, family=1), request(1, 40, 1, at=1.0, family=1)])
        assert bench.runs["r1"].cached_tokens == 36
        assert bench.ended["r1"] - 1.0 == pytest.approx(COST.step(4, 4 * 36 + 10, 0))

    def test_prompts_with_one_prefix_that_come_together_compute_it_once(self) -> None:
        bench = Bench(capacity=200)
        bench.serve([request(number, 120, 1, family=1) for number in range(4)])
        assert [bench.runs[f"r{number}"].cached_tokens for number in range(4)] == [0, 116, 116, 116]
        bench.pool.check_integrity()

    def test_the_weights_are_read_once_for_all(self) -> None:
        assert COST.step(10, 0, 0) == pytest.approx(3e-3)
        assert COST.step(40, 0, 0) == pytest.approx(5e-3)


requests = st.lists(
    st.builds(
        lambda prompt, output, at, family: (prompt, output, at / 100, family),
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(0, 200),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=12,
)


class TestLeaps:
    @settings(max_examples=60, deadline=None)
    @given(requests, st.integers(20, 60), st.booleans())
    def test_many_steps_at_once_are_the_same_as_one_by_one(
        self, shapes: list[tuple[int, int, float, int | None]], capacity: int, shares_reads: bool
    ) -> None:
        """With too little room too: then requests yield and are computed again."""
        stream = [request(number, *shape) for number, shape in enumerate(shapes)]
        leaping = Bench(capacity, shares_reads=shares_reads)
        stepping = Bench(capacity, longest_leap=0.0, shares_reads=shares_reads)
        leaping.serve(stream)
        stepping.serve(stream)
        assert leaping.steps == stepping.steps
        assert leaping.first == pytest.approx(stepping.first)
        assert leaping.ended == pytest.approx(stepping.ended)
        leaping.pool.check_integrity()

    @settings(max_examples=60, deadline=None)
    @given(requests, st.integers(8, 60))
    def test_every_request_ends_or_is_refused_and_everything_is_given_back(
        self, shapes: list[tuple[int, int, float, int | None]], capacity: int
    ) -> None:
        stream = [request(number, *shape) for number, shape in enumerate(shapes)]
        bench = Bench(capacity)
        bench.serve(stream)
        assert bench.ended.keys() | bench.refused == {each.id for each in stream}
        assert not bench.ended.keys() & bench.refused
        bench.pool.check_integrity()
        assert not bench.pool.running
        assert not bench.pool.waiting
        assert sum(tier.held for tier in bench.pool.ledger().tiers.values()) == 0
        for each in stream:
            if each.id in bench.runs:
                assert 1 <= bench.runs[each.id].generated <= each.output_tokens

    def test_a_leap_stops_where_the_world_has_something_to_say(self) -> None:
        bench = Bench(capacity=1000)
        bench.serve([request(0, 8, 500), request(1, 8, 1, at=0.5)])
        step = COST.step(1, 0, 508)
        assert 0.5 < bench.first["r1"] < 0.5 + step + 2 * COST.step(8, 36, 508)

    def test_an_engine_whose_steps_take_no_time_ends_all_at_once(self) -> None:
        bench = Bench(
            capacity=1000, cost=replace(COST, overhead=0.0, weights=0.0, token=0.0, attention=0.0, kv_read=0.0)
        )
        bench.serve([request(number, 20, 30, at=2.0) for number in range(5)])
        assert set(bench.ended.values()) == {2.0}


class TestSharedReads:
    """Prompts of 41 tokens, of which 40 are the ten blocks of their family and cached, and answers of their own."""

    READING = EngineCost(0.0, 0.0, 0.0, 0.0, 1e-3, max_batched_tokens=640, max_sequences=8)  # nothing else takes time

    def bench(self, families: Sequence[int], *, shares_reads: bool) -> Bench:
        bench = Bench(1000, self.READING, shares_reads=shares_reads)
        bench.serve([request(100 + family, 41, 1, family=family) for family in set(families)])
        return bench

    def seconds(self, families: Sequence[int], *, shares_reads: bool) -> float:
        """Of three tokens for each: two steps that read 42 and 43 tokens of every sequence."""
        bench = self.bench(families, shares_reads=shares_reads)
        bench.serve([request(number, 41, 3, 1.0, family) for number, family in enumerate(families)])
        (ended,) = {bench.ended[f"r{number}"] for number in range(len(families))}
        return ended - 1.0

    @pytest.mark.parametrize(
        ("families", "read"),
        [
            pytest.param((1,), 85, id="alone"),
            pytest.param((1, 2), 2 * 85, id="nothing shared"),
            pytest.param((1, 1, 1), 3 * 85 - 2 * 2 * 40, id="three on one prefix"),
            pytest.param((1, 1, 2, 2), 4 * 85 - 2 * 2 * 40, id="two groups"),
        ],
    )
    def test_a_prefix_is_read_once_for_its_group(self, families: tuple[int, ...], read: int) -> None:
        assert self.seconds(families, shares_reads=True) == pytest.approx(1e-3 * read)
        assert self.seconds(families, shares_reads=False) == pytest.approx(1e-3 * 85 * len(families))

    def test_the_report_tells_what_was_read_and_by_whom(self) -> None:
        bench = self.bench([1], shares_reads=True)
        for number in range(3):
            assert bench.engine.submit(request(number, 41, 9, family=1), "gold") is None
        for _ in ("prompts", "a decode"):
            bench.engine.begin()
            assert bench.engine.start(0.0) is None
            assert bench.engine.ends is not None
            bench.now = bench.engine.ends
            report = step_report(bench.engine.finish(), BLOCK, bytes_per_token=2)
        assert report.query_context == 3 * 42
        assert report.kv_bytes_read == report.unique_kv_bytes == 2 * (40 + 3 * 2)
        assert report.groups == (StepGroup(3, 40, cascade=True),)


class TestCosts:
    def test_known_engines_go_by_name(self) -> None:
        assert engine_cost("h200-8b") is ENGINES["h200-8b"]

    def test_others_come_from_a_file(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        path = tmp_path_factory.mktemp("engines") / "mine.yaml"
        path.write_text("{overhead: 0.001, weights: 0.002, token: 1.0e-4, attention: 0, kv_read: 0, max_sequences: 4}")
        assert engine_cost(str(path)) == EngineCost(0.001, 0.002, 1e-4, 0, 0, max_sequences=4)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            pytest.param("{overhead: 1}", "weights is missing", id="missing"),
            pytest.param("{overhead: fast}", "overhead must be seconds, got 'fast'", id="no number"),
            pytest.param("{speed: 1}", "unknown field 'speed'", id="unknown"),
            pytest.param("[1]", "expected a mapping", id="no mapping"),
            pytest.param("{overhead: [}", "not YAML", id="no YAML"),
        ],
    )
    def test_a_bad_file_is_told_by_field(self, tmp_path_factory: pytest.TempPathFactory, text: str, said: str) -> None:
        path = tmp_path_factory.mktemp("engines") / "mine.yaml"
        path.write_text(text)
        with pytest.raises(ReplayError, match=said):
            engine_cost(str(path))

    def test_a_name_that_is_none_is_told_what_there_is(self) -> None:
        with pytest.raises(ReplayError, match="choose one of h200-8b"):
            engine_cost("abacus")
