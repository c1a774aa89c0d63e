"""Events are found by their blank line, wherever the network cut the stream, and no byte is changed."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_sidecar.metering import Meter, Usage, usage_from
from cacheaware_sidecar.sse import Event, EventParser, EventTooLarge
from cacheaware_sidecar.testing import Behaviour, stream_events

HOW = Behaviour(words=("Grüße", " 🙂", " 你好", ' "quoted\\" {', "."))
RECORDED = b"".join(stream_events("/v1/chat/completions", HOW, with_usage=True))


def cut(stream: bytes, *offsets: int) -> list[bytes]:
    edges = [0, *offsets, len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def parsed(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    assert b"".join(event.raw for event in events) + parser.rest == b"".join(pieces)
    return events


WHOLE = parsed([RECORDED])


@pytest.mark.parametrize(
    "line_end", [pytest.param(b"\n", id="LF"), pytest.param(b"\r\n", id="CRLF"), pytest.param(b"\r", id="CR")]
)
def test_a_stream_cut_at_any_byte_has_the_same_events(line_end: bytes) -> None:
    stream = RECORDED.replace(b"\n", line_end)
    expected = [event.data for event in WHOLE]
    for offset in range(len(stream) + 1):
        assert [event.data for event in parsed(cut(stream, offset))] == expected, offset


def test_a_stream_fed_byte_by_byte_has_the_same_events() -> None:
    assert parsed([bytes([byte]) for byte in RECORDED]) == WHOLE


def test_two_events_glued_together_are_two() -> None:
    assert [event.data for event in parsed([b"data: 1\n\ndata: 2\n\n"])] == [b"1", b"2"]


def test_crlf_cut_between_its_bytes_is_one_line_end() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\r\n\r") == []
    assert [event.raw for event in parser.feed(b"\ndata: 2\r\n\r\n")] == [b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"]


@settings(deadline=None)  # other processes share the cores
@given(st.lists(st.sampled_from([b"data: x", b": c", b"\r", b"\n", b"\r\n", b"\xf0\x9f", b"id: 1"])), st.data())
def test_no_cut_changes_what_is_found(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    offsets = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    assert parsed(cut(stream, *offsets)) == parsed([stream])


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        pytest.param(b"data: 1\n\n", b"1", id="one line"),
        pytest.param(b"data:1\n\n", b"1", id="no space"),
        pytest.param(b"data:  1\n\n", b" 1", id="only one space goes"),
        pytest.param(b"data: 1\ndata: 2\n\n", b"1\n2", id="two lines"),
        pytest.param(b"event: x\nid: 3\ndata: 1\n\n", b"1", id="among other fields"),
        pytest.param(b": ping\n\n", None, id="comment"),
        pytest.param(b"database: 1\n\n", None, id="another field"),
    ],
)
def test_data_is_what_the_data_lines_say(raw: bytes, data: bytes | None) -> None:
    assert Event(raw).data == data


PIECES = st.lists(st.sampled_from([b"data: ", b"data:", b"{}", b"\n", b"\n\n", b"\r", b": c", b"\xf0"])).map(b"".join)


@settings(deadline=None)  # other processes share the cores
@given(PIECES, PIECES)
def test_the_short_way_says_what_feeding_says_or_nothing(before: bytes, piece: bytes) -> None:
    short, fed = EventParser(), EventParser()
    short.feed(before)
    fed.feed(before)
    said = short.said(piece)
    if said is not None:
        assert [(event.raw, event.data) for event in fed.feed(piece)] == [(piece, said)]
        assert fed.rest == short.rest == b""


def test_a_token_goes_the_short_way() -> None:
    assert EventParser().said(b"data: {}\n\n") == b"{}"


def test_what_never_ends_does_not_fill_the_memory() -> None:
    parser = EventParser(max_event_bytes=100)
    with pytest.raises(EventTooLarge):
        parser.feed(b"x" * 101)


class TestMetering:
    def test_the_engines_usage_counts(self) -> None:
        meter = Meter()
        only_usage = [meter.observe(event, now=float(number)) for number, event in enumerate(WHOLE)]
        assert only_usage == [False] * 5 + [True, False]
        assert meter.usage == Usage(prompt_tokens=100, output_tokens=5, cached_tokens=64)
        assert (meter.first_token_at, meter.last_token_at, meter.done) == (0.0, 4.0, True)
        assert meter.time_per_output_token() == 1.0

    def test_events_stand_in_for_tokens_where_a_stream_ends_without_usage(self) -> None:
        meter = Meter()
        for number, event in enumerate(WHOLE[:3]):
            meter.observe(event, now=float(number))
        assert (meter.usage, meter.output_tokens) == (None, 3)
        assert meter.time_per_output_token() is None  # guessed tokens have no pace

    def test_usage_beside_output_is_no_chunk_of_its_own(self) -> None:
        meter = Meter()
        chunk = {"choices": [{"index": 0, "text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        assert meter.observe(Event(b"data: " + json.dumps(chunk).encode() + b"\n\n"), now=0.0) is False
        assert meter.usage == Usage(1, 1)

    @pytest.mark.parametrize("value", ["null", " null", "{}", ' {"prompt_tokens": null}'])
    def test_a_usage_that_is_said_to_be_none_is_none(self, value: str) -> None:
        meter = Meter()
        chunk = f'{{"choices": [], "usage":{value}}}'.encode()
        assert meter.observe_data(chunk, now=0.0) is False
        assert (meter.usage, meter.outputs) == (None, 1)

    def test_half_of_a_surrogate_pair_hides_no_usage(self) -> None:
        said = b'{"choices": %s, "x": "\\ud83d", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}'
        whole, chunk, output = Meter(), Meter(), Meter()
        whole.observe_body(said % b"[{}]", now=1.0)
        assert chunk.observe_data(said % b"[ ]", now=1.0) is True
        assert output.observe_data(said % b"[{}]", now=1.0) is False
        assert whole.usage == chunk.usage == output.usage == Usage(1, 2)

    def test_an_output_that_talks_about_usage_is_output(self) -> None:
        meter = Meter()
        chunk = {"choices": [{"index": 0, "text": '"usage"'}]}
        assert meter.observe(Event(b"data: " + json.dumps(chunk).encode() + b"\n\n"), now=0.0) is False
        assert (meter.usage, meter.outputs) == (None, 1)

    def test_a_comment_is_no_first_token(self) -> None:
        meter = Meter()
        meter.observe(Event(b": keep-alive\n\n"), now=1.0)
        assert meter.first_token_at is None

    def test_an_error_event_is_seen(self) -> None:
        meter = Meter()
        meter.observe(Event(b'data: {"error": {"message": "out of memory"}}\n\n'), now=1.0)
        assert (meter.error, meter.first_token_at) == (True, None)

    @pytest.mark.parametrize(
        "value", [None, 7, [], {}, {"prompt_tokens": "many"}, {"prompt_tokens": -1}, {"prompt_tokens": True}]
    )
    def test_a_usage_that_is_none_counts_nothing(self, value: object) -> None:
        assert usage_from(value) is None

    def test_an_answer_that_is_no_json_counts_nothing(self) -> None:
        meter = Meter()
        meter.observe_body(b"<html>", now=1.0)
        assert meter.usage is None
