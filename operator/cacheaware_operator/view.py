"""From a spec to the view that the sidecars get, with a number that grows only when the content changes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cacheaware_api import wire
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, RebalancingMode, Tier
from cacheaware_operator.rebalance_terms import fitted, terms_of

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


def shares_in_force(spec: CacheAwarePoolSpec, previous: wire.View | None) -> dict[str, int]:
    """Each tier's effective share where nothing new was decided.

    Without rebalancing it is the nominal one. With it a share keeps its distance from nominal through an edit, and
    through a restart of the operator, as far as the new bounds allow.
    """
    terms = terms_of(spec)
    if terms.mode is RebalancingMode.OFF or previous is None:
        return terms.nominal
    distance = {tier.name: tier.effective_percent - tier.quota.nominal_percent for tier in previous.tiers}
    return fitted({name: nominal + distance.get(name, 0) for name, nominal in terms.nominal.items()}, terms)


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
