"""The codec of the messages: what is written reads back, what does not fit is refused with its path."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheaware_api import wire
from cacheaware_api.testing import views

counts = st.integers(0, 2**53)
texts = st.text(max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | counts | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
st.register_type_strategy(int, counts)
st.register_type_strategy(float, floats)

revisions = st.builds(wire.Revision, pool_uid=texts, number=counts)


@st.composite
def tier_quotas(draw: st.DrawFn) -> wire.TierQuota:
    nominal = draw(counts)
    return wire.TierQuota(
        name=draw(texts),
        priority=draw(st.integers(-(2**31), 2**31)),
        weight=draw(st.integers(1, 1000)),
        nominal=nominal,
        effective=draw(counts),
        limit=draw(st.integers(nominal, 2**54)),
        lending=draw(st.integers(0, nominal)),
        retention_s=draw(st.none() | st.floats(0, 1e9)),
        time_per_output_token_s=draw(st.none() | st.floats(0, 1e9)),
    )


quotas = st.builds(
    wire.Quotas,
    revision=revisions,
    tiers=st.lists(tier_quotas(), max_size=4, unique_by=lambda tier: tier.name).map(tuple),
    public=counts,
)
prefixes = st.one_of(
    st.builds(wire.PublicPrefix, name=texts, text=texts),
    st.builds(
        wire.PublicPrefix,
        name=texts,
        text=st.none(),
        messages=st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=3).map(tuple),
    ),
)
ledgers = st.builds(wire.Ledger, revision=st.none() | revisions)
conditions = st.builds(wire.Condition)
statuses = st.builds(
    wire.PoolStatus,
    applied=st.none() | revisions,
    ledger=st.none() | ledgers,
    conditions=st.lists(conditions, max_size=3).map(tuple),
)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
api_keys = st.builds(wire.ApiKey, sha256=digests)
gateways = st.builds(wire.GatewaySecret, sha256=digests)

MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    wire.Quotas: quotas,
    wire.PublicPrefixes: st.builds(wire.PublicPrefixes, prefixes=st.lists(prefixes, max_size=3).map(tuple)),
    wire.Ledger: ledgers,
    wire.Hints: st.builds(
        wire.Hints,
        groups=st.dictionaries(
            st.text(max_size=8),
            st.builds(wire.GroupHint, expected_blocks=st.integers(0, 10**6), ttl_s=st.floats(0, 10**6)),
            max_size=3,
        ),
    ),
    wire.StepReport: st.builds(wire.StepReport),
    wire.View: views(),
    wire.PoolStatus: statuses,
    wire.Decision: st.builds(wire.Decision),
    wire.Foreseen: st.builds(wire.Foreseen),
    wire.ApiKeys: st.builds(
        wire.ApiKeys,
        keys=st.lists(api_keys, max_size=3).map(tuple),
        gateways=st.lists(gateways, max_size=3).map(tuple),
    ),
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])  # large messages on a busy machine
@given(data=st.data())
def test_a_message_reads_back_as_it_was_written(message: type, data: st.DataObject) -> None:
    value = data.draw(MESSAGES[message])
    text = json.dumps(wire.to_json(value), allow_nan=False)
    assert wire.from_json(message, json.loads(text)) == value


def test_every_message_is_part_of_the_round_trips() -> None:
    """A new message that nothing above contains would otherwise go untested."""
    reached: set[type] = set()
    waiting: list[Any] = list(MESSAGES)
    while waiting:
        each = waiting.pop()
        if dataclasses.is_dataclass(each) and each not in reached:
            reached.add(each)  # type: ignore[arg-type]  # the dataclass itself, not an instance
            waiting += wire._hints(each).values()  # type: ignore[arg-type]  # as above
        waiting += getattr(each, "__args__", ())
    defined = {
        each for _, each in inspect.getmembers(wire, dataclasses.is_dataclass) if each.__module__ == wire.__name__
    }
    assert defined == reached


def test_absent_optional_fields_are_left_out_and_unknown_ones_ignored() -> None:
    condition = wire.to_json(wire.Revision("uid", 1))
    assert wire.from_json(wire.Revision, condition | {"later": True}) == wire.Revision("uid", 1)
    prefix = wire.PublicPrefix("name", text="text")
    assert wire.to_json(prefix) == {"name": "name", "text": "text"}


def test_spec_fields_are_written_as_the_spec_writes_them() -> None:
    written = wire.to_json(wire.ViewQuota(30, 20, None))
    assert written == {"nominalPercent": 30, "borrowingLimitPercent": 20}
    assert "hit_tokens_total" in {field.name for field in dataclasses.fields(wire.TierLedger)}


QUOTAS = {
    "revision": {"pool_uid": "uid", "number": 1},
    "tiers": [
        {"name": "a", "priority": 0, "weight": 1, "nominal": 5, "effective": 5, "limit": 9, "lending": 5},
    ],
    "public": 0,
}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        pytest.param("revision", None, "revision: is missing", id="null is missing"),
        pytest.param("revision.number", "1", "revision.number: expected an integer, got '1'", id="text for a number"),
        pytest.param("revision.number", True, "revision.number: expected an integer, got True", id="true for a number"),
        pytest.param("revision.number", -1, "revision.number: must be at least 0, got -1", id="negative"),
        pytest.param("revision.number", 1.5, "revision.number: expected an integer, got 1.5", id="fraction"),
        pytest.param("revision", [], "revision: expected an object, got list", id="list for an object"),
        pytest.param("tiers", {}, "tiers: expected a list, got dict", id="object for a list"),
        pytest.param("tiers", "ab", "tiers: expected a list, got 'ab'", id="text for a list"),
        pytest.param("tiers.0", None, "tiers[0]: expected an object, got NoneType", id="null in a list"),
        pytest.param("tiers.0.name", 5, "tiers[0].name: expected a string, got 5", id="number for text"),
        pytest.param("tiers.0.lending", 6, "tiers[0].lending: must not exceed nominal (5), got 6", id="lends too much"),
        pytest.param(
            "tiers.0.limit", 4, "tiers[0].limit: must not be below nominal (5), got 4", id="limit below nominal"
        ),
        pytest.param("tiers.0.weight", 0, "tiers[0].weight: must be at least 1, got 0", id="no weight"),
        pytest.param(
            "tiers.0.retention_s", float("nan"), "tiers[0].retention_s: must be at least 0, got nan", id="not a number"
        ),
        pytest.param("public", -1, "public: must be at least 0, got -1", id="negative share"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(path: str, value: Any, said: str) -> None:
    message = json.loads(json.dumps(QUOTAS))
    place: Any = message
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    place[last] = value
    with pytest.raises(wire.WireError) as caught:
        wire.from_json(wire.Quotas, message)
    assert str(caught.value) == said


def test_two_tiers_of_one_name_are_refused() -> None:
    tiers = [*QUOTAS["tiers"], *QUOTAS["tiers"]]  # type: ignore[misc]  # the literal's type is object
    with pytest.raises(wire.WireError, match="tiers: names must be unique"):
        wire.from_json(wire.Quotas, QUOTAS | {"tiers": tiers})


@pytest.mark.parametrize(
    ("message", "data", "said"),
    [
        (wire.PublicPrefix, {"name": "a"}, "exactly one of text and messages"),
        (wire.PublicPrefix, {"name": "a", "text": "x", "messages": []}, "exactly one of text and messages"),
        (wire.ViewIdentity, {"type": "Nobody"}, "type: expected one of Open, APIKeys, TrustedHeaders, got 'Nobody'"),
        (wire.Condition, {"type": "a", "status": "Yes", "reason": "b"}, "status: expected one of True, False, Unknown"),
        (wire.ApiKey, {"name": "a", "sha256": "00", "tenant": "t", "tiers": []}, "64 hexadecimal digits"),
        (wire.Ledger, "text", "message: expected an object, got 'text'"),
    ],
)
def test_other_messages_that_are_refused(message: type, data: Any, said: str) -> None:
    with pytest.raises(wire.WireError, match=said):
        wire.from_json(message, data)
