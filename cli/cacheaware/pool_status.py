"""`cacheaware status`: ask the sidecars of a running pool for the status that its object would carry in a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from cacheaware import state_file
from cacheaware.state_file import State, StateUnreadable
from cacheaware_api.conditions import ConditionStatus
from cacheaware_api.status import CacheAwarePoolStatus
from cacheaware_api.v1alpha1 import API_VERSION, KIND, parse_spec
from cacheaware_operator.errors import Unreachable
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState, ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import Wanted
from cacheaware_operator.sidecar_client import SidecarClient
from cacheaware_operator.status import pool_status


class NotRunning(Exception):
    """There is no such running pool here; the text says what there is."""


def find(folder: Path, namespace: str, pool: str | None) -> State:
    """The state of a running pool: the named one, or the only one."""
    if pool is None:
        running = [state for state in state_file.read_all(folder) if state.is_running()]
        if len(running) == 1:
            return running[0]
        if not running:
            raise NotRunning("no pool runs here; start one with `cacheaware up -f FILE`")
        names = ", ".join(sorted(f"{state.pool.name} (-n {state.pool.namespace})" for state in running))
        raise NotRunning(f"several pools run here; name one of them: {names}")
    try:
        state = state_file.read(state_file.path_for(namespace, pool, folder))
    except StateUnreadable as error:
        raise NotRunning(str(error)) from None
    # a-b/c and a/b-c share a file, and only one of them can run
    if state is None or (state.pool.namespace, state.pool.name) != (namespace, pool):
        raise NotRunning(f"pool {namespace}/{pool} does not run here; start it with `cacheaware up -f FILE`")
    if not state.is_running():
        raise NotRunning(
            f"pool {namespace}/{pool} does not run: its `cacheaware up` (pid {state.pid}) was killed; start it again"
        )
    return state


async def current_status(state: State) -> CacheAwarePoolStatus:
    """The status now: parts as `up` last saw them, everything else as the sidecars say."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        replicas = await asyncio.gather(
            *(
                _replica(SidecarClient(session, address.control_url, state.token), address.name, state)
                for address in state.replicas
            )
        )
    previous = CacheAwarePoolStatus.model_validate_json(json.dumps(state.status)) if state.status else None
    wanted = Wanted(
        namespace=state.pool.namespace,
        name=state.pool.name,
        uid=state.pool.uid,
        generation=state.pool.generation,
        spec=parse_spec(dict(state.pool.spec)),
    )
    if state.revision is None or previous is None:
        raise NotRunning(f"pool {wanted.namespace}/{wanted.name} is just being started; ask again in a moment")
    effective = {tier.name: tier.effective_percent for tier in previous.tiers}
    return pool_status(
        wanted, state.revision, effective, Snapshot(replicas=tuple(replicas)), previous, datetime.now(UTC)
    )


async def _replica(client: SidecarClient, name: str, state: State) -> ReplicaSnapshot:
    parts = tuple(
        PartSnapshot(
            name=PartName(part.name),
            state=PartState(part.state),
            restarts=part.restarts,
            failures=part.failures,
            message=part.message,
            pid=part.pid,
            log=part.log,
        )
        for part in state.parts
        if part.replica == name
    )
    try:
        status = await client.status()
    except Unreachable:
        return ReplicaSnapshot(name, parts)
    return ReplicaSnapshot(name, parts, ready=await client.ready(), status=status)


def as_object(state: State, status: CacheAwarePoolStatus) -> dict[str, Any]:
    """The whole object, as `kubectl get -o yaml` shows it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": state.pool.name,
            "namespace": state.pool.namespace,
            "uid": state.pool.uid,
            "generation": state.pool.generation,
        },
        "spec": state.pool.spec,
        "status": status.model_dump(mode="json", exclude_none=True),
    }


def to_json(pool: Mapping[str, Any]) -> str:
    return json.dumps(pool, indent=2)


def to_yaml(pool: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(pool), sort_keys=False, allow_unicode=True).rstrip()


def condition(status: CacheAwarePoolStatus, type_: str) -> str:
    """`True`, `False` or `Unknown`, for one column."""
    return next((each.status for each in status.conditions if each.type == type_), ConditionStatus.UNKNOWN)
