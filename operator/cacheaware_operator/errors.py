"""What the operator may raise, by what the caller should do.

OperatorError
├── PortInUse          choose another port
├── EditRefused        undo the edit; what ran before still runs
├── NotOnOneMachine    change the named fields, or use a cluster
├── StartFailed        read the reason; nothing was left running
├── QuotasRefused      change tiers or engine so that they fit; the engines keep the quotas they had
├── NoCluster          give a kubeconfig; nothing was begun
├── PoolBlocked        the pool's author has to act; its status says so, and what runs goes on running
├── LeadershipLost     end the process: another operator acts, or may
├── PoolGone           forget it: it was deleted while we looked
├── KubernetesError
│   ├── ApiUnreachable try again
│   └── ApiRefused     what to do depends on `status`
│       └── FieldConflict   another manager has the field: never forced
└── SidecarError
    ├── Unreachable    try again: it is starting, restarting or gone
    └── ViewRefused    the view itself is wrong for this sidecar; trying again does not help
"""

from __future__ import annotations

from collections.abc import Sequence

from cacheaware_api.conditions import Reason


class OperatorError(Exception):
    """Root of the operator's errors; its text is a sentence for the user."""


class PortInUse(OperatorError):
    def __init__(self, host: str, port: int, advice: str) -> None:
        super().__init__(f"port {port} on {host} is in use: {advice}")
        self.port = port


class EditRefused(OperatorError):
    """An edit that cannot be applied to a running pool; `reasons` has one sentence per field."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = tuple(reasons)


class NotOnOneMachine(OperatorError):
    """The object is valid and asks for something that local processes do not have."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = tuple(reasons)


class StartFailed(OperatorError):
    """A part that could not be started for good."""

    def __init__(self, part: str, reason: str, log: str | None, last_lines: Sequence[str]) -> None:
        super().__init__(f"{part}: {reason}")
        self.part = part
        self.reason = reason
        self.log = log
        self.last_lines = tuple(last_lines)


class QuotasRefused(OperatorError):
    """An engine that will not apply the wanted quotas, with its arithmetic."""


class NoCluster(OperatorError):
    pass


class PoolBlocked(OperatorError):
    """Why a pool cannot be as it is wanted, until somebody acts: its condition Stalled."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class LeadershipLost(OperatorError):
    pass


class PoolGone(OperatorError):
    pass


class KubernetesError(OperatorError):
    pass


class ApiUnreachable(KubernetesError):
    pass


class ApiRefused(KubernetesError):
    """An answer of the API server that is an error; `reason` is Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class FieldConflict(ApiRefused):
    """`fields` has the manager and the path of every field that is another's."""

    def __init__(self, path: str, fields: Sequence[tuple[str, str]]) -> None:
        words = ", ".join(f"{field} is managed by {manager}" for manager, field in fields)
        super().__init__(409, "Conflict", f"{path}: {words}")
        self.fields = tuple(fields)


class SidecarError(OperatorError):
    pass


class Unreachable(SidecarError):
    pass


class ViewRefused(SidecarError):
    pass
