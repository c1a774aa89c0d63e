"""The author's part of the pod (`spec.podTemplate`), laid over ours: what may be added, and what clashes.

Ours wins where the pool depends on it (labels that select, names of volumes, mounts); the author's wins in what is the
cluster's business (where pods run, as whom, how long they may take to end).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from cacheaware_api.podtemplate import PodTemplate
from cacheaware_operator.cluster.names import KubernetesObject

RESERVED_PREFIX = "cacheaware-"  # of volume names


def plain(value: Any) -> Any:
    """A model as YAML has it, without what its author left out."""
    return value.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def pod_metadata(template: PodTemplate, own_labels: Mapping[str, str]) -> KubernetesObject:
    given = template.metadata
    metadata: KubernetesObject = {"labels": {**((given and given.labels) or {}), **own_labels}}
    if given is not None and given.annotations:
        metadata["annotations"] = dict(given.annotations)
    return metadata


def placement(template: PodTemplate) -> KubernetesObject:
    """Fields of a pod's spec that are passed on as they are."""
    fields: KubernetesObject = {
        "nodeSelector": dict(template.node_selector or {}),
        "tolerations": [plain(toleration) for toleration in template.tolerations],
        "affinity": dict(template.affinity or {}),
        "topologySpreadConstraints": [dict(constraint) for constraint in template.topology_spread_constraints],
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "imagePullSecrets": [plain(secret) for secret in template.image_pull_secrets],
    }
    return {name: value for name, value in fields.items() if value}


def security_context(template: PodTemplate, own: KubernetesObject) -> KubernetesObject:
    """Key by key, the author's first: a cluster may prescribe its own users and groups."""
    return {**own, **(template.security_context or {})}


def clashes(template: PodTemplate, own_mounts: Collection[str]) -> Iterator[str]:
    """One sentence for each volume and mount that cannot stand beside ours, of the engine's container."""
    names = set[str]()
    for index, volume in enumerate(template.volumes):
        where = f"spec.podTemplate.volumes[{index}]"
        name = volume.get("name")
        if not isinstance(name, str) or not name:
            yield f"{where}.name: is missing: give the volume a name"
        elif name.startswith(RESERVED_PREFIX):
            yield f"{where}.name: {name}: names that begin with {RESERVED_PREFIX} are the operator's: choose another"
        elif name in names:
            yield f"{where}.name: {name} is there twice: remove one of them"
        else:
            names.add(name)
    taken = {str(PurePosixPath(path)) for path in own_mounts}
    for index, mount in enumerate(template.volume_mounts):
        where = f"spec.podTemplate.volumeMounts[{index}]"
        path = str(PurePosixPath(mount.mount_path))
        if mount.name not in names:
            yield f"{where}.name: {mount.name} is no volume of podTemplate.volumes: add it there"
        if path in taken:
            yield f"{where}.mountPath: {path} is mounted already: choose another path"
        taken.add(path)
