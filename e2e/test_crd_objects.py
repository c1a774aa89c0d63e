"""Pools that a real API server took: what it keeps of them, and what kubectl does with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster import APPLY_PATCH, MERGE_PATCH, Cluster, Object

from cacheaware_api import v1alpha1
from cacheaware_api.testing import full_spec, full_status

SMALLEST: Object = {
    "model": {"name": "m", "source": "pypi://m"},
    "engine": {"type": "Torch"},
    "tiers": [{"name": "only"}],
    "identity": {"type": "Open"},
}


def pool(spec: Object, name: str = "chat") -> Object:
    return {
        "apiVersion": v1alpha1.API_VERSION,
        "kind": v1alpha1.KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.fixture
def pools_path(installed: Cluster, namespace: str) -> str:
    return f"/apis/{v1alpha1.API_VERSION}/namespaces/{namespace}/{v1alpha1.PLURAL}"


@pytest.fixture
def chat(installed: Cluster, pools_path: str) -> str:
    """The path of a stored pool that has every field."""
    assert installed.request("POST", pools_path, pool(full_spec())).ok
    return f"{pools_path}/chat"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a pool, as its author would write it."""
    written = tmp_path / "pool.yaml"
    written.write_text(yaml.safe_dump(pool(full_spec())))
    return written


def test_the_spec_is_kept_as_it_was_written(installed: Cluster, chat: str) -> None:
    assert installed.get(chat)["spec"] == full_spec()


def test_absent_fields_stay_absent_but_for_replicas(installed: Cluster, pools_path: str) -> None:
    assert installed.request("POST", pools_path, pool(SMALLEST)).ok
    assert installed.get(f"{pools_path}/chat")["spec"] == {**SMALLEST, "replicas": 1}


def test_every_field_of_the_status_is_kept(installed: Cluster, chat: str) -> None:
    assert installed.request("PATCH", f"{chat}/status", {"status": full_status()}, MERGE_PATCH).ok
    assert installed.get(chat)["status"] == full_status()


def test_status_and_spec_are_written_apart(installed: Cluster, chat: str) -> None:
    both = {"status": full_status(), "spec": {"publicPercent": 11}}
    assert installed.request("PATCH", chat, both, MERGE_PATCH).ok
    assert "status" not in installed.get(chat)
    assert installed.request("PATCH", f"{chat}/status", {"spec": {"publicPercent": 12}}, MERGE_PATCH).ok
    assert installed.get(chat)["spec"]["publicPercent"] == 11


def test_generation_counts_changes_of_the_spec_only(installed: Cluster, chat: str) -> None:
    installed.request("PATCH", f"{chat}/status", {"status": full_status()}, MERGE_PATCH)
    assert installed.get(chat)["metadata"]["generation"] == 1
    installed.request("PATCH", chat, {"spec": {"publicPercent": 11}}, MERGE_PATCH)
    assert installed.get(chat)["metadata"]["generation"] == 2


def test_two_owners_may_each_write_a_tier(installed: Cluster, pools_path: str) -> None:
    for owner, tier in (("platform", "gold"), ("search", "silver")):
        spec: Any = {**SMALLEST, "tiers": [{"name": tier, "quota": {"nominalPercent": 50}}]}
        applied = installed.request("PATCH", f"{pools_path}/chat", pool(spec), APPLY_PATCH, fieldManager=owner)
        assert applied.ok, applied.body
    assert [tier["name"] for tier in installed.get(f"{pools_path}/chat")["spec"]["tiers"]] == ["gold", "silver"]


# -- kubectl ----------------------------------------------------------------------------------------------------------


def test_client_side_apply_works_and_a_second_one_changes_nothing(
    installed: Cluster, namespace: str, file: Path
) -> None:
    apply = ("apply", "--namespace", namespace, "-f", file)
    assert installed.kubectl(*apply).stdout.strip() == "cacheawarepool.cacheaware.dev/chat created"
    assert installed.kubectl(*apply).stdout.strip() == "cacheawarepool.cacheaware.dev/chat unchanged"


def test_kubectl_refuses_a_misspelt_field(installed: Cluster, namespace: str, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool({**full_spec(), "teirs": []})))
    refused = installed.kubectl("apply", "--namespace", namespace, "-f", file, check=False)
    assert refused.returncode == 1
    assert 'unknown field "spec.teirs"' in refused.stderr


def test_scale_sets_the_replicas_within_their_bounds(installed: Cluster, namespace: str, chat: str) -> None:
    def scale(replicas: int, check: bool = True) -> str:
        done = installed.kubectl("scale", "cap/chat", f"--replicas={replicas}", "--namespace", namespace, check=check)
        return done.stdout + done.stderr

    assert "scaled" in scale(3)
    assert installed.get(chat)["spec"] == {**full_spec(), "replicas": 3}
    assert "spec.replicas" in scale(10_001, check=False)
    assert installed.get(chat)["spec"]["replicas"] == 3


def test_autoscalers_read_replicas_and_selector(installed: Cluster, chat: str) -> None:
    installed.request("PATCH", f"{chat}/status", {"status": full_status()}, MERGE_PATCH)
    scale = installed.get(f"{chat}/scale")
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 2, "selector": "app.kubernetes.io/instance=chat"}


def test_get_answers_in_one_line_whether_the_pool_is_well(installed: Cluster, namespace: str, chat: str) -> None:
    installed.request("PATCH", f"{chat}/status", {"status": full_status()}, MERGE_PATCH)
    header, row = installed.kubectl("get", "cap", "--namespace", namespace).stdout.splitlines()
    assert header.split() == ["NAME", "READY", "REPLICAS", "TIERS", "HIT%", "SLA", "AGE"]
    assert row.split()[:-1] == ["chat", "True", "2", "2", "61", "False"]


def test_pools_are_in_no_category(installed: Cluster, namespace: str, chat: str) -> None:
    assert "chat" not in installed.kubectl("get", "all", "--namespace", namespace).stdout


def test_wait_sees_the_condition_ready(installed: Cluster, namespace: str, chat: str) -> None:
    installed.request("PATCH", f"{chat}/status", {"status": full_status()}, MERGE_PATCH)
    done = installed.kubectl("wait", "--for=condition=Ready", "cap/chat", "--namespace", namespace, "--timeout=60s")
    assert "condition met" in done.stdout


@pytest.mark.parametrize(
    ("field", "says"),
    [
        pytest.param("cap", "how much KV cache each is guaranteed", id="the object"),
        pytest.param("cap.spec.tiers.quota.lendingLimitPercent", "Absent: all; 0: none.", id="a tier's field"),
        pytest.param("cap.spec.engine.kvCache.memory", "such as 1Gi", id="a quantity"),
        pytest.param("cap.spec.podTemplate.affinity", "as in a pod", id="what is free in form"),
        pytest.param("cap.status.lastRebalance.moves.gainPercent", "Predicted gain", id="a field of the status"),
    ],
)
def test_explain_tells_what_a_field_means(installed: Cluster, field: str, says: str) -> None:
    assert says in " ".join(installed.kubectl("explain", field).stdout.split())


def test_the_openapi_document_has_the_schema(installed: Cluster) -> None:
    """kubectl, editors and the operator's own look at what is installed read this document."""
    document = installed.get(f"/openapi/v3/apis/{v1alpha1.API_VERSION}")
    text = json.dumps(document["components"]["schemas"]["dev.cacheaware.v1alpha1.CacheAwarePool"])
    assert '"effectivePercent"' in text
    assert '"batchingWindow"' in text
