"""What the plugin refuses, at start."""

from __future__ import annotations

from collections.abc import Sequence


class PluginRefused(Exception):
    """vLLM is set up in a way that quotas cannot be kept in; one sentence for each reason, with what to change."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("cacheaware cannot keep quotas in this vLLM: " + "; ".join(self.reasons))
