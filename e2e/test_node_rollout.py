"""What a rollout and scaling are to those who are being served."""

from __future__ import annotations

from e2e.serving import Callers, ServingSpace, Stream, pod_url, tokens_of
from e2e.space import DEPLOYMENT, POOL


def _settled(chat: ServingSpace) -> bool:
    return chat.settled() and (chat.condition("Ready") or ("",))[0] == "True" and len(chat.ready_pods()) == 2


def test_a_rolling_update_keeps_the_pool_serving(chat: ServingSpace) -> None:
    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    with Callers(chat.service_url()) as callers:
        engine = chat.get(POOL)["spec"]["engine"]
        chat.patch(POOL, {"spec": {"engine": {"args": [*engine["args"], "--max-num-seqs=16"]}}})
        chat.wait(
            "all pods are new",
            lambda: not before & {pod["metadata"]["uid"] for pod in chat.pods()} and _settled(chat),
            270,
        )
    assert callers.failures == []
    assert callers.answered > 0
    assert chat.get(DEPLOYMENT)["status"]["updatedReplicas"] == 2


def test_scaling_down_ends_no_stream(chat: ServingSpace) -> None:
    urls = [pod_url(pod) for pod in chat.ready_pods()]
    streams = [Stream(url, tokens_of(url, 10)) for url in urls]
    for stream in streams:
        stream.start()
    assert all(stream.began.wait(30) for stream in streams)
    chat.kubectl("scale", "cap/chat", "--replicas=1")
    chat.wait("one pod is left", lambda: len(chat.pods()) == 1)
    assert all(stream.finished() for stream in streams)
    chat.wait("the pool says so", lambda: chat.get(POOL)["status"]["replicas"] == 1 and chat.settled(), 60)
    chat.kubectl("scale", "cap/chat", "--replicas=2")
    chat.wait("both are back", lambda: _settled(chat), 180)
