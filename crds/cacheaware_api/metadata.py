"""Metadata that every Kubernetes object has: all fields that an API server sends, so that a misspelt one is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from cacheaware_api.schema import AnnotationMap, Count, DnsLabel, DnsSubdomain, LabelMap, Line, SpecModel


class ObjectMeta(SpecModel):
    name: DnsSubdomain
    namespace: DnsLabel | None = None
    labels: LabelMap | None = None
    annotations: AnnotationMap | None = None
    uid: Line | None = None
    resource_version: Line | None = None
    generation: Count | None = None
    creation_timestamp: Line | None = None
    deletion_timestamp: Line | None = None
    deletion_grace_period_seconds: Count | None = None
    finalizers: tuple[Line, ...] = ()
    owner_references: tuple[Any, ...] = ()
    managed_fields: tuple[Any, ...] = ()
    generate_name: Line | None = None
    self_link: Line | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_empty_timestamp(cls, data: Any) -> Any:
        """`kubectl create --dry-run -o yaml` writes `creationTimestamp: null`, and every API server takes it."""
        if isinstance(data, Mapping) and data.get("creationTimestamp", "") is None:
            return {key: value for key, value in data.items() if key != "creationTimestamp"}
        return data
