"""The store against a plain model of the cluster: watches, lists and answers come late and out of order."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cacheaware_operator.cluster_store import ClusterStore, PoolKey
from cacheaware_operator.kinds import CONFIG_MAP, DEPLOYMENT, POD, POOL, SECRET

CHAT = PoolKey("default", "chat")


def made(name: str, version: int, pool: str | None = "chat", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": str(version)}
    if pool is not None:
        metadata["labels"] = {"cacheaware.dev/pool": pool}  # type: ignore[assignment]  # one of its values is a map
    return {"metadata": metadata, **more}


def test_the_newest_version_counts_whatever_comes_last() -> None:
    store = ClusterStore()
    assert store.put(CONFIG_MAP, made("view", 5, data={"a": "5"}))
    assert not store.put(CONFIG_MAP, made("view", 4, data={"a": "4"}))
    found = store.get(CONFIG_MAP, "default", "view")
    assert found is not None
    assert found["data"] == {"a": "5"}


def test_what_was_deleted_is_not_brought_back_by_an_older_word() -> None:
    store = ClusterStore()
    store.put(SECRET, made("s", 5))
    assert store.remove(SECRET, made("s", 7))
    assert not store.put(SECRET, made("s", 6))
    assert not store.replace(SECRET, None, [made("s", 5)], 6)
    assert store.get(SECRET, "default", "s") is None
    assert store.put(SECRET, made("s", 8))


def test_a_late_word_of_a_deletion_leaves_a_later_object() -> None:
    store = ClusterStore()
    store.put(SECRET, made("s", 9))
    assert not store.remove(SECRET, made("s", 7))
    assert store.get(SECRET, "default", "s") is not None


def test_a_list_tells_what_is_gone_and_nothing_of_what_came_after_it() -> None:
    store = ClusterStore()
    store.put(DEPLOYMENT, made("old", 3))
    store.put(DEPLOYMENT, made("young", 30))
    assert store.replace(DEPLOYMENT, None, [], 20) == {CHAT}
    assert [key.name for key, _ in store.of_pool(CHAT)] == ["young"]


def test_a_list_of_labelled_objects_tells_nothing_of_those_without_a_label() -> None:
    store = ClusterStore()
    store.put(SECRET, made("of-the-author", 3, pool=None))
    store.replace(SECRET, None, [], 20)
    assert store.get(SECRET, "default", "of-the-author") is not None


def test_a_list_of_one_namespace_tells_nothing_of_others() -> None:
    store = ClusterStore()
    store.put(DEPLOYMENT, made("chat", 3))
    store.replace(DEPLOYMENT, "elsewhere", [], 20)
    assert store.get(DEPLOYMENT, "default", "chat") is not None


def test_a_new_version_of_the_same_content_is_no_news() -> None:
    store = ClusterStore()
    assert store.put(CONFIG_MAP, made("view", 1, data={"a": "1"}))
    assert not store.put(CONFIG_MAP, made("view", 2, data={"a": "1"}))
    assert store.put(CONFIG_MAP, made("view", 3, data={"a": "2"}))


def test_an_object_that_changes_its_pool_is_found_by_the_new_one_only() -> None:
    store = ClusterStore()
    store.put(POD, made("p", 1))
    store.put(POD, made("p", 2, pool="other"))
    assert store.of_pool(CHAT) == []
    assert [key.name for key, _ in store.of_pool(PoolKey("default", "other"))] == ["p"]


def test_a_pool_is_found_by_its_own_name() -> None:
    store = ClusterStore()
    store.put(POOL, made("chat", 1, pool=None))
    assert [key.kind for key, _ in store.of_pool(CHAT)] == [POOL]


def test_of_a_pod_only_what_is_looked_at_is_kept() -> None:
    store = ClusterStore()
    store.put(POD, made("p", 1, spec={"containers": ["large"]}, status={"podIP": "10.0.0.1"}))
    found = store.get(POD, "default", "p")
    assert found is not None
    assert set(found) == {"metadata", "status"}


@given(data=st.data())
def test_however_words_are_shuffled_the_store_ends_as_the_cluster_is(data: st.DataObject) -> None:
    """A history of one object; each state is told at least once, by a watch or by a list, in any order."""
    alive = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    words: list[tuple[int, dict[str, Any] | None, str]] = []
    for version, exists in enumerate(alive, start=1):
        state = made("d", version, data={"at": str(version)})
        words.append((version, state if exists else None, data.draw(st.sampled_from(["watch", "list"]))))
    store = ClusterStore()
    for number, told, by in data.draw(st.permutations(words)):
        if by == "list":
            store.replace(CONFIG_MAP, None, [] if told is None else [told], number)
        elif told is None:
            store.remove(CONFIG_MAP, made("d", number))
        else:
            store.put(CONFIG_MAP, told)
    last = words[-1][1]
    store.replace(CONFIG_MAP, None, [] if last is None else [last], len(alive) + 1)
    found = store.get(CONFIG_MAP, "default", "d")
    assert (None if found is None else found["data"]) == (None if last is None else last["data"])
    assert len(store.of_pool(CHAT)) == (found is not None)
