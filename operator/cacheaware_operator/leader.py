"""One operator is active: whoever holds the Lease. The state machine is pure; `Leadership` reads and writes the Lease.

As in client-go: nobody trusts another machine's clock. A lease that has not changed for its whole duration, by our own
clock since we saw it, may be taken. The holder gives up sooner, when it could not renew for `RENEW_WITHIN`: so it has
stopped before another begins. An API server that accepts one of two writes (by resource version) decides a race.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from cacheaware_operator.errors import ApiRefused, KubernetesError, LeadershipLost
from cacheaware_operator.kinds import LEASE, Object

log = logging.getLogger(__name__)

DURATION = 15.0  # seconds without a renewal after which others may take the lease
RENEW_WITHIN = 10.0  # seconds without a renewal after which the holder stops
RETRY = 2.0  # between two looks; another takes over at most 17 s after the holder's last renewal


class Step(StrEnum):
    CREATE = "create"  # there is no Lease
    TAKE = "take"  # it is ours, nobody's, or its holder is gone
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Seen:
    """The lease as we saw it last, and since when (our clock) it is like that."""

    version: str
    since: float


def next_step(lease: Object | None, seen: Seen | None, identity: str, now: float) -> tuple[Step, Seen | None]:
    """What to do about the lease that was just read, and what to remember of it."""
    if lease is None:
        return Step.CREATE, None
    version = lease["metadata"]["resourceVersion"]
    if seen is None or seen.version != version:
        seen = Seen(version, now)
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if holder in ("", identity) or now - seen.since >= float(spec.get("leaseDurationSeconds") or DURATION):
        return Step.TAKE, seen
    return Step.WAIT, seen


def may_lead(renewed: float, now: float) -> bool:
    """Whether the holder, whose last successful renewal began at `renewed`, may still act."""
    return now - renewed < RENEW_WITHIN


def held(lease: Object | None, identity: str, name: str, namespace: str, now: datetime) -> dict[str, Any]:
    """The lease with us as its holder."""
    before = dict((lease or {}).get("spec") or {})
    changed = before.get("holderIdentity") != identity
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    metadata = dict((lease or {}).get("metadata") or {"name": name, "namespace": namespace})
    spec = before | {"holderIdentity": identity, "leaseDurationSeconds": int(DURATION), "renewTime": stamp}
    if changed:
        spec |= {
            "acquireTime": stamp,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (lease is not None),
        }
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


class LeaseApi(Protocol):
    async def find(self, path: str) -> Object | None: ...

    async def create(self, path: str, written: Object) -> Object: ...

    async def replace(self, path: str, written: Object) -> Object: ...


class Leadership:
    """`clock` is monotonic; `now` only stamps the lease, for people."""

    def __init__(
        self,
        api: LeaseApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._now = now
        self._seen: Seen | None = None
        self._renewed: float | None = None
        self._another_holds_it = False

    @property
    def leads(self) -> bool:
        return self._renewed is not None and may_lead(self._renewed, self._clock())

    async def acquire(self) -> None:
        """Return once we lead."""
        while not await self._try():  # noqa: ASYNC110  # what is waited for is in the cluster
            await asyncio.sleep(RETRY)
        log.info("%s leads by Lease %s/%s", self._identity, self._namespace, self._name)

    async def keep(self) -> None:
        """Renew until cancelled; raises `LeadershipLost` as soon as we may not act any more."""
        while True:
            await asyncio.sleep(RETRY)
            assert self._renewed is not None, "acquire comes first"
            try:
                async with asyncio.timeout(max(0.0, self._renewed + RENEW_WITHIN - self._clock())):
                    await self._try()
            except TimeoutError:
                pass  # a write that hangs may still arrive, and then only holds the lease a little longer
            if self._another_holds_it:
                self._renewed = None
                raise LeadershipLost(f"Lease {self._namespace}/{self._name} was taken by another")
            if not self.leads:
                raise LeadershipLost(f"Lease {self._namespace}/{self._name} could not be renewed in time")

    async def release(self) -> None:
        """Let another begin at once; to be called when nothing of ours acts any more."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            lease = await self._api.find(LEASE.path(self._namespace, self._name))
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                freed = dict(lease) | {"spec": dict(lease["spec"]) | {"holderIdentity": "", "leaseDurationSeconds": 1}}
                await self._api.replace(LEASE.path(self._namespace, self._name), freed)
        except KubernetesError as error:
            log.warning("could not give up the Lease: %s", error)

    async def _try(self) -> bool:
        """One look; whether we hold the lease after it."""
        began = self._clock()
        try:
            lease = await self._api.find(LEASE.path(self._namespace, self._name))
            step, self._seen = next_step(lease, self._seen, self._identity, self._clock())
            holder = ((lease or {}).get("spec") or {}).get("holderIdentity")
            self._another_holds_it = bool(holder) and holder != self._identity
            if step is Step.WAIT or (self._renewed is not None and self._another_holds_it):
                return False  # whoever led does not fight for it: it ends and begins anew
            wanted = held(lease, self._identity, self._name, self._namespace, self._now())
            if step is Step.CREATE:
                written = await self._api.create(LEASE.path(self._namespace), wanted)
            else:
                written = await self._api.replace(LEASE.path(self._namespace, self._name), wanted)
        except ApiRefused as error:
            if error.status != 409:  # 409: another was quicker
                log.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            return False
        except KubernetesError as error:
            log.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            return False
        self._seen = Seen(written["metadata"]["resourceVersion"], self._clock())
        self._renewed = began
        return True
