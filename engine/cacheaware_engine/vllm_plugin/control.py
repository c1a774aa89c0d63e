"""What the KV side may ask of the engine: between two steps, under the scheduler's lock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from cacheaware_api import wire
from cacheaware_engine.blocks import BlockPool, QuotaRefused, block_keys
from cacheaware_engine.step_reports import StepTotals

from .step_costs import StepCosts


class Tokens(Protocol):
    """A public prefix as the tokens that requests beginning with it have."""

    def of(self, prefix: wire.PublicPrefix) -> Sequence[int]: ...


class Control:
    def __init__(
        self, pool: BlockPool, costs: StepCosts, lock: threading.RLock, tokens: Tokens, block_size: int
    ) -> None:
        self._pool = pool
        self._costs = costs
        self._lock = lock
        self._tokens = tokens
        self._block_size = block_size
        costs.held_tokens = self._held_tokens

    @property
    def sequence(self) -> int:
        """Grows with every change of the ledger; read without waiting for a step."""
        return self._pool.sequence

    @property
    def totals(self) -> StepTotals:
        return self._costs.totals

    def ledger(self) -> wire.Ledger:
        with self._lock:
            return self._pool.ledger()

    def set_quotas(self, quotas: wire.Quotas) -> wire.Ledger:
        """Raises `StaleRevision` or `QuotaRefused`; then nothing changed."""
        with self._lock:
            self._pool.set_quotas(quotas)
            return self._pool.ledger()

    def set_public(self, prefixes: wire.PublicPrefixes) -> wire.Ledger:
        """Raises `QuotaRefused`. The first request that begins with a prefix computes it for all."""
        names = [prefix.name for prefix in prefixes.prefixes]
        if len(names) != len(set(names)):
            raise QuotaRefused("prefixes: names must be unique")
        keys = {prefix.name: block_keys(self._tokens.of(prefix), self._block_size) for prefix in prefixes.prefixes}
        with self._lock:
            self._pool.set_public(keys)
            return self._pool.ledger()

    def _held_tokens(self) -> int:
        return self._pool.held * self._block_size
