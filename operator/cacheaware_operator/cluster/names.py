"""Names, labels and owner of everything a pool consists of, and where things are inside its pods.

Names derive from the pool's name alone. Another object may have one of them already (two pools `a` and `a-peers` want
the same Service): whoever applies objects must look at the owner before it writes.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from cacheaware_api.v1alpha1 import API_VERSION, GROUP, KIND
from cacheaware_operator.plan import Wanted

KubernetesObject = dict[str, Any]

POOL_LABEL = f"{GROUP}/pool"
OPERATOR_LABELS = {"app.kubernetes.io/name": "cacheaware-operator"}
_MANAGED_BY = "cacheaware-operator"

# -- ports and paths inside a pod -------------------------------------------------------------------------------------

HTTP_PORT = 8000  # the sidecar's OpenAI side: what clients, probes and Prometheus see
CONTROL_PORT = 9400
ENGINE_PORT = 8001  # on loopback

RUN_DIR = PurePosixPath("/run/cacheaware")  # shared by engine and sidecar
KV_SOCKET = RUN_DIR / "kv.sock"
DRAINING_MARK = RUN_DIR / "draining"  # there while a sidecar that was told to end still has requests
VIEW_DIR = PurePosixPath("/etc/cacheaware/view")
VIEW_FILE = "view.json"
SECRETS_DIR = PurePosixPath("/etc/cacheaware/secrets")

RUN_VOLUME = "cacheaware-run"
VIEW_VOLUME = "cacheaware-view"
SECRETS_VOLUME = "cacheaware-secrets"
SCRATCH_VOLUME = "cacheaware-scratch"
SHARED_MEMORY_VOLUME = "cacheaware-shm"
PLUGIN_VOLUME = "cacheaware-plugin"

ENGINE_CONTAINER = "engine"
SIDECAR_CONTAINER = "sidecar"
MODEL_CONTAINER = "model"
PLUGIN_CONTAINER = "plugin"

# -- objects ----------------------------------------------------------------------------------------------------------


def deployment(pool: str) -> str:
    return pool


def service(pool: str) -> str:
    """The name that clients use. A Service's name becomes a host name that may not begin with a digit."""
    return pool if pool[0].isalpha() else f"p-{pool}"


def peers_service(pool: str) -> str:
    return f"{service(pool)}-peers"


def service_account(pool: str) -> str:
    return pool


def view_config_map(pool: str) -> str:
    return f"{pool}-view"


def internal_secret(pool: str) -> str:
    return f"{pool}-internal"


def network_policy(pool: str) -> str:
    return pool


def disruption_budget(pool: str) -> str:
    return pool


def monitor(pool: str) -> str:
    return pool


def alerts(pool: str) -> str:
    return pool


# -- metadata ---------------------------------------------------------------------------------------------------------


def selector_labels(pool: str) -> dict[str, str]:
    """What selects the pods of a pool. A Deployment's selector cannot change: neither can this."""
    return {POOL_LABEL: pool}


def selector(pool: str) -> str:
    """The same as text, for `status.selector`."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(pool).items())


def labels(pool: str) -> dict[str, str]:
    """On every object and every pod. No version: a new release of the operator is no reason to write or restart."""
    return selector_labels(pool) | {
        "app.kubernetes.io/name": "cacheaware",
        "app.kubernetes.io/instance": pool,
        "app.kubernetes.io/managed-by": _MANAGED_BY,
    }


def metadata(wanted: Wanted, name: str) -> KubernetesObject:
    """Of an object of the pool. It goes with the pool by its owner reference; there are no finalizers.

    `blockOwnerDeletion` is left out: it needs a right on the pool that nothing else needs.
    """
    return {
        "name": name,
        "namespace": wanted.namespace,
        "labels": labels(wanted.name),
        "ownerReferences": [
            {"apiVersion": API_VERSION, "kind": KIND, "name": wanted.name, "uid": wanted.uid, "controller": True}
        ],
    }
