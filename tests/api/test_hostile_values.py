"""Every field of the object, with everything that should not be in it: the error names the field, in plain words."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

from cacheaware_api.errors import ObjectInvalid, Problem, path_text
from cacheaware_api.v1alpha1 import CacheAwarePool, parse_pool

Path = tuple[str | int, ...]

BAD_EVERYWHERE = {
    "null": None,
    "huge": 10**30,
    "unprintably huge": 10**5000,
    "hugely negative": -(10**30),
    "not a number": math.nan,
    "infinite": math.inf,
    "fraction": 1.5,
    "very long": "x" * 1_000_000,
    "control characters": "\x1b[31m\x00",
    "half a character": "\ud800",
    "bytes": b"\xff",
    "set": {1},
}
MAY_BE_EMPTY = ("value", "args", "labels", "annotations", "nodeSelector", "subPath")
MAY_BE_TRUE = ("optional", "readOnly")
MAY_BE_NEGATIVE = ("priority",)


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in an object; what is free in form (affinity, volumes, …) is one place."""
    if path and path[-1] in ("managedFields", "ownerReferences"):
        return  # the API server's own
    if path:
        yield path
    if path and path[-1] in ("affinity", "securityContext"):
        return
    if len(path) > 1 and path[-2] in ("volumes", "topologySpreadConstraints"):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from fields(item, (*path, name))


def problems_with(pool: dict[str, Any], path: Path, value: Any) -> tuple[Problem, ...]:
    changed = copy.deepcopy(pool)
    place: Any = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    try:
        parse_pool(changed)
    except ObjectInvalid as error:
        return error.problems
    return ()


def assert_plain(problem: Problem) -> None:
    text = str(problem)
    assert text.isprintable(), text
    assert len(text) < 700, text
    for word in ("Input should", "pydantic", "http", "validation error", "Value error", "Decimal", "tuple", "dict"):
        assert word not in text, text


def test_the_pool_that_is_broken_here_has_every_field(pool: dict[str, Any]) -> None:
    named = {path[-1] for path in fields(pool)} | {"managedFields", "ownerReferences"}
    schema = CacheAwarePool.model_json_schema()
    status_parts = ("CacheAwarePoolStatus", "Capacity", "Condition", "LastRebalance", "QuotaMove", "TierStatus")
    wanted = {
        field
        for part, node in schema["$defs"].items()
        if part not in status_parts
        for field in node.get("properties", {})
    }
    assert wanted - named - {"trustedHeaders"} == set()
    assert set(CacheAwarePool.model_json_schema()["properties"]) - set(pool) == {"status"}


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in BAD_EVERYWHERE.items()])
def test_a_bad_value_anywhere_is_refused_where_it_is(pool: dict[str, Any], value: Any) -> None:
    for path in fields(pool):
        if path == ("metadata", "creationTimestamp") and value is None:
            continue  # kubectl writes it
        found = problems_with(pool, path, value)
        where = path_text(path)
        assert any(problem.path.startswith(where) for problem in found), f"{where} = {value!r:.40}: {found}"
        for problem in found:
            assert_plain(problem)


@pytest.mark.parametrize(
    ("value", "fine"),
    [
        pytest.param("", MAY_BE_EMPTY, id="empty text"),
        pytest.param(True, MAY_BE_TRUE, id="true"),
        pytest.param(-1, MAY_BE_NEGATIVE, id="negative"),
        pytest.param({}, (), id="object"),
        pytest.param([], (), id="list"),
        pytest.param([[]], (), id="list in a list"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_where_it_is(
    pool: dict[str, Any], value: Any, fine: tuple[str, ...]
) -> None:
    original = {path: _value_at(pool, path) for path in fields(pool)}
    for path, written in original.items():
        if isinstance(value, type(written)) and isinstance(value, (dict, list)):
            continue  # an empty object or list may be right, or miss a field inside
        if path[0] == "metadata" and path[-1] != "name":
            continue
        if any(name in path for name in fine):
            continue
        found = problems_with(pool, path, value)
        where = path_text(path)
        assert any(problem.path.startswith(where) for problem in found), f"{where} = {value!r:.40}: {found}"
        for problem in found:
            assert_plain(problem)


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


@pytest.mark.parametrize(
    "name",
    ["teir", "", "a b", "\x00\x1b", "x" * 100_000, "na\nme", "\ud800", "__class__", "model_fields"],
    ids=["misspelt", "empty", "space", "control", "long", "line break", "half a character", "dunder", "python"],
)
def test_an_unknown_field_is_refused_at_every_level(pool: dict[str, Any], name: str) -> None:
    maps = ("labels", "annotations", "nodeSelector", "requests", "limits")
    free = (*maps, "affinity", "securityContext", "volumes", "topologySpreadConstraints")
    for path in [(), *fields(pool)]:
        inside = _value_at(pool, path)
        if not isinstance(inside, dict) or any(part in path for part in free):
            continue
        found = problems_with(pool, (*path, name), 1)
        if name == "\ud800":  # it cannot be a name at all, so the object that has it is named
            expected = (path_text(path), "must be text in Unicode, not '\\ud800'")
        else:
            expected = (path_text((*path, name)), "unknown field")
        assert [(problem.path, problem.message) for problem in found] == [expected]
        assert_plain(found[0])


def test_a_map_with_a_bad_key_names_the_key(pool: dict[str, Any]) -> None:
    found = problems_with(pool, ("spec", "podTemplate", "nodeSelector"), {"bad key\n": "x"})
    assert [problem.path for problem in found] == ["spec.podTemplate.nodeSelector['bad key\\n']"]
    assert_plain(found[0])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": None}, "has a null in it"),
        ({"a": [math.nan]}, "has a number that is not finite"),
        ({"a": {1: 2}}, "has a field whose name is not text"),
        ({"a": 2**64}, "has a number beyond 64 bits"),
        ({"a": "x" * 5000}, "has text of more than 4096 characters"),
        ({"a": "\ud800"}, "has text that is no Unicode"),
        ({"a": [1] * 300}, "has a list of more than 256 items"),
        ({str(key): 1 for key in range(300)}, "has an object of more than 256 fields"),
        ({"a": {1, 2}}, "has a set, which JSON cannot say"),
    ],
)
def test_what_is_free_in_form_is_still_json(pool: dict[str, Any], value: Any, said: str) -> None:
    (problem,) = problems_with(pool, ("spec", "podTemplate", "affinity"), value)
    assert problem.path == "spec.podTemplate.affinity"
    assert said in problem.message


def test_nesting_is_bounded(pool: dict[str, Any]) -> None:
    deep: dict[str, Any] = {}
    for _ in range(17):
        deep = {"a": deep}
    (problem,) = problems_with(pool, ("spec", "podTemplate", "affinity"), deep)
    assert problem.message == "is nested more than 16 deep"


@pytest.mark.parametrize("data", [None, [], "pool", 5, True, math.nan])
def test_what_is_no_object_at_all_is_refused(data: Any) -> None:
    with pytest.raises(ObjectInvalid) as caught:
        parse_pool(data)
    for problem in caught.value.problems:
        assert_plain(problem)


def test_off_without_quotes_is_a_boolean_and_the_error_says_so(pool: dict[str, Any]) -> None:
    (problem,) = problems_with(pool, ("spec", "rebalancing", "mode"), False)
    assert str(problem) == (
        "spec.rebalancing.mode: must be Auto, DryRun or Off, not false: "
        'put it in quotes ("Off"): YAML reads Off, On, Yes and No as true and false'
    )
