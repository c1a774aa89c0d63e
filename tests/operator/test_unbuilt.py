"""Valid fields that this release does not act on are refused by name; cluster-only ones are noticed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_operator.plan import Wanted
from cacheaware_operator.unbuilt import cluster_only, not_built_in_a_cluster, not_built_yet


def with_field(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(lambda node, part: node[part], parents, spec)[last] = value  # type: ignore[index]  # plain JSON
    return spec


@pytest.mark.parametrize(
    ("path", "value", "begins"),
    [
        pytest.param("engine.kvCache.dtype", "INT8", "spec.engine.kvCache.dtype: INT8", id="int8"),
        pytest.param("engine.kvCache.dtype", "FP8", "spec.engine.kvCache.dtype: FP8", id="fp8"),
        pytest.param("model.source", "pvc://models/tiny", "spec.model.source: pvc://", id="volume"),
        pytest.param("tiers.0.batchingWindow", "5ms", "spec.tiers[0] (gold).batchingWindow", id="window"),
        pytest.param(
            "engine.env",
            [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
            "spec.engine.env[0].valueFrom",
            id="variable from a secret",
        ),
    ],
)
def test_what_is_not_built_yet_is_refused_by_name(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any, begins: str
) -> None:
    (reason,) = not_built_yet(make_wanted(with_field(spec, path, value)).spec)
    assert reason.startswith(begins)
    assert "not built yet: " in reason


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("tiers.0.batchingWindow", "0s", id="never held"),
        pytest.param("tiers.0.batchingWindow", "0ms", id="never held, in milliseconds"),
        pytest.param("tiers.0.admission", "Queue", id="queue"),
        pytest.param("tiers.0.admission", "Reject", id="reject"),
        pytest.param(
            "identity",
            {"type": "TrustedHeaders", "trustedHeaders": {"secretRef": {"name": "gateway"}}},
            id="gateway",
        ),
        pytest.param("rebalancing", {"mode": "Auto"}, id="rebalancing"),
        pytest.param("engine.kvCache.dtype", "Auto", id="compute dtype"),
        pytest.param("model.source", "hf://org/model", id="hub"),
    ],
)
def test_values_that_ask_for_nothing_more_are_taken(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any
) -> None:
    assert not_built_yet(make_wanted(with_field(spec, path, value)).spec) == []


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
    (notice,) = cluster_only(changed)
    assert notice.startswith(f"{field} has no effect here")
    assert not_built_yet(changed) == []


def test_a_plain_pool_needs_no_word(make_wanted: Callable[..., Wanted]) -> None:
    assert cluster_only(make_wanted().spec) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("model.source", "pvc://models/tiny", id="volume"),
        pytest.param(
            "engine.env",
            [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
            id="variable from a secret",
        ),
    ],
)
def test_a_cluster_does_what_one_machine_cannot(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any
) -> None:
    wanted = make_wanted(with_field(spec, path, value))
    assert not_built_yet(wanted.spec)
    assert not_built_in_a_cluster(wanted.spec) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("tiers.0.batchingWindow", "5ms", id="window"),
        pytest.param("engine", {"type": "Torch", "kvCache": {"dtype": "INT8"}}, id="dtype"),
    ],
)
def test_what_is_built_nowhere_is_refused_in_a_cluster_too(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], path: str, value: Any
) -> None:
    wanted = make_wanted(with_field(spec | {"engine": {"type": "Torch"}}, path, value))
    (sentence,) = not_built_in_a_cluster(wanted.spec)
    assert path.rsplit(".", 1)[-1] in sentence
    assert "not built yet" in sentence


@pytest.mark.parametrize("dtype", ["Auto", "FP8", "INT8"])
def test_a_cluster_runs_vllm_with_any_dtype_of_its_cache(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any], dtype: str
) -> None:
    engine = {"type": "VLLM", "kvCache": {"dtype": dtype}}
    assert not_built_in_a_cluster(make_wanted(spec | {"engine": engine}).spec) == []
