"""`cacheaware replay` as a user meets it: what it prints and leaves, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheaware.__main__ import app

POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: chat}
spec:
  model: {name: tiny, source: "file:///models/tiny"}
  engine: {type: Torch}
  tiers:
  - {name: gold, weight: 4, quota: {nominalPercent: 50}, sla: {timeToFirstToken: 2s}}
  - {name: bronze, quota: {nominalPercent: 30}}
  defaultTier: bronze
  identity: {type: Open}
  rebalancing: {mode: Auto}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pool.yaml").write_text(POOL)
    rows = [
        {"timestamp": 500 * n, "input_length": 1600, "output_length": 9, "hash_ids": [0, 1 + n % 3, 10 + n, 100 + n]}
        for n in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def replay(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


class TestOneRun:
    def test_compares_all_baselines_and_leaves_figures_and_a_picture(self, folder: Path) -> None:
        code, said = replay("chat.jsonl", "@templated", "-f", "pool.yaml", "--tier", "chat=gold",
                            "--capacity", "20k", "--seconds", "30", "--arrivals", "1")  # fmt: skip
        assert code == 0, said
        for name in ("cacheaware", "fcfs-lru", "lpm-lru", "static-quota", "best-static", "belady", "endless cache"):
            assert name in said
        found = json.loads((folder / "replay-out" / "replay.json").read_text())
        assert [each["policy"] for each in found["policies"]] == [
            "cacheaware", "fcfs-lru", "lpm-lru", "static-quota", "best-static",
        ]  # fmt: skip
        assert found["limits"]["beladyHitPercent"] <= found["limits"]["infiniteHitPercent"]
        ours = found["policies"][0]
        assert ours["tiers"]["gold"]["requests"] >= 40
        assert ours["prefillAmplification"] >= 1
        assert (folder / "replay-out" / "replay.png").read_bytes().startswith(b"\x89PNG")

    def test_the_same_seed_gives_the_same_figures(self, folder: Path) -> None:
        wanted = ("@templated", "-f", "pool.yaml", "--capacity", "20k", "--seconds", "20", "--baseline", "fcfs-lru")
        for name, seed in (("one", "1"), ("two", "1"), ("three", "2")):
            assert replay(*wanted, "--seed", seed, "--out", name)[0] == 0
        one, two, three = (json.loads((folder / name / "replay.json").read_text()) for name in ("one", "two", "three"))
        assert one == two
        assert one["policies"] != three["policies"]

    def test_only_the_beginning_of_a_trace_where_asked(self, folder: Path) -> None:
        assert (
            replay("chat.jsonl", "-f", "pool.yaml", "--capacity", "20k", "--until", "5", "--baseline", "belady")[0] == 0
        )
        found = json.loads((folder / "replay-out" / "replay.json").read_text())
        assert found["policies"][0]["all"]["requests"] == 10


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            pytest.param(("nothing.jsonl",), "nothing.jsonl: there is no such file", id="no file"),
            pytest.param(("pool.yaml",), "not a trace that can be read", id="no trace"),
            pytest.param(("@rush",), "there is no such workload; known are @templated", id="no workload"),
            pytest.param(("chat.jsonl", "--tier", "chat=silver"), "the pool's tiers are", id="no such tier"),
            pytest.param(("chat.jsonl", "--tier", "chats=gold"), "there is no trace 'chats'; there are", id="no name"),
            pytest.param(("chat.jsonl", "--tier", "gold"), "write TRACE=TIER", id="no pair"),
            pytest.param(("chat.jsonl", "--capacity", "lots"), "--capacity 'lots': give the tokens", id="capacity"),
            pytest.param(("chat.jsonl", "--capacity", "100"), "less than a block of 512 tokens", id="no block"),
            pytest.param(("chat.jsonl", "--block-size", "100"), "choose a multiple of 512", id="block size"),
            pytest.param(("chat.jsonl", "--engine", "steam"), "there is no engine and no file 'steam'", id="engine"),
            pytest.param(("chat.jsonl", "--rate", "0"), "--rate must be above 0", id="rate"),
            pytest.param(("@templated", "--seconds", "0"), "rate and seconds must be above 0", id="seconds"),
            pytest.param(("chat.jsonl", "chat.jsonl"), "two traces are called chat", id="twice"),
        ],
    )
    def test_is_told_with_what_to_do_and_nothing_runs(
        self, folder: Path, arguments: tuple[str, ...], said: str
    ) -> None:
        given = arguments if "--capacity" in arguments else (*arguments, "--capacity", "20k")
        code, output = replay(*given, "-f", "pool.yaml")
        assert code == 1
        assert said in output
        assert not (folder / "replay-out").exists()

    def test_a_bad_pool_file_is_told_as_validate_tells_it(self, folder: Path) -> None:
        (folder / "pool.yaml").write_text(POOL.replace("nominalPercent: 50", "nominalPercent: 90"))
        code, output = replay("chat.jsonl", "-f", "pool.yaml", "--capacity", "20k")
        assert code == 1
        assert "the pool file is not valid" in output
        assert "pool.yaml" in output

    def test_a_trace_that_nobody_serves_is_named(self, folder: Path) -> None:
        (folder / "pool.yaml").write_text(POOL.replace("  defaultTier: bronze\n", ""))
        code, output = replay("chat.jsonl", "-f", "pool.yaml", "--capacity", "20k")
        assert code == 1
        assert "chat: which tier serves it? Map it with --tier chat=TIER" in output


def test_help_teaches_by_example() -> None:
    code, output = replay("--help")
    assert code == 0
    assert "No GPU, no cluster" in output
    assert "--baseline" in output
