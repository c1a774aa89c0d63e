"""What goes wrong on a real node, and what a deleted pod is to those who are being served."""

from __future__ import annotations

from e2e.serving import Callers, ServingSpace, Stream, call, pod_url, question, serving_pool, tokens_of
from e2e.space import POOL

_OPERATORS = "/api/v1/namespaces/cacheaware-system/pods"


def _settled(chat: ServingSpace) -> bool:
    return chat.settled() and (chat.condition("Ready") or ("",))[0] == "True" and len(chat.ready_pods()) == 2


def _recovers(chat: ServingSpace, container: str) -> None:
    """Kill one container of one pod while the other pod is in the middle of an answer."""
    broken, healthy = chat.ready_pods()
    name = broken["metadata"]["name"]
    stream = Stream(pod_url(healthy), tokens_of(pod_url(healthy), 10))
    stream.start()
    assert stream.began.wait(30)
    chat.node.kill_container(chat.name, name, container)
    assert stream.is_alive(), "it ended too early to tell"
    chat.wait(f"{name} is ready again", lambda: name in {pod["metadata"]["name"] for pod in chat.ready_pods()}, 180)
    assert stream.finished()
    assert call(pod_url(broken), "/v1/chat/completions", "gold-key", question())[0] == 200
    chat.wait("the pool is settled", lambda: _settled(chat))
    assert chat.restarts()[f"{healthy['metadata']['uid']}/{container}"] == 0, "the other pod was touched"


def test_a_killed_sidecar_comes_back_and_streams_on_the_other_pod_go_on(chat: ServingSpace) -> None:
    _recovers(chat, "sidecar")


def test_a_killed_engine_comes_back_with_its_quotas_and_streams_on_the_other_pod_go_on(chat: ServingSpace) -> None:
    _recovers(chat, "engine")
    for pod in chat.pods():
        status = chat.status_of(pod)
        assert status["ledger"]["revision"] == status["applied"], "an engine without the quotas in force"


def test_a_killed_operator_comes_back_and_streams_go_on(chat: ServingSpace) -> None:
    stream = Stream(chat.service_url(), tokens_of(chat.service_url(), 10))
    stream.start()
    assert stream.began.wait(30)
    before = chat.restarts()
    for pod in chat.get(_OPERATORS)["items"]:
        chat.node.kill_container("cacheaware-system", pod["metadata"]["name"], "operator")
    edited = chat.patch(POOL, {"metadata": {"labels": {"seen": "yes"}}, "spec": {"defaultTier": "gold"}})
    chat.wait(
        "an edit is seen by the operator that came back",
        lambda: chat.get(POOL)["status"]["observedGeneration"] == edited["metadata"]["generation"],
        180,
    )
    assert stream.finished()
    assert chat.restarts() == before


def test_a_pod_that_is_deleted_finishes_the_stream_that_it_is_in(chat: ServingSpace) -> None:
    pod = chat.ready_pods()[0]
    stream = Stream(pod_url(pod), tokens_of(pod_url(pod), 10))
    stream.start()
    assert stream.began.wait(30)
    name = pod["metadata"]["name"]
    with Callers(chat.service_url()) as callers:
        chat.delete(f"/api/v1/{{}}/pods/{name}")
        assert stream.is_alive(), "it ended too early to tell"
        assert stream.finished()
        chat.wait("the pod is gone", lambda: chat.find(f"/api/v1/{{}}/pods/{name}") is None, 60)
        chat.wait("another one takes its place", lambda: len(chat.ready_pods()) == 2, 180)
    assert callers.failures == []
    assert callers.answered > 0


def test_a_deleted_pool_leaves_what_its_author_brought_and_nothing_else(serving: ServingSpace) -> None:
    kinds = (
        "deployments,replicasets,pods,services,endpointslices,configmaps,secrets,serviceaccounts,networkpolicies,"
        "poddisruptionbudgets"
    )

    def objects() -> set[str]:
        return set(serving.kubectl("get", kinds, "--output=name").split())

    before = objects()
    assert "secret/keys" in before
    serving.apply(serving_pool(replicas=1))
    serving.wait_ready()
    assert "deployment.apps/chat" in objects()
    serving.kubectl("delete", "cap", "chat")
    # The garbage collector looks for new kinds of owners every 30 s; then the pod ends.
    serving.wait("nothing is left", lambda: objects() == before, 180)
