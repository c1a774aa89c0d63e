"""What the operator may raise, by what the caller should do.

OperatorError
├── PortInUse          choose another port
├── EditRefused        undo the edit; what ran before still runs
├── NotBuiltYet        remove the named fields
├── StartFailed        read the reason; nothing was left running
├── QuotasRefused      change tiers or engine so that they fit; the engines keep the quotas they had
└── SidecarError
    ├── Unreachable    try again: it is starting, restarting or gone
    └── ViewRefused    the view itself is wrong for this sidecar; trying again does not help
"""

from __future__ import annotations

from collections.abc import Sequence


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


class NotBuiltYet(OperatorError):
    """The object is valid and asks for something that this release cannot do."""

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


class SidecarError(OperatorError):
    pass


class Unreachable(SidecarError):
    pass


class ViewRefused(SidecarError):
    pass
