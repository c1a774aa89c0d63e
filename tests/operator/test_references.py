"""From a pool object and what it refers to, to what is wanted, or to what its author has to do."""

import base64
import json
from typing import Any

import pytest

from cacheaware_api.conditions import Reason
from cacheaware_operator.errors import PoolBlocked
from cacheaware_operator.kinds import CONFIG_MAP, SECRET, Object
from cacheaware_operator.references import read_pool, references

KEY = {"sha256": "ab" * 32, "tenant": "acme", "tiers": ["gold"]}


def pool(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "chat", "namespace": "default", "uid": "uid-1", "generation": 3}
    return {"metadata": metadata, "spec": spec}


def secret(**entries: Any) -> Object:
    return {"data": {name: base64.b64encode(json.dumps(value).encode()).decode() for name, value in entries.items()}}


@pytest.fixture
def with_references(spec: dict[str, Any]) -> dict[str, Any]:
    spec["identity"] = {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}}
    spec["publicPercent"] = 5
    spec["publicPrefixes"] = [
        {"name": "inline", "text": "Be kind."},
        {"name": "assistant", "configMapKeyRef": {"name": "prompts", "key": "assistant.txt"}},
    ]
    return pool(spec)


FOUND: dict[Any, Object | None] = {
    (SECRET, "keys"): secret(one=KEY),
    (CONFIG_MAP, "prompts"): {"data": {"assistant.txt": "You help."}},
}


def test_a_pool_with_all_it_refers_to_is_wanted(with_references: dict[str, Any]) -> None:
    assert [(each.kind, each.name) for each in references(with_references)] == list(FOUND)
    wanted = read_pool(with_references, FOUND)
    assert (wanted.namespace, wanted.name, wanted.uid, wanted.generation) == ("default", "chat", "uid-1", 3)
    assert [(key.name, key.tenant, key.tiers) for key in wanted.api_keys.keys] == [("one", "acme", ("gold",))]
    assert wanted.prefix_texts == {"inline": "Be kind.", "assistant": "You help."}


GATEWAY = {"type": "TrustedHeaders", "trustedHeaders": {"secretRef": {"name": "gateway"}}}


def test_of_a_gateway_the_hashes_of_its_secrets_are_wanted(spec: dict[str, Any]) -> None:
    wanted = pool(spec | {"identity": GATEWAY})
    assert [(each.kind, each.name) for each in references(wanted)] == [(SECRET, "gateway")]
    entries = {name: base64.b64encode(text.encode()).decode() for name, text in (("new", "n" * 32), ("old", "o" * 32))}
    known = read_pool(wanted, {(SECRET, "gateway"): {"data": entries}}).api_keys
    assert [gateway.name for gateway in known.gateways] == ["new", "old"]
    assert "nnnn" not in str(known)


@pytest.mark.parametrize(
    ("secret", "reason", "words"),
    [
        pytest.param(
            None,
            Reason.SECRET_NOT_FOUND,
            "spec.identity.trustedHeaders.secretRef.name: there is no Secret gateway in the namespace: create it",
            id="no secret",
        ),
        pytest.param(
            {"data": {"main": base64.b64encode(b"short").decode()}},
            Reason.SECRET_INVALID,
            "Secret gateway: main: must have 32 to 1024 characters",
            id="a guess",
        ),
    ],
)
def test_what_a_gateway_lacks_is_told(spec: dict[str, Any], secret: Object | None, reason: Reason, words: str) -> None:
    with pytest.raises(PoolBlocked) as caught:
        read_pool(pool(spec | {"identity": GATEWAY}), {(SECRET, "gateway"): secret})
    assert caught.value.reason is reason
    assert caught.value.message.startswith(words)


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        pytest.param(
            {(SECRET, "keys"): None},
            Reason.SECRET_NOT_FOUND,
            "spec.identity.apiKeys.secretRef.name: there is no Secret keys in the namespace: create it",
            id="no secret",
        ),
        pytest.param(
            {(SECRET, "keys"): secret(one={**KEY, "tiers": ["silver"]})},
            Reason.SECRET_INVALID,
            "Secret keys: one.tiers[0]: silver is no tier of the pool",
            id="a key for a tier that there is not",
        ),
        pytest.param(
            {(CONFIG_MAP, "prompts"): None},
            Reason.CONFIG_MAP_NOT_FOUND,
            "spec.publicPrefixes[1].configMapKeyRef.name: there is no ConfigMap prompts",
            id="no config map",
        ),
        pytest.param(
            {(CONFIG_MAP, "prompts"): {"data": {"other": "x"}}},
            Reason.CONFIG_MAP_NOT_FOUND,
            "spec.publicPrefixes[1].configMapKeyRef.key: ConfigMap prompts has no text under assistant.txt",
            id="no entry",
        ),
    ],
)
def test_what_is_missing_is_told_with_the_field_and_what_to_do(
    with_references: dict[str, Any], changed: dict[Any, Object | None], reason: Reason, words: str
) -> None:
    with pytest.raises(PoolBlocked) as blocked:
        read_pool(with_references, FOUND | changed)
    assert blocked.value.reason is reason
    assert words in blocked.value.message
    assert "ab" * 32 not in blocked.value.message


def test_an_invalid_spec_is_told_field_by_field(spec: dict[str, Any]) -> None:
    spec["tiers"][0]["quota"]["nominalPercent"] = 101
    spec["defaultTier"] = "silver"
    with pytest.raises(PoolBlocked) as blocked:
        read_pool(pool(spec), {})
    assert blocked.value.reason is Reason.INVALID_SPEC
    assert "spec.tiers[0].quota.nominalPercent" in blocked.value.message
    assert "spec.defaultTier" in blocked.value.message


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="empty"),
        pytest.param({"identity": None, "publicPrefixes": None}, id="nulls"),
        pytest.param({"identity": {"apiKeys": "x"}, "publicPrefixes": {"a": 1}}, id="other types"),
        pytest.param({"publicPrefixes": [None, 3, {"configMapKeyRef": []}]}, id="other items"),
    ],
)
def test_references_of_a_spec_that_is_nonsense_are_none(spec: dict[str, Any]) -> None:
    assert references({"spec": spec}) == ()
