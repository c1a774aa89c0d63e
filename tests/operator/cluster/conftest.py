"""A pool of every kind, and the objects it becomes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.internal_secret import InternalSecret
from cacheaware_operator.cluster.objects import Discovered, OptionalKind, build_objects
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.plan import Wanted, plan_pool

IMAGES = Images(engine="example.test/engine:1", sidecar="example.test/sidecar:1")
INTERNAL = InternalSecret(salt_key="salt", control_token="token", hop_key="hop")
EVERYTHING = Discovered(frozenset(OptionalKind))

Object = dict[str, Any]


class Built:
    """The objects of one pool, by kind and name."""

    def __init__(self, objects: tuple[Object, ...]) -> None:
        self.objects = objects

    def __call__(self, kind: str, name: str | None = None) -> Object:
        (found,) = [each for each in self.objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
        return found

    @property
    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.objects]

    @property
    def template(self) -> Object:
        found: Object = self("Deployment")["spec"]["template"]
        return found

    @property
    def engine(self) -> Object:
        (container,) = self.template["spec"]["containers"]
        found: Object = container
        return found

    @property
    def sidecar(self) -> Object:
        found: Object = self.template["spec"]["initContainers"][0]
        return found

    def volume(self, name: str) -> Object | None:
        return next((volume for volume in self.template["spec"]["volumes"] if volume["name"] == name), None)

    def environment(self) -> dict[str, Any]:
        return {variable["name"]: variable.get("value") for variable in self.engine["env"]}


def built(wanted: Wanted, **changes: Any) -> Built:
    arguments: dict[str, Any] = {"images": IMAGES, "internal": INTERNAL, "discovered": EVERYTHING, **changes}
    return Built(build_objects(wanted, plan_pool(wanted, Snapshot()), **arguments))


BuildPool = Callable[..., Built]


@pytest.fixture
def build_pool(make_wanted: Callable[..., Wanted], spec: dict[str, Any]) -> BuildPool:
    """`build_pool(engine={"resources": …}, podTemplate={…})`: the pool of `spec` with fields of it merged over."""

    def build(wanted: dict[str, Any] | None = None, **fields: Any) -> Built:
        merged = copy.deepcopy(spec)
        for name, value in fields.items():
            old = merged.get(name)
            merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        return built(make_wanted(merged, **(wanted or {})))

    return build
