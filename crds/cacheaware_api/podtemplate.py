"""The parts of a pod that a pool's author may set, and nothing else of it.

The operator builds the pod: containers, probes, ports and the sidecar are its own. What Kubernetes checks itself
(affinity, volumes, …) is passed on as written; here it only has to be JSON without null.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cacheaware_api.schema import (
    DATA_KEY,
    ENV_NAME,
    ONE_LINE,
    QUALIFIED_NAME,
    TEXT,
    AnnotationMap,
    DnsLabel,
    DnsSubdomain,
    JsonObject,
    LabelMap,
    Line,
    Quantity,
    SpecModel,
    StrictBool,
    StrictInt,
    StrictStr,
)


class LocalReference(SpecModel):
    """An object of the pool's own namespace."""

    name: DnsSubdomain = Field(description="Name of the object, in the pool's namespace.")


class KeyReference(LocalReference):
    """One key of a ConfigMap or Secret of the pool's own namespace."""

    key: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=DATA_KEY)] = Field(
        description="Key of the entry in its data."
    )


class OptionalKeyReference(KeyReference):
    optional: StrictBool | None = Field(default=None, description="Whether the entry may be missing.")


class FieldReference(SpecModel):
    field_path: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=ONE_LINE)] = Field(
        description="Path of a field of the pod, such as metadata.name."
    )


class EnvVarSource(SpecModel):
    secret_key_ref: OptionalKeyReference | None = Field(default=None, description="An entry of a Secret.")
    config_map_key_ref: OptionalKeyReference | None = Field(default=None, description="An entry of a ConfigMap.")
    field_ref: FieldReference | None = Field(default=None, description="A field of the pod itself.")


class EnvVar(SpecModel):
    """An environment variable of the engine: a value, or where to take it from."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=ENV_NAME)] = Field(
        description="Name of the variable."
    )
    value: Annotated[StrictStr, Field(max_length=32768, pattern=TEXT)] | None = Field(
        default=None, description="Its value; absent, without valueFrom: empty."
    )
    value_from: EnvVarSource | None = Field(default=None, description="Where its value comes from, instead of value.")


ResourceMap = Annotated[
    dict[Annotated[StrictStr, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)], Quantity],
    Field(max_length=16),
]


class Resources(SpecModel):
    """What the engine's container asks of its node, as for any container."""

    requests: ResourceMap | None = Field(default=None, description="What the node must have free.")
    limits: ResourceMap | None = Field(default=None, description="What the container may use at most.")


class PodMetadata(SpecModel):
    labels: LabelMap | None = Field(default=None, description="Labels added to the pods.")
    annotations: AnnotationMap | None = Field(default=None, description="Annotations added to the pods.")


class Toleration(SpecModel):
    key: Annotated[StrictStr, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)] | None = Field(
        default=None, description="Taint that is tolerated; absent: every one."
    )
    operator: Literal["Equal", "Exists", "Lt", "Gt"] | None = Field(
        default=None, description="How key and value are compared; absent: Equal."
    )
    value: Annotated[StrictStr, Field(max_length=63, pattern=ONE_LINE)] | None = Field(
        default=None, description="Value that the taint must have."
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect that is tolerated; absent: every one."
    )
    toleration_seconds: Annotated[StrictInt, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="How long a NoExecute taint is tolerated; absent: for ever."
    )


class VolumeMount(SpecModel):
    name: DnsLabel = Field(description="Name of one of the volumes.")
    mount_path: Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=ONE_LINE)] = Field(
        description="Where the engine sees it."
    )
    sub_path: Line | None = Field(default=None, description="Folder of the volume to mount instead of its root.")
    read_only: StrictBool | None = Field(default=None, description="Whether the engine may not write to it.")


class PodTemplate(SpecModel):
    """What the pool's pods get besides what the operator builds."""

    metadata: PodMetadata | None = Field(default=None, description="Labels and annotations of the pods.")
    node_selector: LabelMap | None = Field(default=None, description="Labels that a node must have.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=64)] = Field(
        default=(), description="Taints of nodes that the pods tolerate."
    )
    affinity: JsonObject | None = Field(default=None, description="Affinity rules, as in a pod.")
    topology_spread_constraints: Annotated[tuple[JsonObject, ...], Field(max_length=16)] = Field(
        default=(), description="How the pods spread over nodes and zones, as in a pod."
    )
    priority_class_name: DnsSubdomain | None = Field(default=None, description="PriorityClass of the pods.")
    runtime_class_name: DnsSubdomain | None = Field(default=None, description="RuntimeClass of the pods.")
    service_account_name: DnsSubdomain | None = Field(
        default=None, description="ServiceAccount of the pods. They need no permissions."
    )
    image_pull_secrets: Annotated[tuple[LocalReference, ...], Field(max_length=16)] = Field(
        default=(), description="Secrets to pull the images with."
    )
    volumes: Annotated[tuple[JsonObject, ...], Field(max_length=32)] = Field(
        default=(), description="Volumes, as in a pod."
    )
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(max_length=32)] = Field(
        default=(), description="Where the engine's container mounts them."
    )
    security_context: JsonObject | None = Field(default=None, description="Security context of the pods, as in a pod.")
    termination_grace_period_seconds: Annotated[StrictInt, Field(ge=0, le=86400)] | None = Field(
        default=None, description="How long running requests have to end before the pod is killed."
    )
