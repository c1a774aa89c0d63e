"""What can be wrong with a valid pool once it becomes a pod."""

from __future__ import annotations

from collections.abc import Sequence

from cacheaware_operator.errors import OperatorError


class PodRefused(OperatorError):
    """The author's part of the pod clashes with ours; `reasons` has one sentence per field, with what to do."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = tuple(reasons)
