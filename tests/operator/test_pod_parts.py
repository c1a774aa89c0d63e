"""What a pod's status says of engine and sidecar."""

from typing import Any

import pytest

from cacheaware_operator.fleet import PartSnapshot, PartState
from cacheaware_operator.pod_parts import counts, is_ready, parts

RUNNING: dict[str, Any] = {"running": {}}


def container(name: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "ready": False, "restartCount": 0} | more


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "chat-1"},
        "status": {"containerStatuses": list(containers), "initContainerStatuses": list(init), **status},
    }


def engine_of(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **status: Any) -> PartSnapshot:
    return parts(pod(*containers, init=init, **status))[0]


def test_a_running_pod_has_two_ready_parts() -> None:
    engine, sidecar = parts(
        pod(container("engine", RUNNING, ready=True), init=(container("sidecar", RUNNING, ready=True, restartCount=2),))
    )
    assert (engine.state, sidecar.state, sidecar.restarts) == (PartState.READY, PartState.READY, 2)


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        pytest.param(container("engine", RUNNING, started=False), PartState.STARTING, "", id="it loads"),
        pytest.param(container("engine", RUNNING, started=True), PartState.NOT_READY, "", id="it was ready"),
        pytest.param(
            container("engine", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            PartState.STARTING,
            "ImagePullBackOff: no such image",
            id="its image is not there",
        ),
        pytest.param(
            container("engine", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            PartState.RESTARTING,
            "ended with exit code 137 (OOMKilled)",
            id="it was killed",
        ),
        pytest.param(
            container(
                "engine",
                {"waiting": {"reason": "CrashLoopBackOff"}},
                restartCount=7,
                lastState={"terminated": {"exitCode": 1, "message": "no such model"}},
            ),
            PartState.RESTARTING,
            "ended with exit code 1 (no such model)",
            id="it ends again and again",
        ),
    ],
)
def test_why_an_engine_is_not_ready_is_read_from_its_container(
    found: dict[str, Any], state: PartState, words: str
) -> None:
    engine = engine_of(found)
    assert (engine.state, engine.message) == (state, words)
    assert engine.failures == (7 if found["restartCount"] else 0)


def test_a_pod_that_no_node_takes_says_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have a free GPU"}
    assert engine_of(conditions=[condition]).message == "no node takes the pod: 0/3 nodes have a free GPU"


def test_an_engine_waits_for_its_model_to_be_fetched() -> None:
    waiting = container("engine", {"waiting": {"reason": "PodInitializing"}})
    assert engine_of(waiting, init=(container("model", RUNNING),)).message == "its model is fetched"
    failed = container("model", {"terminated": {"exitCode": 1, "message": "no such package"}})
    engine = engine_of(waiting, init=(failed,))
    assert (engine.state, engine.message) == (PartState.RESTARTING, "ended with exit code 1 (no such package)")
    fetched = container("model", {"terminated": {"exitCode": 0}})
    assert engine_of(waiting, init=(fetched,)).message == "PodInitializing"


def test_readiness_is_the_kubelets_word() -> None:
    assert is_ready(pod(conditions=[{"type": "Ready", "status": "True"}]))
    assert not is_ready(pod(conditions=[{"type": "Ready", "status": "False"}]))
    assert not is_ready(pod())


def test_a_pod_that_ends_is_no_replica_any_more() -> None:
    assert counts(pod())
    assert not counts(pod(phase="Failed"))
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not counts(ending)
