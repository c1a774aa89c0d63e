"""From a spec to the view that the sidecars get, with a number that grows only when the content changes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cacheaware_api import wire
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, Tier

FIRST_NUMBER = 1


def build_view(
    spec: CacheAwarePoolSpec,
    *,
    uid: str,
    prefix_texts: Mapping[str, str],
    effective_percent: Mapping[str, int],
    previous: wire.View | None = None,
) -> wire.View:
    """The wanted view. `prefix_texts` has the text of every public prefix by name; `previous` is the last view of all.

    With content equal to `previous` of the same object it is `previous` itself, so that telling it to a sidecar again
    changes nothing.
    """
    view = wire.View(
        revision=wire.Revision(uid, FIRST_NUMBER),
        model=spec.model.name,
        # The order of tiers means nothing: sorted, so that reordering a file is no new revision.
        tiers=tuple(
            _view_tier(tier, effective_percent[tier.name]) for tier in sorted(spec.tiers, key=lambda tier: tier.name)
        ),
        sharing=spec.effective_sharing,
        identity=wire.ViewIdentity(type=spec.identity.type),
        default_tier=spec.default_tier,
        public_percent=spec.public_percent,
        public_prefixes=tuple(
            wire.ViewPrefix(name=name, text=prefix_texts[name])
            for name in sorted(prefix.name for prefix in spec.public_prefixes)
        ),
    )
    if previous is None or previous.revision.pool_uid != uid:
        return view
    if dataclasses.replace(view, revision=previous.revision) == previous:
        return previous
    return dataclasses.replace(view, revision=wire.Revision(uid, previous.revision.number + 1))


def effective_percent(spec: CacheAwarePoolSpec) -> dict[str, int]:
    """Where nothing rebalances, a tier's effective share is its nominal one; what nobody was given stays unassigned."""
    return {tier.name: tier.quota.nominal_percent for tier in spec.tiers}


def _view_tier(tier: Tier, effective: int) -> wire.ViewTier:
    return wire.ViewTier(
        name=tier.name,
        priority=tier.priority,
        weight=tier.weight,
        quota=wire.ViewQuota(
            nominal_percent=tier.quota.nominal_percent,
            borrowing_limit_percent=tier.quota.borrowing_limit_percent,
            lending_limit_percent=tier.quota.lending_limit_percent,
        ),
        sla=wire.ViewSLA(
            time_to_first_token=tier.sla.time_to_first_token,
            time_per_output_token=tier.sla.time_per_output_token,
            attainment_percent=tier.sla.attainment_percent,
        ),
        effective_percent=effective,
        batching_window=tier.batching_window,
        retention=tier.retention,
        admission=tier.admission,
    )
