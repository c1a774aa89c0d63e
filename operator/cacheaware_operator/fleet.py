"""Where a pool runs, as the operator sees it: one snapshot of the world, one plan to make true.

`Fleet` has two implementations: `LocalFleet` (local processes) and `KubernetesFleet` (pods). Values only: how a part is
started, watched and stopped belongs to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from cacheaware_api.wire import PoolStatus, View

if TYPE_CHECKING:
    from cacheaware_operator.plan import PoolPlan
    from cacheaware_operator.readings import Page


class PartName(StrEnum):
    ENGINE = "engine"
    SIDECAR = "sidecar"


class PartState(StrEnum):
    """What one process (or container) of a replica is doing."""

    STARTING = "Starting"  # runs and has not been ready since it was started
    READY = "Ready"
    NOT_READY = "NotReady"  # runs and was ready, but does not say so now
    RESTARTING = "Restarting"  # has ended and waits out its back-off
    FAILED = "Failed"  # could not be started; nobody tries again
    STOPPED = "Stopped"  # ended because we asked for it


@dataclass(frozen=True, slots=True)
class PartSnapshot:
    name: PartName
    state: PartState
    restarts: int = 0
    failures: int = 0  # exits in a row without a minute of health between them
    message: str = ""  # why it is in this state, for people
    pid: int | None = None
    log: str | None = None  # where its output goes
    ended: str = ""  # how it ended the last time, for people; it may run again


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One engine with its sidecar. `ready`: the sidecar takes requests now."""

    name: str
    parts: tuple[PartSnapshot, ...]
    ready: bool = False
    status: PoolStatus | None = None  # absent: the sidecar did not answer
    problem: str | None = None  # why the wanted view could not be delivered

    @property
    def failed(self) -> PartSnapshot | None:
        return next((part for part in self.parts if part.state is PartState.FAILED), None)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known of a running pool at one moment."""

    view: View | None = None  # the view last handed out; its number is the last one used
    replicas: tuple[ReplicaSnapshot, ...] = ()
    rollout: str | None = None  # what is being replaced, in words; absent: every replica is of the newest version


class Fleet(Protocol):
    """Runs one pool. `apply` is idempotent: called again with the same plan it only repairs what differs."""

    async def observe(self) -> Snapshot: ...

    async def apply(self, plan: PoolPlan) -> None: ...

    async def pages(self) -> Mapping[str, Page]:
        """The metrics page of every ready replica that answers, by its name."""
        ...
