"""The view is the spec with defaults filled in, and its number grows only when that changes."""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_api import wire
from cacheaware_api.testing import pools
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, parse_spec
from cacheaware_operator.plan import Wanted
from cacheaware_operator.view import build_view, shares_in_force


def view_of(
    spec: CacheAwarePoolSpec, previous: wire.View | None = None, *, uid: str = "uid-1", text: str = "text"
) -> wire.View:
    return build_view(
        spec,
        uid=uid,
        prefix_texts={prefix.name: text for prefix in spec.public_prefixes},
        effective_percent=shares_in_force(spec, None),
        previous=previous,
    )


def test_a_view_has_every_field_of_the_spec_that_a_sidecar_needs(make_wanted: Callable[..., Wanted]) -> None:
    view = view_of(make_wanted().spec)
    assert view == wire.View(
        revision=wire.Revision("uid-1", 1),
        model="tiny",
        tiers=(
            wire.ViewTier(
                name="bronze",
                priority=0,
                weight=1,
                quota=wire.ViewQuota(nominal_percent=30),
                sla=wire.ViewSLA(),
                effective_percent=30,
            ),
            wire.ViewTier(
                name="gold",
                priority=100,
                weight=4,
                quota=wire.ViewQuota(nominal_percent=50, lending_limit_percent=25),
                sla=wire.ViewSLA(time_to_first_token="800ms"),
                effective_percent=50,
                retention="10m",
            ),
        ),
        sharing=wire.Sharing.TIER,  # nobody is known where identity is Open
        identity=wire.ViewIdentity(wire.IdentityType.OPEN),
        default_tier="bronze",
    )


@settings(deadline=None, max_examples=30)  # a busy machine is no failure
@given(pool=pools())
def test_unchanged_content_keeps_its_revision_and_order_means_nothing(pool: dict[str, Any]) -> None:
    spec = parse_spec(pool["spec"])
    first = view_of(spec)
    reordered = copy.deepcopy(pool["spec"])
    reordered["tiers"].reverse()
    assert view_of(spec, first) == first
    assert view_of(parse_spec(reordered), first) == first


@settings(deadline=None, max_examples=30)  # a busy machine is no failure
@given(pool_list=st.lists(pools(), min_size=1, max_size=6), repeats=st.integers(1, 3))
def test_numbers_of_one_object_only_grow_and_never_name_two_contents(
    pool_list: list[dict[str, Any]], repeats: int
) -> None:
    named: dict[int, wire.View] = {}
    previous: wire.View | None = None
    for pool in pool_list * repeats:
        view = view_of(parse_spec(pool["spec"]), previous)
        assert previous is None or view.revision.number in (previous.revision.number, previous.revision.number + 1)
        assert named.setdefault(view.revision.number, view) == view
        previous = view


@settings(deadline=None, max_examples=30)  # a busy machine is no failure
@given(pool=pools())
def test_the_spec_is_not_rewritten_and_the_view_survives_its_trip_as_json(pool: dict[str, Any]) -> None:
    spec = parse_spec(pool["spec"])
    before = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    view = view_of(spec)
    assert spec.model_dump(mode="json", by_alias=True, exclude_unset=True) == before
    assert wire.from_json(wire.View, json.loads(json.dumps(wire.to_json(view)))) == view


def test_another_object_begins_to_count_anew(make_wanted: Callable[..., Wanted]) -> None:
    spec = make_wanted().spec
    assert view_of(spec, view_of(spec), uid="uid-2").revision == wire.Revision("uid-2", 1)


def test_a_new_text_of_a_public_prefix_is_a_new_revision(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any]
) -> None:
    spec |= {
        "publicPercent": 10,
        "publicPrefixes": [{"name": "assistant", "configMapKeyRef": {"name": "prompts", "key": "assistant"}}],
    }
    wanted = make_wanted(spec)
    first = view_of(wanted.spec)
    assert view_of(wanted.spec, first, text="new text").revision.number == 2


# -- shares ------------------------------------------------------------------------------------------------------------


def moved(view: wire.View, **effective: int) -> wire.View:
    """The view after rebalancing gave these shares."""
    tiers = tuple(dataclasses.replace(tier, effective_percent=effective[tier.name]) for tier in view.tiers)
    return dataclasses.replace(view, tiers=tiers)


@pytest.fixture
def rebalanced(spec: dict[str, Any]) -> dict[str, Any]:
    return spec | {"rebalancing": {"mode": "Auto"}}


def test_shares_that_moved_stay_through_a_restart(
    make_wanted: Callable[..., Wanted], rebalanced: dict[str, Any]
) -> None:
    wanted = make_wanted(rebalanced).spec
    view = moved(view_of(wanted), gold=60, bronze=20)
    assert shares_in_force(wanted, view) == {"gold": 60, "bronze": 20}


def test_shares_keep_their_distance_from_nominal_through_an_edit(
    make_wanted: Callable[..., Wanted], rebalanced: dict[str, Any]
) -> None:
    view = moved(view_of(make_wanted(rebalanced).spec), gold=60, bronze=20)
    rebalanced["tiers"][0]["quota"]["nominalPercent"] = 40
    assert shares_in_force(make_wanted(rebalanced).spec, view) == {"gold": 50, "bronze": 20}


def test_a_share_keeps_within_the_bounds_of_the_edit(
    make_wanted: Callable[..., Wanted], rebalanced: dict[str, Any]
) -> None:
    view = moved(view_of(make_wanted(rebalanced).spec), gold=60, bronze=20)
    rebalanced["tiers"][0]["quota"]["borrowingLimitPercent"] = 5
    assert shares_in_force(make_wanted(rebalanced).spec, view) == {"gold": 55, "bronze": 25}


def test_without_rebalancing_shares_are_nominal_whatever_they_were(
    make_wanted: Callable[..., Wanted], spec: dict[str, Any]
) -> None:
    wanted = make_wanted(spec).spec
    view = moved(view_of(wanted), gold=60, bronze=20)
    assert shares_in_force(wanted, view) == {"gold": 50, "bronze": 30}
