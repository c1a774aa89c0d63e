"""Whether the installed CRD has every field that this release needs."""

import copy
from typing import Any

import pytest

from cacheaware_api import crdgen
from cacheaware_operator.schema_check import missing_fields, schema_problem

GROUP_VERSION_KIND = {"group": "cacheaware.dev", "version": "v1alpha1", "kind": "CacheAwarePool"}


def document(schema: dict[str, Any]) -> dict[str, Any]:
    """As an API server gives it."""
    served = schema | {"x-kubernetes-group-version-kind": [GROUP_VERSION_KIND]}
    return {"components": {"schemas": {"dev.cacheaware.v1alpha1.CacheAwarePool": served, "other": {}}}}


@pytest.fixture
def schema() -> dict[str, Any]:
    return copy.deepcopy(crdgen.schema())


def test_this_releases_own_schema_lacks_nothing(schema: dict[str, Any]) -> None:
    assert schema_problem(document(schema)) is None


def test_a_newer_schema_may_have_more(schema: dict[str, Any]) -> None:
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    assert schema_problem(document(schema)) is None


def test_a_field_that_is_missing_is_named_with_what_to_do(schema: dict[str, Any]) -> None:
    del schema["properties"]["spec"]["properties"]["tiers"]["items"]["properties"]["quota"]["properties"][
        "borrowingLimitPercent"
    ]
    del schema["properties"]["status"]["properties"]["revision"]
    problem = schema_problem(document(schema))
    assert problem is not None
    assert "spec.tiers[].quota.borrowingLimitPercent" in problem
    assert "status.revision" in problem
    assert "kubectl apply -f crds/cacheawarepools.yaml" in problem


def test_a_status_without_any_field_is_told_briefly(schema: dict[str, Any]) -> None:
    schema["properties"]["status"]["properties"] = {}
    problem = schema_problem(document(schema))
    assert problem is not None
    assert "more: kubectl apply" in problem
    assert len(problem) < 400


@pytest.mark.parametrize("found", [None, {"components": {"schemas": {}}}])
def test_a_crd_that_is_not_installed_is_told(found: Any) -> None:
    problem = schema_problem(found)
    assert problem is not None
    assert "is not installed" in problem


def test_where_unknown_fields_are_kept_nothing_is_missing() -> None:
    needed: dict[str, Any] = {"properties": {"a": {"properties": {"b": {}}}}}
    assert list(missing_fields(needed, {"properties": {"a": {}}})) == ["a.b"]
    assert list(missing_fields(needed, {"properties": {"a": {"x-kubernetes-preserve-unknown-fields": True}}})) == []
