"""Whether the CRD that is installed has every field that this release writes or relies on. Pure.

An older one drops what it does not know without a word, and a limit that was dropped reads as no limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cacheaware_api import crdgen
from cacheaware_operator.kinds import POOL

_SHOWN = 5


def openapi_path() -> str:
    return f"/openapi/v3/apis/{POOL.group}/{POOL.version}"


def schema_problem(document: Any) -> str | None:
    """What is wrong with the installed schema, and what to do; None if nothing is. `document` is the group's OpenAPI v3
    document, or None where the API server has none.
    """
    installed = None if document is None else _schema_of_pools(document)
    if installed is None:
        return f"the CRD {POOL.plural}.{POOL.group} is not installed: kubectl apply -f crds/cacheawarepools.yaml"
    missing = list(missing_fields(crdgen.schema(), installed))
    if not missing:
        return None
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return (
        f"the installed CRD {POOL.plural}.{POOL.group} lacks {', '.join(missing[:_SHOWN])}{more}: "
        "kubectl apply -f crds/cacheawarepools.yaml of this release"
    )


def missing_fields(needed: Mapping[str, Any], installed: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of fields that only `needed` has; what is below a missing field is not told."""
    there = installed.get("properties") or {}
    if not installed.get("x-kubernetes-preserve-unknown-fields"):
        for name, field in (needed.get("properties") or {}).items():
            where = f"{path}.{name}" if path else name
            if name in there:
                yield from missing_fields(field, there[name], where)
            elif path != "metadata":
                yield where
    for inside, mark in (("items", "[]"), ("additionalProperties", "{}")):
        inner, other = needed.get(inside), installed.get(inside)
        if isinstance(inner, Mapping) and isinstance(other, Mapping):
            yield from missing_fields(inner, other, path + mark)


def _schema_of_pools(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = {"group": POOL.group, "version": POOL.version, "kind": POOL.kind}
    for schema in ((document.get("components") or {}).get("schemas") or {}).values():
        if wanted in (schema.get("x-kubernetes-group-version-kind") or ()):
            found: Mapping[str, Any] = schema
            return found
    return None
