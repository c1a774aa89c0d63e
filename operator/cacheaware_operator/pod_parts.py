"""What a pod's status says of the two parts of a replica. Pure.

Readiness is the kubelet's word, which asks the sidecar; why a part is not ready is read from its container.
"""

from __future__ import annotations

from typing import Any

from cacheaware_operator.cluster.names import ENGINE_CONTAINER, MODEL_CONTAINER, SIDECAR_CONTAINER
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState
from cacheaware_operator.kinds import Object

_LONGEST = 300  # of a message


def counts(pod: Object) -> bool:
    """Whether it is a replica: one that ends, or was evicted, is none any more."""
    return not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") not in ("Failed", "Succeeded")


def is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions") or ())


def address(pod: Object) -> str | None:
    """Its IP, once it has one."""
    ip: str | None = pod["status"].get("podIP")
    return ip or None


def parts(pod: Object) -> tuple[PartSnapshot, PartSnapshot]:
    status, name = pod["status"], pod["metadata"]["name"]
    waits_for = _not_scheduled(status)
    containers = {each["name"]: each for each in status.get("containerStatuses") or ()}
    containers |= {each["name"]: each for each in status.get("initContainerStatuses") or ()}
    engine = _part(PartName.ENGINE, containers.get(ENGINE_CONTAINER), waits_for, name)
    fetch = containers.get(MODEL_CONTAINER)
    if fetch is not None and not _has_ended_well(fetch) and engine.state is PartState.STARTING:
        said = _part(PartName.ENGINE, fetch, waits_for, name, MODEL_CONTAINER)
        engine = said if said.message else PartSnapshot(PartName.ENGINE, said.state, message="its model is fetched")
    return engine, _part(PartName.SIDECAR, containers.get(SIDECAR_CONTAINER), waits_for, name)


def _part(
    part: PartName, container: dict[str, Any] | None, waits_for: str, pod: str, name: str | None = None
) -> PartSnapshot:
    if container is None:
        return PartSnapshot(part, PartState.STARTING, message=waits_for)
    restarts: int = container.get("restartCount", 0)
    log = f"kubectl logs {pod} -c {name or part} --previous"
    state = container.get("state") or {}
    if (waiting := state.get("waiting")) is not None:
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        words = f"{reason}: {message}"[:_LONGEST].strip(": ")
        if reason == "CrashLoopBackOff":
            ended = _how_it_ended((container.get("lastState") or {}).get("terminated"))
            return PartSnapshot(part, PartState.RESTARTING, restarts, restarts, ended, log=log)
        return PartSnapshot(part, PartState.STARTING, restarts, message=words)
    if (ended_with := state.get("terminated")) is not None:
        return PartSnapshot(part, PartState.RESTARTING, restarts, message=_how_it_ended(ended_with), log=log)
    if container.get("ready"):
        return PartSnapshot(part, PartState.READY, restarts)
    started = container.get("started") is True
    return PartSnapshot(part, PartState.NOT_READY if started else PartState.STARTING, restarts)


def _how_it_ended(terminated: dict[str, Any] | None) -> str:
    if terminated is None:
        return "ended"
    words = f"{terminated.get('reason', '')} {terminated.get('message', '')}".strip()
    return f"ended with exit code {terminated.get('exitCode')}" + (f" ({words[-_LONGEST:]})" if words else "")


def _has_ended_well(container: dict[str, Any]) -> bool:
    terminated = (container.get("state") or {}).get("terminated")
    return terminated is not None and terminated.get("exitCode") == 0


def _not_scheduled(status: Object) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return f"no node takes the pod: {condition.get('message', '')}"[:_LONGEST].rstrip(": ")
    return ""
