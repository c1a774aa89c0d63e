"""vLLM in a pod: its unmodified image, started with the pool's flags, and our plugin copied in from beside it.

An init container of our engine image copies the plugin into a volume that vLLM's container has on its PYTHONPATH; the
image itself is what its authors made.
"""

from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath
from typing import Any

from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.model_volume import ModelFiles
from cacheaware_operator.plan import EnginePlan
from cacheaware_operator.vllm_flags import vllm_flags

# Not the image's own entry point: that has changed between releases, this module has not.
COMMAND = ("python3", "-m", "vllm.entrypoints.openai.api_server")

PLUGIN_DIR = PurePosixPath("/opt/cacheaware")
SCHEDULER = "cacheaware_engine.vllm_plugin.entry.Scheduler"
VOLUME: dict[str, Any] = {"name": names.PLUGIN_VOLUME, "emptyDir": {}}
MOUNT: dict[str, Any] = {"name": names.PLUGIN_VOLUME, "mountPath": str(PLUGIN_DIR), "readOnly": True}
ENVIRONMENT = {"PYTHONPATH": str(PLUGIN_DIR), "CACHEAWARE_KV_SOCKET": str(names.KV_SOCKET)}

_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}  # it copies thirty files


def vllm_arguments(engine: EnginePlan, model: ModelFiles) -> tuple[str, ...]:
    engine = dataclasses.replace(engine, model=model.argument)
    return (*vllm_flags(engine, names.ENGINE_PORT, model.revision), f"--scheduler-cls={SCHEDULER}")


def plugin_container(image: str, security: dict[str, Any]) -> names.KubernetesObject:
    return {
        "name": names.PLUGIN_CONTAINER,
        "image": image,
        "command": ["python", "-m", "cacheaware_engine.vllm_plugin.install"],
        "args": [str(PLUGIN_DIR)],
        "resources": _RESOURCES,
        "securityContext": security,
        "volumeMounts": [{"name": names.PLUGIN_VOLUME, "mountPath": str(PLUGIN_DIR)}],
    }
