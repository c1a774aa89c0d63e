"""What `BlockPool` refuses, and what to do about it.

    BlockPoolError
    ├── UnknownTier      the request names a tier that does not exist: name one of those listed (400)
    ├── NeverFits        the request could not fit even alone: make it shorter, or raise the tier's limit (400)
    ├── StaleRevision    newer quotas are in force already: read them again before writing (409)
    └── QuotaRefused     the sums do not fit this engine: nothing changed (422)

A call that breaks the contract of the pool itself (a table index that does not exist, a request admitted twice) is a
fault of the caller and raises `ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPoolError(Exception):
    """Input that the pool refuses; when it is raised nothing has changed."""


class UnknownTier(BlockPoolError):
    """No such tier; `tiers` lists those that exist."""

    def __init__(self, tier: str, tiers: Iterable[str]) -> None:
        self.tier = tier
        self.tiers = tuple(sorted(tiers))
        known = ", ".join(self.tiers) if self.tiers else "none: the pool has no tiers"
        super().__init__(f"unknown tier {tier!r}; the tiers are: {known}")


class NeverFits(BlockPoolError):
    """More blocks or sequences than the request could ever be given."""


class StaleRevision(BlockPoolError):
    """The quotas in force have a newer revision, or the same one with other content."""


class QuotaRefused(BlockPoolError):
    """Quotas or public prefixes whose sums do not fit."""
