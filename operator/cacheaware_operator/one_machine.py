"""Fields that mean something in a cluster only: refused by name where they ask for what one machine does not have,
noticed where they have no effect. Pure.

`cacheaware validate` accepts them (without `--local`), because the object is right.
"""

from __future__ import annotations

from collections.abc import Iterator

from cacheaware_api.v1alpha1 import CacheAwarePoolSpec


def not_on_one_machine(spec: CacheAwarePoolSpec) -> list[str]:
    """One sentence for each field that local processes cannot act on, with what to write instead."""
    return list(_refusals(spec))


def _refusals(spec: CacheAwarePoolSpec) -> Iterator[str]:
    if spec.model.source.startswith("pvc://"):
        yield "spec.model.source: there are no claims on one machine: use file:///path, pypi://package or hf://org/repo"
    for index, variable in enumerate(spec.engine.env):
        if variable.value_from is not None:
            yield f"spec.engine.env[{index}].valueFrom: not on one machine: write the value of {variable.name} itself"


def without_effect(spec: CacheAwarePoolSpec) -> list[str]:
    """One sentence for each field that changes nothing for local processes."""
    notices = []
    if spec.engine.image is not None:
        notices.append("spec.engine.image has no effect here: the engine is the one that is installed")
    if spec.engine.resources.model_fields_set:
        notices.append("spec.engine.resources has no effect here: local processes share the machine")
    if spec.pod_template.model_fields_set:
        notices.append("spec.podTemplate has no effect here: there are no pods")
    return notices
