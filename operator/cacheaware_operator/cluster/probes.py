"""When a part of a pod counts as started, alive and ready, and how it ends without cutting streams.

The kubelet cannot reach the engine's port on loopback, so it runs a probe inside the container. Loading a large model
takes long and is no fault: only the start-up probe waits for it, and an engine that cannot load ends by itself.

The end of a pod: both hooks start at once. The sidecar's leaves a mark, serves on until Services have forgotten the
pod, then refuses new requests and waits for those inside. The engine's waits as long as the mark is there. Then the
kubelet stops the engine, which is idle, and the sidecar last, as it does with native sidecars.
"""

from __future__ import annotations

from typing import Any

from cacheaware_operator.cluster import names

Probe = dict[str, Any]

DEFAULT_GRACE_SECONDS = 120  # a long answer at 20 tokens a second
_FORGOTTEN_SECONDS = 5  # until Services and gateways no longer send to a pod that ends
_STOP_SECONDS = 10  # for two idle processes to end, one after the other
ENGINE_STOP_SECONDS = 5
_LOADING_SECONDS = 3600
_MARK_SECONDS = 2  # between the two hooks' starts

_ENGINE_HEALTH = f"http://127.0.0.1:{names.ENGINE_PORT}/health"
_CONTROL = f"http://127.0.0.1:{names.CONTROL_PORT}"

# vLLM's /health is 200 or, when its core died, 503; before that it does not listen.
_VLLM_HEALTH = f"import urllib.request as r; r.urlopen({_ENGINE_HEALTH!r}, timeout=5)"


def drain_seconds(grace: int) -> int:
    """How long running requests may take to end, out of the pod's whole grace period."""
    return max(1, grace - _FORGOTTEN_SECONDS - _STOP_SECONDS)


# -- engines ----------------------------------------------------------------------------------------------------------


def torch_probes() -> dict[str, Probe]:
    probe = ["python", "-m", "cacheaware_engine.probe", f"--url={_ENGINE_HEALTH}"]
    return _engine_probes(probe, [*probe, "--alive"])


def vllm_probes() -> dict[str, Probe]:
    probe = ["python3", "-c", _VLLM_HEALTH]
    return _engine_probes(probe, probe)


def _engine_probes(ready: list[str], alive: list[str]) -> dict[str, Probe]:
    return {
        "startupProbe": {
            "exec": {"command": ready},
            "periodSeconds": 5,
            "timeoutSeconds": 10,
            "failureThreshold": _LOADING_SECONDS // 5,
        },
        "livenessProbe": {
            "exec": {"command": alive},
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,  # a minute without an answer, not one slow step
        },
    }


def engine_pre_stop(grace: int) -> Probe:
    """Plain shell, which every engine's image has: wait while the sidecar still has requests.

    After a failed liveness probe there is no mark, and the hook ends at once.
    """
    limit = _FORGOTTEN_SECONDS + drain_seconds(grace)
    script = (
        f"sleep {_MARK_SECONDS}; i={_MARK_SECONDS}; "
        f"while [ -e {names.DRAINING_MARK} ] && [ $i -lt {limit} ]; do sleep 1; i=$((i+1)); done"
    )
    return {"preStop": {"exec": {"command": ["sh", "-c", script]}}}


# -- sidecar ----------------------------------------------------------------------------------------------------------


def sidecar_probes() -> dict[str, Probe]:
    """Readiness is the pod's: its engine answers and has acknowledged the quotas."""

    def get(path: str, **settings: int) -> Probe:
        return {"httpGet": {"path": path, "port": names.HTTP_PORT}, **settings}

    return {
        "startupProbe": get("/healthz", periodSeconds=1, timeoutSeconds=5, failureThreshold=120),
        "livenessProbe": get("/healthz", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "readinessProbe": get("/readyz", periodSeconds=2, timeoutSeconds=5, failureThreshold=3),
    }


def sidecar_pre_stop(grace: int) -> Probe:
    hook = (
        f"python -m cacheaware_sidecar.pre_stop --control-url={_CONTROL} --secrets-dir={names.SECRETS_DIR} "
        f"--mark={names.DRAINING_MARK} --delay={_FORGOTTEN_SECONDS} --timeout={drain_seconds(grace)}"
    )
    # The mark comes before Python has started: the engine's hook looks for it after two seconds.
    script = f"touch {names.DRAINING_MARK}; exec {hook}"
    return {"preStop": {"exec": {"command": ["sh", "-c", script]}}}
