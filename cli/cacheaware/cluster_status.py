"""`cacheaware status --context`: a pool of a cluster, with the status that its operator wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import urllib3
from kubernetes import client, config
from pydantic import ValidationError

from cacheaware.pool_status import NotRunning
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_api.v1alpha1 import GROUP, PLURAL, VERSION

_TIMEOUT = (5, 20)  # seconds to connect, to answer


def find(context: str, namespace: str | None, pool: str | None) -> dict[str, Any]:
    """The object: the named one, or the only one of the namespace (the context's, where None). Raises `NotRunning`."""
    try:
        contexts, _ = config.list_kube_config_contexts()  # type: ignore[no-untyped-call]  # not annotated there
        known = {each["name"]: each["context"] for each in contexts}
        if context not in known:
            raise NotRunning(f"--context {context}: the kubeconfig has {', '.join(known) or 'none'}")
        api = client.CustomObjectsApi(config.new_client_from_config(context=context))  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise NotRunning(f"--context {context}: {error}") from None
    namespace = namespace or known[context].get("namespace") or "default"
    try:
        listed: Any = api.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, _request_timeout=_TIMEOUT)
    except client.ApiException as error:
        if error.status == 404:
            raise NotRunning(f"the cluster does not know {PLURAL}.{GROUP}: kubectl apply -f crds/") from None
        raise NotRunning(f"the cluster answered {error.status} {error.reason} about pools in {namespace}") from None
    except urllib3.exceptions.HTTPError as error:
        raise NotRunning(f"the cluster of context {context} does not answer: {error}") from None
    pools: dict[str, dict[str, Any]] = {each["metadata"]["name"]: each for each in listed["items"]}
    if pool is None and len(pools) == 1:
        (found,) = pools.values()
        return found
    if pool is None or pool not in pools:
        there = ", ".join(sorted(pools)) or "none"
        which = "name one of its pools" if pool is None else f"there is no pool {pool}"
        raise NotRunning(f"namespace {namespace}: {which}; there are: {there}")
    return pools[pool]


def read_status(pool: Mapping[str, Any]) -> CacheAwarePoolStatus:
    """Raises `NotRunning` where no operator has written one yet, or one of another release has."""
    if not pool.get("status"):
        raise NotRunning(f"pool {pool['metadata']['name']} has no status yet: is the operator running?")
    try:
        return CacheAwarePoolStatus.model_validate(pool["status"])
    except ValidationError as error:
        raise NotRunning(f"its status is of another release: kubectl get shows it; {error}") from None
