"""What counts as drift, whose an object is, and the smallest patch of a status."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheaware_operator.drift import Applied, differs, is_owned_by, merge_patch, part_of

WANTED: dict[str, Any] = {
    "metadata": {"name": "chat", "labels": {"ours": "1"}},
    "spec": {"ports": [{"port": 80}], "memory": "1024Mi"},
}
ANSWER: dict[str, Any] = {
    "metadata": {"name": "chat", "uid": "u", "resourceVersion": "7", "labels": {"ours": "1", "theirs": "2"}},
    "spec": {"ports": [{"port": 80, "protocol": "TCP"}], "memory": "1Gi", "defaulted": True},
    "status": {"ready": 1},
}


def there(change: Any = None) -> dict[str, Any]:
    written = copy.deepcopy(ANSWER)
    if change is not None:
        change(written)
    return written


def test_nothing_differs_after_it_was_applied_although_the_server_wrote_it_its_own_way() -> None:
    assert not differs(WANTED, there(), Applied.of(WANTED, ANSWER))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda it: it["metadata"]["labels"].update(theirs="3", more="4"), id="labels of others"),
        pytest.param(lambda it: it["metadata"].update(resourceVersion="9"), id="a version"),
        pytest.param(lambda it: it["spec"].update(defaulted=False), id="a field that we do not set"),
        pytest.param(lambda it: it["spec"]["ports"][0].update(nodePort=3), id="a field in an item of ours"),
        pytest.param(lambda it: it.update(status={"ready": 2}), id="the status"),
    ],
)
def test_what_is_not_ours_is_no_drift(change: Any) -> None:
    assert not differs(WANTED, there(change), Applied.of(WANTED, ANSWER))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda it: it["spec"].update(memory="2Gi"), id="a value of ours"),
        pytest.param(lambda it: it["spec"].pop("memory"), id="a field of ours is gone"),
        pytest.param(lambda it: it["metadata"]["labels"].pop("ours"), id="a label of ours is gone"),
        pytest.param(lambda it: it["spec"]["ports"].append({"port": 81}), id="a list of ours is longer"),
        pytest.param(lambda it: it["metadata"].update(uid="v"), id="another object of that name"),
    ],
)
def test_what_is_ours_and_changed_is_drift(change: Any) -> None:
    assert differs(WANTED, there(change), Applied.of(WANTED, ANSWER))


def test_what_is_wanted_otherwise_is_applied() -> None:
    other = copy.deepcopy(WANTED)
    other["spec"]["memory"] = "2Gi"
    assert differs(other, there(), Applied.of(WANTED, ANSWER))


def test_what_is_missing_or_was_never_applied_is_applied() -> None:
    assert differs(WANTED, None, Applied.of(WANTED, ANSWER))
    assert differs(WANTED, there(), None)


def test_only_a_controlling_owner_of_that_very_uid_owns() -> None:
    owner = {"kind": "CacheAwarePool", "name": "chat", "uid": "u", "controller": True}
    assert is_owned_by({"metadata": {"ownerReferences": [owner]}}, "u")
    assert not is_owned_by({"metadata": {"ownerReferences": [owner]}}, "v")
    assert not is_owned_by({"metadata": {"ownerReferences": [owner | {"controller": False}]}}, "u")
    assert not is_owned_by({"metadata": {}}, "u")


plain = st.recursive(
    st.integers(0, 3) | st.sampled_from(["x", "y"]) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), plain, max_size=4)


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


@given(old=objects, new=objects)
def test_a_patch_makes_the_new_out_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert merged(old, merge_patch(old, new)) == new


@given(value=objects)
def test_equal_objects_need_no_patch(value: dict[str, Any]) -> None:
    assert merge_patch(value, copy.deepcopy(value)) == {}


@given(value=objects)
def test_the_part_of_an_object_that_itself_speaks_of_is_all_of_it(value: dict[str, Any]) -> None:
    assert part_of(value, value) == value
