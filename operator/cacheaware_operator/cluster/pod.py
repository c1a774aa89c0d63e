"""The pod of one replica: the engine, and the sidecar as a native sidecar that starts before it and ends after it.

Nothing of a view, a quota or a key is in here, so that editing those restarts nothing. What is here is what an engine
is started with; a change of it is a rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType
from cacheaware_operator import commands
from cacheaware_operator.cluster import author_template, names, probes, vllm
from cacheaware_operator.cluster.author_template import plain
from cacheaware_operator.cluster.errors import PodRefused
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.model_volume import MODEL_DIR, MODEL_VOLUME, ModelFiles, fetch_arguments, model_files
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.cluster.service_account import service_account_name
from cacheaware_operator.plan import EnginePlan, Wanted

USER = 65532  # as whom all containers run: the socket between engine and sidecar is for one user only

_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",  # a volume with a large model is not walked at every start
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_SCRATCH_DIR = "/tmp"
# A home that can be written to; and a name for the user, which libraries ask for and no image has.
_ENVIRONMENT = {"HOME": _SCRATCH_DIR, "USER": "cacheaware"}

# The sidecar holds bodies of waiting requests: 8 MiB at most each, mostly far smaller.
_SIDECAR_RESOURCES = {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}

_RUN = {"name": names.RUN_VOLUME, "mountPath": str(names.RUN_DIR)}
_SCRATCH = {"name": names.SCRATCH_VOLUME, "mountPath": _SCRATCH_DIR}
_SHARED_MEMORY = {"name": names.SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"}
_VIEW = {"name": names.VIEW_VOLUME, "mountPath": str(names.VIEW_DIR), "readOnly": True}
_SECRETS = {"name": names.SECRETS_VOLUME, "mountPath": str(names.SECRETS_DIR), "readOnly": True}


def build_pod_template(wanted: Wanted, engine: EnginePlan, images: Images) -> KubernetesObject:
    """Raises `PodRefused` where the author's part clashes with ours."""
    spec, template = wanted.spec, wanted.spec.pod_template
    grace = template.termination_grace_period_seconds
    grace = probes.DEFAULT_GRACE_SECONDS if grace is None else grace
    model = model_files(spec)
    engine_container = _engine(wanted, engine, model, images, grace)
    own_mounts = [mount["mountPath"] for mount in engine_container["volumeMounts"]]
    if reasons := tuple(author_template.clashes(template, own_mounts)):
        raise PodRefused(reasons)
    engine_container["volumeMounts"] += [plain(mount) for mount in template.volume_mounts]
    before = [] if model.fetch is None else [_fetch(spec, model.fetch, images)]
    if spec.engine.type is EngineType.VLLM:
        before.append(vllm.plugin_container(images.engine, _CONTAINER_SECURITY))
    return {
        "metadata": author_template.pod_metadata(template, names.labels(wanted.name)),
        "spec": {
            **author_template.placement(template),
            "serviceAccountName": service_account_name(wanted),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # hundreds of variables in a busy namespace, and vLLM takes some for its own
            "terminationGracePeriodSeconds": grace,
            "securityContext": author_template.security_context(template, _POD_SECURITY),
            # The sidecar first: while a model is fetched and loaded it already tells what the pod waits for.
            "initContainers": [_sidecar(wanted, images, grace), *before],
            "containers": [engine_container],
            "volumes": [*_volumes(wanted), *model.volumes, *(dict(volume) for volume in template.volumes)],
        },
    }


# -- containers -------------------------------------------------------------------------------------------------------


def _engine(wanted: Wanted, engine: EnginePlan, model: ModelFiles, images: Images, grace: int) -> KubernetesObject:
    spec = wanted.spec
    mounts = [_RUN, _SCRATCH, *model.mounts]
    plugin_environment = vllm.ENVIRONMENT if spec.engine.type is EngineType.VLLM else {}
    if spec.engine.type is EngineType.VLLM:
        command, arguments = vllm.COMMAND, vllm.vllm_arguments(engine, model)
        health = probes.vllm_probes()
        mounts += [_SHARED_MEMORY, vllm.MOUNT]
    else:
        command = ("python", "-m", "cacheaware_engine")
        # When it is told to end, the hooks have waited for its requests already.
        ending = (f"--drain-timeout={probes.ENGINE_STOP_SECONDS}", *engine.arguments)
        engine = dataclasses.replace(engine, model=model.argument, arguments=ending)
        arguments = commands.engine_arguments(engine, place(wanted.name))
        health = probes.torch_probes()
    return {
        "name": names.ENGINE_CONTAINER,
        "image": images.of_engine(spec),
        "command": list(command),
        "args": [_literal(argument) for argument in arguments],
        "env": _engine_env(spec, {**_ENVIRONMENT, **model.environment, **plugin_environment}),
        "resources": _resources(spec),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": mounts,
        **health,
        "lifecycle": probes.engine_pre_stop(grace),
    }


def _sidecar(wanted: Wanted, images: Images, grace: int) -> KubernetesObject:
    arguments = [*commands.sidecar_arguments(place(wanted.name)), f"--drain-timeout={probes.drain_seconds(grace)}"]
    return {
        "name": names.SIDECAR_CONTAINER,
        "restartPolicy": "Always",  # what makes it a sidecar
        "image": images.sidecar,
        "command": ["python", "-m", "cacheaware_sidecar"],
        "args": [*arguments, "--log-format=json"],
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
        ],
        "resources": _SIDECAR_RESOURCES,
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [_RUN, _VIEW, _SECRETS],
        **probes.sidecar_probes(),
        "lifecycle": probes.sidecar_pre_stop(grace),
    }


def _fetch(spec: CacheAwarePoolSpec, source: str, images: Images) -> KubernetesObject:
    """It may be converted too, which takes the memory that the engine will have."""
    return {
        "name": names.MODEL_CONTAINER,
        "image": images.of_model_fetcher(spec),
        "command": ["python", "-m", "cacheaware_engine.fetch_model"],
        "args": list(fetch_arguments(source)),
        "env": _engine_env(spec, _ENVIRONMENT),
        "resources": _without_devices(_resources(spec)),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [_SCRATCH, {"name": MODEL_VOLUME, "mountPath": str(MODEL_DIR)}],
    }


def place(pool: str) -> commands.ReplicaPlace:
    """Where the parts of a pod find each other: the same in every pod."""
    return commands.ReplicaPlace(
        name=pool,
        host="",  # every address of the pod, of either family
        port=names.HTTP_PORT,
        control_port=names.CONTROL_PORT,
        engine_port=names.ENGINE_PORT,
        kv_socket=Path(names.KV_SOCKET),
        view_file=Path(names.VIEW_DIR / names.VIEW_FILE),
        secrets_dir=Path(names.SECRETS_DIR),
    )


def _literal(argument: str) -> str:
    """Kubernetes would put variables in place of `$(NAME)`; a text is meant as it was written, as on one machine."""
    return argument.replace("$", "$$")


def _engine_env(spec: CacheAwarePoolSpec, own: Mapping[str, str]) -> list[KubernetesObject]:
    """Ours, unless the author gives the same name another value."""
    variables: dict[str, KubernetesObject] = {name: {"name": name, "value": value} for name, value in own.items()}
    for variable in spec.engine.env:
        written = plain(variable)
        if "value" in written:
            written["value"] = _literal(written["value"])
        variables[variable.name] = written
    return list(variables.values())


# -- resources --------------------------------------------------------------------------------------------------------


def _resources(spec: CacheAwarePoolSpec) -> KubernetesObject:
    written: KubernetesObject = plain(spec.engine.resources)
    return written


def _without_devices(resources: KubernetesObject) -> KubernetesObject:
    return {
        kind: {name: amount for name, amount in amounts.items() if not is_device(name)}
        for kind, amounts in resources.items()
    }


def is_device(resource: str) -> bool:
    """Whether it is an extended resource, such as nvidia.com/gpu: something of which a node has few."""
    domain, slash, _ = resource.partition("/")
    return bool(slash) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def needs_device(spec: CacheAwarePoolSpec) -> bool:
    resources = spec.engine.resources
    return any(is_device(name) for name in {**(resources.requests or {}), **(resources.limits or {})})


# -- volumes ----------------------------------------------------------------------------------------------------------


def _volumes(wanted: Wanted) -> list[KubernetesObject]:
    volumes: list[KubernetesObject] = [
        {"name": names.RUN_VOLUME, "emptyDir": {}},
        {"name": names.SCRATCH_VOLUME, "emptyDir": {}},
        {"name": names.VIEW_VOLUME, "configMap": {"name": names.view_config_map(wanted.name)}},
        {
            "name": names.SECRETS_VOLUME,
            "secret": {"secretName": names.internal_secret(wanted.name), "defaultMode": 0o440},
        },
    ]
    if wanted.spec.engine.type is EngineType.VLLM:
        volumes += [{"name": names.SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}}, vllm.VOLUME]
    return volumes
