"""A file with a pool, its Secrets and its ConfigMaps."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
import yaml

from cacheaware_api import wire
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.objects import PoolFile, read_pool_file

Objects = dict[str, dict[str, Any]]

HASH = "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
OTHER_HASH = "81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9"


def api_object(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "models"}, **fields}


def key_entry(**changes: Any) -> str:
    entry = {"sha256": HASH, "tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"} | changes
    return yaml.safe_dump({name: value for name, value in entry.items() if value is not ...})


@pytest.fixture
def objects(pool: dict[str, Any]) -> Objects:
    """A pool with all that it refers to, by a name for the tests."""
    return {
        "pool": pool,
        "keys": api_object("Secret", "chat-api-keys", stringData={"alice": key_entry()}),
        "env": api_object("Secret", "env", data={"a": base64.b64encode(b"secret").decode()}),
        "prompts": api_object("ConfigMap", "prompts", data={"assistant.txt": "You are a good assistant."}),
    }


def text_of(objects: Objects) -> bytes:
    return yaml.safe_dump_all(objects.values(), sort_keys=False).encode()


def read(objects: Objects) -> PoolFile:
    return read_pool_file(text_of(objects))


def problems(objects: Objects) -> list[str]:
    with pytest.raises(ObjectInvalid) as caught:
        read(objects)
    return [problem.text for problem in caught.value.problems]


def test_a_file_gives_the_pool_and_what_it_refers_to(objects: Objects) -> None:
    found = read(objects)
    assert found.pool.metadata.name == "chat"
    assert found.namespace == "models"
    assert found.api_keys == wire.ApiKeys((wire.ApiKey("alice", HASH, "acme", ("gold", "bronze"), "gold"),))
    assert found.public_prefixes == (
        wire.ViewPrefix("assistant", "You are a good assistant."),
        wire.ViewPrefix("inline", "You are helpful.\n"),
    )
    assert found.secrets["env"].entries == {"a": b"secret"}


def test_the_order_of_the_documents_means_nothing(objects: Objects) -> None:
    assert read(dict(reversed(objects.items()))) == read(objects)


def test_a_status_in_the_file_is_passed_over(objects: Objects) -> None:
    objects["pool"]["status"] = {"anything": None}
    assert read(objects).pool.status is None


def test_string_data_wins_over_data(objects: Objects) -> None:
    objects["env"]["stringData"] = {"a": "new"}
    assert read(objects).secrets["env"].entries == {"a": b"new"}


def test_base64_may_be_broken_into_lines(objects: Objects) -> None:
    objects["keys"] = api_object(
        "Secret", "chat-api-keys", data={"alice": base64.encodebytes(key_entry().encode()).decode()}
    )
    assert [key.name for key in read(objects).api_keys.keys] == ["alice"]


def test_an_open_pool_has_no_keys(objects: Objects) -> None:
    objects["pool"]["spec"]["identity"] = {"type": "Open"}
    del objects["pool"]["spec"]["sharing"], objects["keys"]
    assert read(objects).api_keys == wire.ApiKeys(())


def test_a_pool_without_namespace_is_in_default(objects: Objects) -> None:
    for each in objects.values():
        each["metadata"].pop("namespace")
    assert read(objects).namespace == "default"


def test_a_problem_has_the_line_of_its_field(objects: Objects) -> None:
    objects["pool"]["spec"]["tiers"][1]["weight"] = 0
    content = text_of(objects)
    with pytest.raises(ObjectInvalid) as caught:
        read_pool_file(content)
    (problem,) = caught.value.problems
    assert problem.line is not None
    assert content.decode().splitlines()[problem.line - 1].strip() == "weight: 0"
    assert str(problem) == f"line {problem.line}: spec.tiers[1].weight: must be at least 1, not 0"


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_file_must_hold_one_pool(objects: Objects) -> None:
    two = objects | {"other": objects["pool"] | {"metadata": {"name": "other"}}}
    assert problems(two) == [
        "the file: must hold exactly one CacheAwarePool, and holds 2: "
        "keep one, and put the others in files of their own"
    ]
    assert problems({"env": objects["env"]}) == ["the file: must hold exactly one CacheAwarePool, and holds 0: add one"]
    with pytest.raises(ObjectInvalid, match="holds 0"):
        read_pool_file(b"")


def test_a_broken_pool_is_still_the_one_pool(objects: Objects) -> None:
    objects["pool"]["spec"]["replicas"] = -1
    assert problems(objects) == ["spec.replicas: must be at least 0, not -1"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        pytest.param([1], "document 5: must be an object, not a list", id="a list"),
        pytest.param("text", "document 5: must be an object, not 'text'", id="text"),
        pytest.param({"apiVersion": "v1"}, "document 5: kind: is missing: add it", id="no kind"),
        pytest.param({"kind": "Secret"}, "document 5: apiVersion: is missing: add it", id="no version"),
        pytest.param(
            {"apiVersion": "v1", "kind": "Service"},
            "document 5: kind: must be CacheAwarePool, Secret or ConfigMap, not 'Service': remove the document",
            id="another kind",
        ),
        pytest.param(
            {"apiVersion": "v1", "kind": ["Secret"]},
            "document 5: kind: must be CacheAwarePool, Secret or ConfigMap, not a list: remove the document",
            id="a kind that is a list",
        ),
        pytest.param(
            {"apiVersion": "v2", "kind": "Secret", "metadata": {"name": "s"}},
            "Secret s: apiVersion: must be v1, not '**'",
            id="another version",
        ),
        pytest.param(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}},
            "ConfigMap in document 5: metadata.name: is missing: add it",
            id="no name",
        ),
        pytest.param(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": 5}},
            "ConfigMap c: data.a: must be text, not 5: put it in quotes",
            id="a number as a value",
        ),
        pytest.param(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "daat": {}},
            "ConfigMap c: daat: unknown field: did you mean data?",
            id="an unknown field",
        ),
    ],
)
def test_documents_that_are_refused(objects: Objects, document: Any, said: str) -> None:
    assert problems(objects | {"odd": document}) == [said]


def test_another_version_of_the_pool_is_refused(objects: Objects) -> None:
    objects["pool"]["apiVersion"] = "cacheaware.dev/v2"
    assert problems(objects) == [
        "apiVersion: must be cacheaware.dev/v1alpha1, not 'cacheaware.dev/v2': did you mean cacheaware.dev/v1alpha1?"
    ]


def test_a_secret_is_told_of_without_its_values(objects: Objects) -> None:
    objects["env"]["data"] = {"a": "not-base64!", "b": 12345, "bad key": "hunter2"}
    objects["env"]["type"] = "hunter2\n"
    told = problems(objects)
    assert "Secret env: data.b: must be text, not ***: put it in quotes" in told
    assert not any(value in line for line in told for value in ("hunter2", "12345", "not-base64"))


def test_what_is_no_base64_is_refused(objects: Objects) -> None:
    objects["env"]["data"] = {"a": "not-base64!", "b": "ü"}
    fix = "must be base64: encode the value, or write it under stringData as it is"
    assert problems(objects) == [f"Secret env: data.a: {fix}", f"Secret env: data.b: {fix}"]


def test_two_objects_of_one_name_are_refused(objects: Objects) -> None:
    assert problems(objects | {"again": objects["env"]}) == ["Secret env: is in the file twice: remove one of them"]


def test_an_object_of_another_namespace_is_refused(objects: Objects) -> None:
    del objects["keys"]["metadata"]["namespace"]
    assert problems(objects) == [
        "Secret chat-api-keys: metadata.namespace: is default, and the pool is in models: put both in one namespace"
    ]


# -- references -------------------------------------------------------------------------------------------------------


def test_what_is_referred_to_and_missing_is_named_all_at_once(objects: Objects) -> None:
    assert problems({"pool": objects["pool"]}) == [
        "spec.identity.apiKeys.secretRef.name: Secret chat-api-keys is not in the file: add it",
        "spec.publicPrefixes[0].configMapKeyRef.name: ConfigMap prompts is not in the file: add it",
        "spec.engine.env[1].valueFrom.secretKeyRef.name: Secret env is not in the file: add it",
    ]


def test_missing_entries_are_named(objects: Objects) -> None:
    objects["env"]["data"] = {}
    objects["prompts"]["data"] = {"other": "x"}
    assert problems(objects) == [
        "spec.publicPrefixes[0].configMapKeyRef.key: ConfigMap prompts has no entry assistant.txt: add it under data",
        "spec.engine.env[1].valueFrom.secretKeyRef.key: Secret env has no entry a: add it",
    ]


def test_an_optional_reference_may_be_missing(objects: Objects) -> None:
    objects["pool"]["spec"]["engine"]["env"][1]["valueFrom"]["secretKeyRef"]["optional"] = True
    del objects["env"]
    assert read(objects)


def test_what_a_cluster_has_is_listed_as_expected_there(objects: Objects) -> None:
    found = read_pool_file(text_of({"pool": objects["pool"]}), for_cluster=True)
    assert found.elsewhere == (
        "Secret chat-api-keys (spec.identity.apiKeys.secretRef.name)",
        "ConfigMap prompts (spec.publicPrefixes[0].configMapKeyRef.name)",
        "Secret env (spec.engine.env[1].valueFrom.secretKeyRef.name)",
    )
    assert read_pool_file(text_of(objects), for_cluster=True) == read(objects)


def test_what_is_in_a_file_for_a_cluster_must_be_right_all_the_same(objects: Objects) -> None:
    objects["env"]["data"] = {}
    objects["keys"]["stringData"] = {"alice": key_entry(tiers=["lead"])}
    with pytest.raises(ObjectInvalid) as caught:
        read_pool_file(text_of(objects), for_cluster=True)
    assert len(caught.value.problems) == 3  # a tier that is none, a default that is not among them, an entry


def behind_gateway(objects: Objects, **entries: str) -> Objects:
    objects["pool"]["spec"]["identity"] = {
        "type": "TrustedHeaders",
        "trustedHeaders": {"secretRef": {"name": "gateway"}},
    }
    return objects | {"gateway": api_object("Secret", "gateway", stringData=entries)}


def test_a_gateways_secret_must_be_there(objects: Objects) -> None:
    wanted = behind_gateway(objects)
    del wanted["gateway"]
    assert problems(wanted) == [
        "spec.identity.trustedHeaders.secretRef.name: Secret gateway is not in the file: add it"
    ]


def test_of_a_gateways_secret_only_hashes_are_kept(objects: Objects) -> None:
    new, old = "n" * 32, "o" * 64 + "\n"  # as an editor leaves it
    found = read(behind_gateway(objects, new=new, old=old)).api_keys
    assert found == wire.ApiKeys(
        (),
        (
            wire.GatewaySecret("new", hashlib.sha256(b"n" * 32).hexdigest()),
            wire.GatewaySecret("old", hashlib.sha256(b"o" * 64).hexdigest()),
        ),
    )
    assert read(behind_gateway(objects)).api_keys == wire.ApiKeys(())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param("n" * 31, "must have 32 to 1024 characters", id="too short to be no guess"),
        pytest.param("n" * 1025, "must have 32 to 1024 characters", id="too long for a header"),
        pytest.param("n" * 16 + " " + "n" * 16, "must be printable ASCII without spaces", id="a space"),
        pytest.param("n" * 32 + "\n\n", "must be printable ASCII without spaces", id="two ends of lines"),
        pytest.param("ü" * 32, "must be printable ASCII without spaces", id="another alphabet"),
    ],
)
def test_a_gateways_secret_that_no_header_can_carry_is_refused(objects: Objects, value: str, said: str) -> None:
    (problem,) = problems(behind_gateway(objects, main=value))
    assert problem.startswith(f"Secret gateway: main: {said}")
    assert problem.endswith("openssl rand -hex 32")
    assert value not in problem


def test_an_empty_prefix_is_refused(objects: Objects) -> None:
    objects["prompts"]["data"] = {"assistant.txt": ""}
    (problem,) = problems(objects)
    assert problem.startswith("spec.publicPrefixes[0].configMapKeyRef.key: assistant.txt of ConfigMap prompts is empty")


# -- API keys ---------------------------------------------------------------------------------------------------------


def test_keys_need_no_default_tier_and_hashes_may_be_in_capitals(objects: Objects) -> None:
    objects["keys"]["stringData"] = {"bob": key_entry(sha256=HASH.upper(), defaultTier=...)}
    (key,) = read(objects).api_keys.keys
    assert (key.name, key.sha256, key.default_tier) == ("bob", HASH, None)


def test_a_secret_without_entries_lets_nobody_in(objects: Objects) -> None:
    del objects["keys"]["stringData"]
    assert read(objects).api_keys.keys == ()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        pytest.param(
            key_entry(sha256="sk-my-secret-key"),
            "alice.sha256: must be the 64 hexadecimal digits of a SHA-256, not '****************'",
            id="the key instead of its hash",
        ),
        pytest.param(key_entry(sha256=...), "alice.sha256: is missing: add it", id="no hash"),
        pytest.param(
            "sha256: " + "1" * 64 + "\ntenant: a\ntiers: [gold]",
            "alice.sha256: must be text, not ***: put it in quotes",
            id="a hash of digits only",
        ),
        pytest.param(
            key_entry(tiers=["gold", "silver"]),
            "alice.tiers[1]: silver is no tier of the pool: choose among bronze, gold",
            id="an unknown tier",
        ),
        pytest.param(key_entry(tiers=[]), "alice.tiers: must have at least 1: add one", id="no tiers"),
        pytest.param(
            key_entry(tiers=["gold", "gold"]),
            "alice.tiers[1]: gold is named twice: remove one of them",
            id="a tier twice",
        ),
        pytest.param(
            key_entry(tiers=["bronze"]),
            "alice.defaultTier: gold is not among the tiers of the key: choose one of bronze",
            id="a default that it may not use",
        ),
        pytest.param(key_entry(tenant=""), "alice.tenant: must not be empty", id="no tenant"),
        pytest.param(key_entry(tenent="a"), "alice.tenent: unknown field: did you mean tenant?", id="an unknown field"),
        pytest.param(
            key_entry(defaultTier=None),
            "alice.defaultTier: must not be null: leave the field out, or give it a value",
            id="null",
        ),
        pytest.param("just text", "alice: must be an object, not '*********'", id="no object"),
        pytest.param("", "alice: must hold one YAML or JSON object, and holds 0", id="empty"),
        pytest.param("{", "alice: is no YAML: ", id="no YAML"),
    ],
)
def test_entries_that_are_refused(objects: Objects, entry: str, said: str) -> None:
    objects["keys"]["stringData"] = {"alice": entry}
    (problem,) = problems(objects)
    assert problem.startswith(f"Secret chat-api-keys: {said}")
    assert "sk-my-secret-key" not in problem


def test_an_entry_that_is_no_utf_8_is_refused(objects: Objects) -> None:
    objects["keys"] = api_object("Secret", "chat-api-keys", data={"alice": base64.b64encode(b"\xff").decode()})
    assert problems(objects) == ["Secret chat-api-keys: alice: is not UTF-8: byte 0xff: save it as UTF-8"]


def test_one_key_in_two_entries_is_refused_and_other_problems_are_still_told(objects: Objects) -> None:
    objects["keys"]["stringData"] = {"alice": key_entry(), "bob": key_entry(), "carol": key_entry(tenant=5)}
    assert problems(objects) == [
        "Secret chat-api-keys: bob.sha256: is the same key as that of alice: give each entry its own key",
        "Secret chat-api-keys: carol.tenant: must be text, not ***: put it in quotes",
    ]


def test_several_keys_are_in_the_order_of_their_names(objects: Objects) -> None:
    objects["keys"]["stringData"] = {"bob": key_entry(), "alice": key_entry(sha256=OTHER_HASH)}
    assert [key.name for key in read(objects).api_keys.keys] == ["alice", "bob"]
