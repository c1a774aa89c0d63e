"""The ConfigMap `<pool>-view`: the wanted view as a file, from which a pod starts where no operator runs.

It is written before any sidecar is told, and the number in it is the last one that was used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cacheaware_api import wire
from cacheaware_operator.cluster import names
from cacheaware_operator.cluster.names import KubernetesObject
from cacheaware_operator.plan import Wanted


def build_view_config_map(wanted: Wanted, view: wire.View) -> KubernetesObject:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(wanted, names.view_config_map(wanted.name)),
        "data": {names.VIEW_FILE: json.dumps(wire.to_json(view), indent=1, sort_keys=True, ensure_ascii=False)},
    }


def read_view(data: Mapping[str, str] | None) -> wire.View | None:
    """The view in the `data` of the ConfigMap that is there; None where there is none, or one that nobody can read.

    A broken one counts as missing: the next view then starts at number 1, which sidecars refuse while they hold a
    higher number of the same pool. Whoever pushes it sees that refusal with the number in force.
    """
    try:
        return wire.from_json(wire.View, json.loads((data or {})[names.VIEW_FILE]))
    except (KeyError, ValueError):  # WireError is a ValueError
        return None
