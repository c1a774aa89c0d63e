"""Every format is known by what a file contains, and read into the same terms."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest

from cacheaware.replay.errors import ReplayError
from cacheaware.replay.trace import Trace
from cacheaware.replay.trace_formats import TYPICAL_OUTPUT, TraceFormat, trace_file
from cacheaware_api import wire

SHARED = Path(os.environ.get("CACHEAWARE_SHARED", "../shared"))

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1600, "output_length": 20, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 0, "input_length": 1100, "output_length": 0, "hash_ids": [0, 1, 9]},
]
SESSION = {
    "id": "s1",
    "block_size": 64,
    "requests": [
        {"t": 0.0, "type": "n", "in": 200, "out": 5, "hash_ids": [7, 8, 9]},
        {
            "type": "subagent",
            "t": 4.0,
            "requests": [{"t": 1.0, "type": "s", "in": 130, "out": 6, "hash_ids": [7, 8]}],
        },
    ],
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0,110,27\n"


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, block_size: int, seed: int = 0) -> Trace:
    return trace_file(path).read(block_size, seed)


class TestMooncake:
    def test_has_the_full_blocks_of_each_prompt_in_the_order_of_arrival(self, tmp_path: Path) -> None:
        trace = read(lines(tmp_path / "chat.trace.jsonl", *MOONCAKE), 512)
        assert trace.name == "chat"
        assert [(each.at, each.prompt_tokens, each.output_tokens, each.blocks) for each in trace.requests] == [
            (0.0, 1100, 1, (0, 1)),
            (3.0, 1600, 20, (0, 1, 2)),
        ]

    def test_joined_blocks_are_known_by_their_last_part(self, tmp_path: Path) -> None:
        trace = read(lines(tmp_path / "chat.jsonl", *MOONCAKE), 1024)
        assert [each.blocks for each in trace.requests] == [(1,), (1,)]

    def test_blocks_can_not_be_split(self, tmp_path: Path) -> None:
        with pytest.raises(ReplayError, match=r"--block-size 16: .* choose a multiple of 512"):
            read(lines(tmp_path / "chat.jsonl", *MOONCAKE), 16)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            pytest.param({"input_length": -1}, r":2: input_length must be a number of at least 1, got -1", id="length"),
            pytest.param({"timestamp": "soon"}, r":2: timestamp must be a number", id="time"),
            pytest.param({"hash_ids": [1]}, r":2: 1600 tokens are 3 full blocks, hash_ids has 1", id="too few blocks"),
            pytest.param({"hash_ids": "1 2"}, r":2: hash_ids must be a list of numbers", id="no list"),
        ],
    )
    def test_a_bad_row_is_named_by_its_line(self, tmp_path: Path, change: dict[str, object], said: str) -> None:
        path = lines(tmp_path / "chat.jsonl", MOONCAKE[1], MOONCAKE[0] | change)
        with pytest.raises(ReplayError, match=said):
            read(path, 512)


class TestWeka:
    def test_sub_agents_start_behind_their_parent_and_share_its_blocks(self, tmp_path: Path) -> None:
        path = tmp_path / "s1.json"
        path.write_text(json.dumps(SESSION))
        first, second = read(path, 64).requests
        assert second.at - first.at == pytest.approx(5.0)
        assert len(first.blocks) == 3
        assert second.blocks == first.blocks[:2]
        assert first.tenant == "s1"

    def test_sessions_of_an_archive_or_a_folder_share_nothing(self, tmp_path: Path) -> None:
        folder = tmp_path / "sessions"
        folder.mkdir()
        for name in ("a", "b"):
            (folder / f"{name}.json").write_text(json.dumps(SESSION | {"id": name}))
        with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as archive:
            archive.add(folder, "sessions")
        from_folder, from_archive = read(folder, 64), read(tmp_path / "all.tar.xz", 64)
        for trace in (from_folder, from_archive):
            used = {name: {b for r in trace.requests if r.tenant == name for b in r.blocks} for name in ("a", "b")}
            assert len(used["a"]) == len(used["b"]) == 3
            assert not used["a"] & used["b"]
        assert any("--seed" in note for note in from_folder.notes)

    def test_sessions_start_as_the_seed_says(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.json").write_text(json.dumps(SESSION | {"id": name}))
        assert read(tmp_path, 64, seed=1).requests == read(tmp_path, 64, seed=1).requests
        assert read(tmp_path, 64, seed=1).requests != read(tmp_path, 64, seed=2).requests


class TestAzure:
    def test_has_times_and_lengths_and_nothing_shared(self, tmp_path: Path) -> None:
        path = tmp_path / "azure.csv"
        path.write_text(AZURE)
        first, second = read(path, 16).requests
        assert second.at - first.at == pytest.approx(1.02004, abs=1e-4)
        assert (first.prompt_tokens, first.output_tokens, len(first.blocks)) == (4808, 10, 300)
        assert not set(first.blocks) & set(second.blocks)

    def test_a_time_that_is_none_is_named_by_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "azure.csv"
        path.write_text(AZURE + "yesterday,1,1\n")
        with pytest.raises(ReplayError, match=r":4: TIMESTAMP 'yesterday' is no time"):
            read(path, 16)


class TestExplainLog:
    DECISIONS = (
        wire.Decision("a", 100.0, "gold", 1.0, 0.0, "idle", "answered", "g", prompt_tokens=64, hit_tokens=32),
        wire.Decision("b", 101.0, "gold", 1.0, 0.0, "idle", "answered", "g", prompt_tokens=48, hit_tokens=40),
        wire.Decision("c", 102.0, "gold", 1.0, 0.0, "idle", "answered", "h", prompt_tokens=48, hit_tokens=40),
        wire.Decision("d", 103.0, "gold", 1.0, 0.0, "idle", "rejected"),
    )

    def answer(self) -> dict[str, object]:
        """As a sidecar's control side gives it, the newest first."""
        return {"decisions": [wire.to_json(each) for each in reversed(self.DECISIONS)], "advice": []}

    @pytest.mark.parametrize("indent", [pytest.param(None, id="as it came"), pytest.param(2, id="made readable")])
    def test_what_was_cached_is_taken_as_a_common_beginning(self, tmp_path: Path, indent: int | None) -> None:
        (tmp_path / "explain.json").write_text(json.dumps(self.answer(), indent=indent))
        trace = read(tmp_path / "explain.json", 16)
        third, second, first = sorted(trace.requests, key=lambda each: -each.at)
        assert (first.at, first.tier, first.output_tokens) == (0.0, "gold", TYPICAL_OUTPUT)
        assert [len(each.blocks) for each in (first, second, third)] == [4, 3, 3]
        assert first.blocks[:2] == second.blocks[:2]
        assert not set(first.blocks[2:]) & set(second.blocks)
        assert not set(first.blocks) & set(third.blocks)
        assert any("1 requests" in note for note in trace.notes)

    def test_may_be_a_decision_on_each_line_as_collected_over_time(self, tmp_path: Path) -> None:
        path = lines(tmp_path / "explain.jsonl", *(wire.to_json(each) for each in self.DECISIONS))
        assert [each.at for each in read(path, 16).requests] == [0.0, 1.0, 2.0]

    def test_a_decision_that_is_none_is_named(self, tmp_path: Path) -> None:
        answer = {"decisions": [{"requestId": "a", "tier": "gold"}]}
        (tmp_path / "explain.json").write_text(json.dumps(answer))
        with pytest.raises(ReplayError, match=r"decisions\[0\]: no decision of a sidecar"):
            read(tmp_path / "explain.json", 16)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("hello\n", id="text"),
        pytest.param('{"a": 1}\n', id="other JSON"),
        pytest.param("", id="empty"),
        pytest.param("a,b\n1,2\n", id="other CSV"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_what_is_known(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(ReplayError, match=r"not a trace that can be read. Known are Mooncake's"):
        trace_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="there is no such file"):
        trace_file(tmp_path / "missing")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no traces: {SHARED} is missing (CACHEAWARE_SHARED)")
@pytest.mark.parametrize(
    ("path", "kind", "requests", "tokens"),
    [
        pytest.param("mooncake/conversation_trace.jsonl", TraceFormat.MOONCAKE, 12031, 12035, id="mooncake"),
        pytest.param("azure2023/AzureLLMInferenceTrace_conv.csv", TraceFormat.AZURE, 19366, 1155, id="azure"),
    ],
)
def test_public_traces_have_what_their_publishers_say(path: str, kind: TraceFormat, requests: int, tokens: int) -> None:
    file = trace_file(SHARED / "traces" / path)
    trace = file.read(512)
    assert file.format is kind
    assert len(trace.requests) == requests
    assert trace.prompt_tokens / requests == pytest.approx(tokens, rel=1e-3)
