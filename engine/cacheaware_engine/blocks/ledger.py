"""The pool's accounts as the message that others read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cacheaware_api import quota, wire

from .keys import BlockKey
from .owners import Account
from .residents import Residents


@dataclass(frozen=True, slots=True)
class Figures:
    """What the ledger says of the engine as a whole."""

    sequence: int
    block_size: int
    bytes_per_token: int
    capacity: int
    max_sequences: int
    running: int
    waiting: int


def ledger_of(
    figures: Figures,
    quotas: wire.Quotas | None,
    accounts: Sequence[Account],
    public: Account,
    prefixes: Mapping[str, Sequence[BlockKey]],
    residents: Residents,
) -> wire.Ledger:
    tiers = [account for account in accounts if account is not public]
    nominal = {account.name: account.nominal for account in tiers}
    lent = quota.lent_blocks(
        {account.name: account.used for account in sorted(tiers, key=lambda tier: (-tier.priority, tier.name))},
        nominal,
        unassigned=figures.capacity - sum(nominal.values()) - public.limit,
        public_idle=max(0, public.limit - public.used),
    )
    return wire.Ledger(
        sequence=figures.sequence,
        revision=quotas.revision if quotas else None,
        block_size=figures.block_size,
        bytes_per_token=figures.bytes_per_token,
        capacity=figures.capacity,
        free=residents.free,
        public=wire.PublicLedger(
            share=public.limit,
            held=public.held,
            cached=public.cached,
            prefixes={
                name: wire.PrefixLedger(blocks=len(keys), resident=sum(key in residents.index for key in keys))
                for name, keys in prefixes.items()
            },
        ),
        tiers={account.name: _tier_ledger(account, lent[account.name]) for account in tiers},
        running=figures.running,
        waiting=figures.waiting,
        max_sequences=figures.max_sequences,
    )


def _tier_ledger(account: Account, lent: int) -> wire.TierLedger:
    totals = account.totals
    return wire.TierLedger(
        nominal=account.nominal,
        effective=account.effective,
        limit=account.limit,
        held=account.held,
        cached=account.cached,
        lapsed=account.lapsed,
        borrowed=quota.borrowed_blocks(account.used, account.nominal),
        lent=lent,
        slots=wire.Slots(nominal=account.slots, running=account.running),
        evicted_total=totals.evicted,
        reclaimed_total=totals.reclaimed,
        preempted_total=totals.preempted,
        hit_tokens_total=totals.hit_tokens,
        query_tokens_total=totals.query_tokens,
    )
