"""Which quotas an engine accepts. Pure: `pool` puts them in force."""

from __future__ import annotations

from cacheaware_api import quota, wire

from .errors import QuotaRefused, StaleRevision
from .owners import PUBLIC


def check_revision(wanted: wire.Quotas, present: wire.Quotas | None) -> bool:
    """False where exactly these quotas are in force already; raises `StaleRevision` for older ones.

    Another pool object (another uid) always wins: the old one is gone.
    """
    if present is None or wanted.revision.pool_uid != present.revision.pool_uid:
        return True
    number, in_force = wanted.revision.number, present.revision.number
    if number < in_force:
        raise StaleRevision(f"revision.number: {number} is older than {in_force}, which is in force; read it first")
    if number == in_force:
        if _content(wanted) != _content(present):
            raise StaleRevision(
                f"revision.number: {number} is in force with other content; send a changed state with a higher number"
            )
        return False
    return True


def check_sums(wanted: wire.Quotas, capacity: int) -> None:
    """Raises `QuotaRefused` where quotas promise more blocks than there are."""
    for field in ("nominal", "effective"):
        parts = {tier.name: getattr(tier, field) for tier in wanted.tiers}
        total = sum(parts.values()) + wanted.public
        if total > capacity:
            sums = " + ".join(f"{name} {blocks}" for name, blocks in {**parts, "public": wanted.public}.items())
            raise QuotaRefused(
                f"tiers[].{field}: {sums} = {total} blocks, but the cache has {capacity}; "
                f"lower them by {total - capacity}"
            )
    for tier in wanted.tiers:
        if tier.name == PUBLIC:
            raise QuotaRefused(f"tiers[].name: {PUBLIC} is the public share itself; choose another name")


def slots(wanted: wire.Quotas, capacity: int, max_sequences: int) -> dict[str, int]:
    """Each tier's sequences, apportioned like its nominal blocks; raises `QuotaRefused` where there are too few."""
    tiers = sorted(wanted.tiers, key=lambda tier: (-tier.priority, tier.name))  # ties go to the more important
    nominal = {tier.name: tier.nominal for tier in tiers}
    try:
        return quota.apportion_slots(max_sequences, nominal, capacity - sum(nominal.values()))
    except ValueError as error:
        raise QuotaRefused(f"tiers[].nominal: {error}") from None


def _content(quotas: wire.Quotas) -> tuple[object, ...]:
    return (quotas.public, sorted(quotas.tiers, key=lambda tier: tier.name))  # their order means nothing
