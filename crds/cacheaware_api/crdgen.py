"""`python -m cacheaware_api.crdgen` writes `crds/cacheawarepools.yaml`, the definition that an API server installs.

The models are the source: their JSON Schema becomes a structural schema, as Kubernetes wants it, and the rules of `cel`
go where they belong. With `--check` nothing is written: a file that differs is shown as a diff, with exit code 1.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from cacheaware_api import cel, defaults, v1alpha1
from cacheaware_api.cel import Place
from cacheaware_api.conditions import ConditionType
from cacheaware_api.v1alpha1 import CacheAwarePool

Schema: TypeAlias = dict[str, Any]

FILE = Path("crds/cacheawarepools.yaml")
_HEADER = "# Generated from crds/cacheaware_api: edit there, then run `make crd`.\n"

_LIST_MAPS: Mapping[Place, str] = {
    ("spec", "tiers"): "name",
    ("spec", "publicPrefixes"): "name",
    ("spec", "engine", "env"): "name",
    ("status", "tiers"): "name",
    ("status", "conditions"): "type",
}
"""Lists whose items have a name that is theirs alone: two owners may each hold some of the items."""

_OF_THE_API_SERVER: Mapping[str, Schema] = {
    "apiVersion": {"type": "string", "description": f"Always {v1alpha1.API_VERSION}."},
    "kind": {"type": "string", "description": f"Always {v1alpha1.KIND}."},
}

_UNSAID = ("title", "$defs", "default", "propertyNames")
"""What a structural schema does not say. A default would be written into users' objects for good."""


def definition() -> Schema:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{v1alpha1.PLURAL}.{v1alpha1.GROUP}"},
        "spec": {
            "group": v1alpha1.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": v1alpha1.KIND,
                "listKind": f"{v1alpha1.KIND}List",
                "plural": v1alpha1.PLURAL,
                "singular": v1alpha1.SINGULAR,
                "shortNames": list(v1alpha1.SHORT_NAMES),
            },
            "versions": [
                {
                    "name": v1alpha1.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


def render() -> str:
    """The file's content."""
    written = yaml.safe_dump(definition(), sort_keys=False, width=120, allow_unicode=True)
    return _HEADER + written


def _columns() -> list[Schema]:
    return [
        _column("Ready", "string", _condition(ConditionType.READY), "Whether the pool takes requests."),
        _column("Replicas", "integer", ".status.replicas", "Replicas that there are."),
        _column("Tiers", "integer", ".status.tierCount", "How many tiers the pool has."),
        _column("Hit%", "integer", ".status.hitPercent", "Prompt tokens found in the cache."),
        _column("SLA", "string", _condition(ConditionType.SLA_MET), "Whether every tier got what it was promised."),
        _column("Age", "date", ".metadata.creationTimestamp", "Time since the pool was made."),
    ]


def _column(name: str, kind: str, path: str, description: str) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path, "description": description}


def _condition(kind: ConditionType) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].status'


# -- the schema -------------------------------------------------------------------------------------------------------


def schema() -> Schema:
    """The structural schema of a pool."""
    generated = CacheAwarePool.model_json_schema(by_alias=True)
    whole: Schema = _structural(generated, generated["$defs"])
    properties = whole["properties"]
    properties |= _OF_THE_API_SERVER
    # Of the metadata a schema may restrict only the name; the API server knows the rest.
    name = properties["metadata"]["properties"]["name"]
    properties["metadata"] = {"type": "object", "properties": {"name": name}}
    whole["required"] = ["spec"]
    properties["spec"]["properties"]["replicas"]["default"] = defaults.REPLICAS
    for place, key in _LIST_MAPS.items():
        _at(whole, place).update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})
    for place, rule in cel.rules_of_pool():
        _at(whole, place).setdefault("x-kubernetes-validations", []).append(rule.to_json())
    return whole


def _at(found: Schema, place: Place) -> Schema:
    for name in place:
        found = found["items"] if name == "[]" else found["properties"][name]
    return found


def _structural(node: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A node without references, unions with null and what else Kubernetes has its own words for."""
    if reference := node.get("$ref"):
        node = definitions[reference.removeprefix("#/$defs/")] | {k: v for k, v in node.items() if k != "$ref"}
    if alternatives := node.get("anyOf"):
        # optional is absent: no field is nullable
        (inner,) = (each for each in alternatives if each != {"type": "null"})
        outer = {key: value for key, value in node.items() if key != "anyOf"}
        return _structural(inner | outer, definitions)
    written: Schema = {}
    for keyword, value in node.items():
        if keyword in _UNSAID:
            continue
        if keyword == "properties":
            written[keyword] = {name: _structural(each, definitions) for name, each in value.items()}
        elif keyword == "items":
            written[keyword] = _structural(value, definitions)
        elif keyword == "patternProperties":
            ((pattern, each),) = value.items()
            written["additionalProperties"] = _structural(each, definitions)
            names = cel.keys_match(pattern, node["propertyNames"]["maxLength"])
            written["x-kubernetes-validations"] = [names.to_json()]
        elif keyword != "additionalProperties":  # here it only says that unknown fields are refused, as Kubernetes does
            written[keyword] = value
    return written


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cacheaware_api.crdgen", description=str(__doc__).split("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help=f"default: {FILE}, from the repository's root")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 with a diff if the file differs")
    options = parser.parse_args(arguments)
    wanted = render()
    if not options.check:
        if not options.file.parent.is_dir():
            parser.error(f"there is no folder {options.file.parent}: run it from the repository's root, or name a file")
        options.file.write_text(wanted, encoding="utf-8")
        return 0
    found = options.file.read_text(encoding="utf-8") if options.file.exists() else ""
    if found == wanted:
        return 0
    difference = difflib.unified_diff(
        found.splitlines(keepends=True), wanted.splitlines(keepends=True), str(options.file), "as the models have it"
    )
    sys.stdout.writelines(difference)
    print(f"{options.file} is not what the models say: run `make crd` and commit it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
