"""What a pool may ask for that one machine does not have is refused by name; what has no effect there is noticed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_operator.one_machine import not_on_one_machine, without_effect
from cacheaware_operator.plan import Wanted


def with_field(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(lambda node, part: node[part], parents, spec)[last] = value  # type: ignore[index]  # plain JSON
    return spec


@pytest.mark.parametrize(
    ("path", "value", "begins"),
    [
        pytest.param("model.source", "pvc://models/tiny", "spec.model.source: there are no claims", id="volume"),
        pytest.param(
            "engine.env",
            [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
            "spec.engine.env[0].valueFrom",
            id="variable from a secret",
        ),
    ],
)
def test_what_is_not_on_one_machine_is_refused_by_name(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any, begins: str
) -> None:
    (reason,) = not_on_one_machine(make_wanted(with_field(spec, path, value)).spec)
    assert reason.startswith(begins)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("tiers.0.batchingWindow", "5ms", id="window"),
        pytest.param("tiers.0.admission", "Queue", id="queue"),
        pytest.param("tiers.0.admission", "Reject", id="reject"),
        pytest.param(
            "identity",
            {"type": "TrustedHeaders", "trustedHeaders": {"secretRef": {"name": "gateway"}}},
            id="gateway",
        ),
        pytest.param("rebalancing", {"mode": "Auto"}, id="rebalancing"),
        pytest.param("engine.kvCache.dtype", "INT8", id="dtype"),
        pytest.param("model.source", "hf://org/model", id="hub"),
    ],
)
def test_what_it_can_do_is_taken(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any
) -> None:
    assert not_on_one_machine(make_wanted(with_field(spec, path, value)).spec) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        pytest.param("engine.image", "example.com/engine:1", "spec.engine.image", id="image"),
        pytest.param("engine.resources", {"limits": {"cpu": "2"}}, "spec.engine.resources", id="resources"),
        pytest.param("podTemplate", {"nodeSelector": {"disk": "ssd"}}, "spec.podTemplate", id="pod template"),
    ],
)
def test_what_only_a_cluster_has_is_noticed_and_not_refused(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any, field: str
) -> None:
    changed = make_wanted(with_field(spec, path, value)).spec
    (notice,) = without_effect(changed)
    assert notice.startswith(f"{field} has no effect here")
    assert not_on_one_machine(changed) == []


def test_a_plain_pool_needs_no_word(make_wanted: Callable[..., Wanted]) -> None:
    assert without_effect(make_wanted().spec) == []
