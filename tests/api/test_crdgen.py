"""The CRD file is what the models say, and what an API server needs of it that can be seen without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheaware_api import cel, crdgen, rules
from cacheaware_api.cel import Place
from cacheaware_api.crdgen import Schema
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_api.testing import full_spec, full_status

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "cacheawarepools.yaml"
NOT_STRUCTURAL = {"$ref", "$defs", "title", "const", "anyOf", "patternProperties", "propertyNames", "examples"}


def nodes(schema: Schema, place: Place = ()) -> Iterator[tuple[Place, Schema]]:
    """Every schema in a schema, with its place."""
    yield place, schema
    for name, each in schema.get("properties", {}).items():
        yield from nodes(each, (*place, name))
    for keyword, sign in (("items", "[]"), ("additionalProperties", "{}")):
        if keyword in schema:
            yield from nodes(schema[keyword], (*place, sign))


def fields(value: Any, place: Place = ()) -> Iterator[Place]:
    """The place of every field in an object, as `nodes` names it."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield (*place, name)
            yield from fields(each, (*place, name))
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, (*place, "[]"))


SCHEMA = crdgen.schema()
NODES = dict(nodes(SCHEMA))


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_committed_file_is_what_the_models_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = crdgen.main(["--check", str(FILE)])
    assert code == 0, f"run `make crd`\n{capsys.readouterr().out}"


def test_check_shows_what_differs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "crd.yaml"
    content = FILE.read_text().replace("name: Hit%", "name: Hits")
    old.write_text(content)
    assert crdgen.main(["--check", str(old)]) == 1
    shown = capsys.readouterr()
    assert "-    - name: Hits\n+    - name: Hit%\n" in shown.out
    assert shown.err == f"{old} is not what the models say: run `make crd` and commit it\n"
    assert old.read_text() == content


def test_check_of_no_file_fails(tmp_path: Path) -> None:
    assert crdgen.main(["--check", str(tmp_path / "crd.yaml")]) == 1


def test_without_check_the_file_is_written(tmp_path: Path) -> None:
    assert crdgen.main([str(tmp_path / "crd.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "crd.yaml").read_text()) == crdgen.definition()


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        crdgen.main([str(tmp_path / "missing" / "crd.yaml")])
    assert "run it from the repository's root, or name a file" in capsys.readouterr().err


def test_the_file_is_small_enough_for_client_side_apply() -> None:
    assert len(FILE.read_bytes()) < 100_000


def test_generating_twice_gives_the_same() -> None:
    assert crdgen.render() == crdgen.render()


# -- the schema -------------------------------------------------------------------------------------------------------


def test_every_node_is_structural() -> None:
    for place, node in NODES.items():
        assert not NOT_STRUCTURAL & node.keys(), place
        assert "type" in node or node.get("x-kubernetes-int-or-string"), place
        assert not isinstance(node.get("additionalProperties"), bool), place


def test_no_field_is_nullable_and_replicas_alone_has_a_default() -> None:
    assert not [place for place, node in NODES.items() if "nullable" in node]
    assert [place for place, node in NODES.items() if "default" in node] == [("spec", "replicas")]


def test_every_field_of_ours_is_described() -> None:
    bare = [
        place for place, node in NODES.items() if "description" not in node and place[-1:] not in (("[]",), ("{}",))
    ]
    assert bare == [("metadata",), ("metadata", "name")]  # the API server's own


def test_every_list_and_text_of_the_spec_is_bounded() -> None:
    for place, node in NODES.items():
        if place[:1] != ("spec",):
            continue
        bound = {"array": "maxItems", "string": "maxLength"}.get(node.get("type", ""))
        assert bound is None or bound in node or "enum" in node, place
        if "additionalProperties" in node:
            assert "maxProperties" in node, place


def test_the_example_with_every_field_has_every_field() -> None:
    written = set(fields({"spec": full_spec(), "status": full_status()}))
    declared = {place for place in NODES if place[:1] in (("spec",), ("status",)) and place[-1] not in ("[]", "{}")}
    gateway = ("spec", "identity", "trustedHeaders")  # the example has API keys, and cannot have both
    assert {place for place in declared - written if place[:3] != gateway} == set()


def test_every_field_of_the_status_is_declared_so_that_none_is_pruned() -> None:
    status = CacheAwarePoolStatus.model_validate(copy.deepcopy(full_status()))
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert written == full_status()
    assert set(fields({"status": written})) <= NODES.keys()


def test_lists_with_names_are_maps() -> None:
    maps = {
        place: node["x-kubernetes-list-map-keys"] for place, node in NODES.items() if "x-kubernetes-list-type" in node
    }
    assert maps == {
        ("spec", "tiers"): ["name"],
        ("spec", "publicPrefixes"): ["name"],
        ("spec", "engine", "env"): ["name"],
        ("status", "tiers"): ["name"],
        ("status", "conditions"): ["type"],
    }


# -- the rules --------------------------------------------------------------------------------------------------------


NOT_SAID = {"DNS_LABEL", "LEAST_REBALANCING_INTERVAL", "NAMES_UNIQUE"}
"""A pattern, a value, and what list maps say in the API server's own words."""

MESSAGES = {
    name: value
    for name, value in vars(rules).items()
    if name.isupper() and isinstance(value, str) and name not in NOT_SAID
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_the_api_server_says_what_the_models_say(message: str) -> None:
    said = [text for _, rule in cel.rules_of_pool() for text in (rule.message, rule.message_expression or "")]
    assert any(message in text for text in said)


def test_every_rule_is_in_the_schema_and_has_a_constant_message() -> None:
    for place, rule in cel.rules_of_pool():
        assert rule.to_json() in NODES[place]["x-kubernetes-validations"]
        assert len(rule.message) < 2048, place  # the most that the API server takes
        assert "\n" not in rule.message + (rule.message_expression or "")


def test_a_rule_points_at_a_field_that_there_is() -> None:
    for place, rule in cel.rules_of_pool():
        if rule.field_path:
            assert (*place, *rule.field_path.removeprefix(".").split(".")) in NODES
