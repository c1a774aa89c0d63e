"""Requests to the API server: what is sent, how answers are read, and which error a failure becomes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cacheaware_operator.errors import ApiRefused, ApiUnreachable, FieldConflict
from cacheaware_operator.kinds import CONFIG_MAP, SECRET
from cacheaware_operator.testing_cluster import TOKEN, FakeCluster

PATH = CONFIG_MAP.path("default", "view")


def config_map(name: str = "view", **data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", "labels": {"cacheaware.dev/pool": "chat"}},
        "data": data,
    }


@pytest.fixture
async def there() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        yield cluster


async def test_every_request_carries_the_token(there: FakeCluster) -> None:
    await there.api.find(PATH)
    assert there.headers[0]["Authorization"] == f"Bearer {TOKEN}"


async def test_what_is_not_there_is_none_and_no_error(there: FakeCluster) -> None:
    assert await there.api.find(PATH) is None
    with pytest.raises(ApiRefused) as refused:
        await there.api.get(PATH)
    assert (refused.value.status, refused.value.reason) == (404, "NotFound")


async def test_an_applied_object_is_created_or_changed_and_answered_as_it_is_now(there: FakeCluster) -> None:
    created = await there.api.apply(PATH, config_map(a="1"))
    changed = await there.api.apply(PATH, config_map(a="2"))
    assert created["metadata"]["uid"] == changed["metadata"]["uid"]
    assert changed["data"] == {"a": "2"}
    assert [headers["Content-Type"] for headers in there.headers] == ["application/apply-patch+yaml"] * 2


async def test_only_requests_that_may_change_something_count_as_writes(there: FakeCluster) -> None:
    await there.api.apply(PATH, config_map())
    await there.api.find(PATH)
    await there.api.list(CONFIG_MAP, None)
    await there.api.merge_patch(PATH, {"data": {"a": "1"}})
    await there.api.create(CONFIG_MAP.path("default"), config_map("other"))
    assert there.api.writes == 3


async def test_a_list_has_every_page_and_the_version_of_the_whole(there: FakeCluster) -> None:
    there.page_size = 2
    for number in range(5):
        there.put(CONFIG_MAP, config_map(f"view-{number}"))
    listed = await there.api.list(CONFIG_MAP, None)
    assert [each["metadata"]["name"] for each in listed.items] == [f"view-{number}" for number in range(5)]
    assert listed.version >= max(int(each["metadata"]["resourceVersion"]) for each in listed.items)
    assert len(there.reads) == 3


async def test_a_list_is_of_one_namespace_and_one_label_where_they_are_named(there: FakeCluster) -> None:
    there.put(CONFIG_MAP, config_map("ours"))
    elsewhere = config_map("ours-elsewhere")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    there.put(CONFIG_MAP, elsewhere)
    unlabelled = config_map("of-the-author")
    del unlabelled["metadata"]["labels"]
    there.put(CONFIG_MAP, unlabelled)
    everywhere = await there.api.list(CONFIG_MAP, None, "cacheaware.dev/pool")
    here = await there.api.list(CONFIG_MAP, "default")
    assert {each["metadata"]["name"] for each in everywhere.items} == {"ours", "ours-elsewhere"}
    assert {each["metadata"]["name"] for each in here.items} == {"ours", "of-the-author"}


# -- deletion ---------------------------------------------------------------------------------------------------------


async def test_only_the_very_object_that_was_meant_is_deleted(there: FakeCluster) -> None:
    there.put(SECRET, {"metadata": {"name": "s", "namespace": "default"}})
    await there.api.delete(SECRET.path("default", "s"), "uid-of-an-earlier-one")
    assert there.find(SECRET, "s") is not None
    await there.api.delete(SECRET.path("default", "s"), there.find(SECRET, "s")["metadata"]["uid"])  # type: ignore[index]  # just seen
    assert there.find(SECRET, "s") is None


async def test_deleting_what_is_gone_is_no_error(there: FakeCluster) -> None:
    await there.api.delete(PATH, "uid-1")


async def test_a_deletion_that_is_forbidden_is_an_error(there: FakeCluster) -> None:
    there.refusals[f"DELETE {PATH}"] = (403, {"reason": "Forbidden", "message": "no rights"})
    with pytest.raises(ApiRefused, match="no rights"):
        await there.api.delete(PATH, "uid-1")


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a_field_of_another_manager_is_a_conflict_that_names_both(there: FakeCluster) -> None:
    there.put(CONFIG_MAP, config_map(a="theirs"))
    there.foreign[PATH] = ("kubectl-edit", "data.a")
    with pytest.raises(FieldConflict) as conflict:
        await there.api.apply(PATH, config_map(a="ours"))
    assert conflict.value.fields == (("kubectl-edit", ".data.a"),)
    assert ".data.a is managed by kubectl-edit" in str(conflict.value)


async def test_a_conflict_of_versions_is_no_conflict_of_fields(there: FakeCluster) -> None:
    there.refusals[f"PUT {PATH}"] = (409, {"reason": "Conflict", "message": "the object has been modified"})
    with pytest.raises(ApiRefused) as refused:
        await there.api.replace(PATH, config_map())
    assert not isinstance(refused.value, FieldConflict)
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        pytest.param(
            403, {"reason": "Forbidden", "message": "cannot get"}, "403 Forbidden: cannot get", id="forbidden"
        ),
        pytest.param(422, {"reason": "Invalid", "message": "bad field"}, "422 Invalid: bad field", id="invalid"),
        pytest.param(502, "<html>bad gateway</html>", "<html>bad gateway", id="a proxy before it, in HTML"),
        pytest.param(500, "", "500", id="no body"),
        pytest.param(503, json.dumps(["odd"]), "odd", id="JSON that is no Status"),
    ],
)
async def test_a_refusal_says_what_was_asked_and_what_was_answered(
    there: FakeCluster, status: int, body: Any, words: str
) -> None:
    there.refusals[f"GET {PATH}"] = (status, body)
    with pytest.raises(ApiRefused) as refused:
        await there.api.get(PATH)
    assert refused.value.status == status
    assert words in str(refused.value)
    assert f"GET {PATH}" in str(refused.value)


async def test_a_server_that_closes_the_connection_is_unreachable(there: FakeCluster) -> None:
    there.broken = True
    with pytest.raises(ApiUnreachable, match="the API server does not answer"):
        await there.api.apply(PATH, config_map())
    there.broken = False
    assert (await there.api.apply(PATH, config_map(a="1")))["data"] == {"a": "1"}
