"""Who is calling, which tier that means, and under which salt its blocks are hashed."""

from __future__ import annotations

from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_api.wire import IdentityType, Sharing
from cacheaware_sidecar.errors import BadRequest, Refusal, TierNotAllowed, Unauthorized, UnknownTier
from cacheaware_sidecar.identity import OPEN_CALLER, Caller, KeyRing, identify
from cacheaware_sidecar.salt import cache_salt
from cacheaware_sidecar.testing_sidecar import api_keys_json, view
from cacheaware_sidecar.tiers import Promise, choose_tier, loosened

KEYS = KeyRing(
    wire.from_json(
        wire.ApiKeys,
        api_keys_json(
            {
                "key-of-acme": {"tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"},
                "key-of-zeta": {"tenant": "zeta", "tiers": ["bronze"]},
            }
        ),
    )
)


class TestIdentity:
    @pytest.mark.parametrize(
        ("authorization", "tenant"),
        [
            pytest.param("Bearer key-of-acme", "acme", id="known"),
            pytest.param("bearer   key-of-zeta  ", "zeta", id="scheme in any case, spaces"),
        ],
    )
    def test_a_known_key_tells_its_tenant(self, authorization: str, tenant: str) -> None:
        assert identify(IdentityType.API_KEYS, authorization, KEYS).tenant == tenant

    @pytest.mark.parametrize(
        "authorization",
        [
            pytest.param(None, id="no header"),
            pytest.param("", id="empty"),
            pytest.param("Bearer", id="scheme only"),
            pytest.param("Bearer ", id="no key"),
            pytest.param("Bearer key-of-acm", id="nearly a key"),
            pytest.param("Bearer key-of-acme-and-more", id="longer than a key"),
            pytest.param("Basic key-of-acme", id="another scheme"),
            pytest.param("key-of-acme", id="no scheme"),
            pytest.param("Bearer \udcff", id="bytes that are no text"),
        ],
    )
    def test_anything_else_is_401(self, authorization: str | None) -> None:
        with pytest.raises(Unauthorized) as caught:
            identify(IdentityType.API_KEYS, authorization, KEYS)
        assert caught.value.status == 401
        assert caught.value.headers["WWW-Authenticate"] == "Bearer"

    def test_the_digest_of_a_key_is_no_key(self) -> None:
        digest = api_keys_json({"key-of-acme": {}})["keys"][0]["sha256"]
        with pytest.raises(Unauthorized):
            identify(IdentityType.API_KEYS, f"Bearer {digest}", KEYS)

    def test_an_open_pool_knows_nobody_whatever_is_sent(self) -> None:
        assert identify(IdentityType.OPEN, "Bearer key-of-acme", KEYS) == OPEN_CALLER

    def test_trusted_headers_are_not_trusted_without_proof(self) -> None:
        with pytest.raises(Unauthorized, match="TrustedHeaders"):
            identify(IdentityType.TRUSTED_HEADERS, None, KEYS)


ACME = Caller(tenant="acme", tiers=frozenset({"gold", "bronze"}), default_tier="gold")
ZETA = Caller(tenant="zeta", tiers=frozenset({"bronze"}))
GONE = Caller(tenant="gone", tiers=frozenset({"platinum"}), default_tier="platinum")


class TestTier:
    @pytest.mark.parametrize(
        ("requested", "caller", "default", "chosen"),
        [
            pytest.param("gold", ACME, "bronze", "gold", id="named"),
            pytest.param("gold", OPEN_CALLER, None, "gold", id="named, open pool"),
            pytest.param(None, ACME, "bronze", "gold", id="absent: the key's default first"),
            pytest.param("auto", ACME, "bronze", "gold", id="auto is absent"),
            pytest.param("default", ACME, "bronze", "gold", id="default is absent"),
            pytest.param(None, ZETA, "bronze", "bronze", id="absent: then the pool's default"),
            pytest.param(None, OPEN_CALLER, "bronze", "bronze", id="absent, open pool"),
            pytest.param("bronze", ACME, "gold", "bronze", id="named beats every default"),
        ],
    )
    def test_the_tier_is_named_or_the_nearest_default(
        self, requested: Any, caller: Caller, default: str | None, chosen: str
    ) -> None:
        assert choose_tier(requested, caller, view(defaultTier=default)).name == chosen

    @pytest.mark.parametrize(
        ("requested", "caller", "default", "error", "says"),
        [
            pytest.param("platinum", ACME, "bronze", UnknownTier, "bronze, gold", id="unknown lists the key's tiers"),
            pytest.param("Gold", ACME, "bronze", UnknownTier, "bronze, gold", id="names have a case"),
            pytest.param("", ACME, "bronze", UnknownTier, "bronze, gold", id="empty"),
            pytest.param(None, OPEN_CALLER, None, UnknownTier, "no default tier", id="no default anywhere"),
            pytest.param("auto", ZETA, None, UnknownTier, "no default tier", id="auto without a default"),
            pytest.param("gold", ZETA, "bronze", TierNotAllowed, "one of bronze", id="known but not allowed"),
            pytest.param(None, ZETA, "gold", TierNotAllowed, "one of bronze", id="the pool's default is not allowed"),
            pytest.param("bronze", GONE, "bronze", TierNotAllowed, "none", id="a key whose tiers are gone"),
            pytest.param(7, ACME, "bronze", BadRequest, "must be the name", id="a number"),
            pytest.param(["gold"], ACME, "bronze", BadRequest, "must be the name", id="a list"),
            pytest.param("x" * 10_000, ACME, "bronze", UnknownTier, "…", id="a long name is not repeated"),
        ],
    )
    def test_a_tier_is_never_guessed(
        self, requested: Any, caller: Caller, default: str | None, error: type[Refusal], says: str
    ) -> None:
        with pytest.raises(error, match=says) as caught:
            choose_tier(requested, caller, view(defaultTier=default))
        assert type(caught.value) is error
        assert caught.value.param == "service_tier"
        assert len(caught.value.message) < 300

    def test_the_default_of_a_key_that_is_gone_falls_back_to_the_pools(self) -> None:
        caller = Caller(tenant="acme", tiers=frozenset({"bronze"}), default_tier="platinum")
        assert choose_tier(None, caller, view()).name == "bronze"


class TestHints:
    PROMISE = Promise(time_to_first_token=0.8, time_per_output_token=0.1)

    @pytest.mark.parametrize(
        ("header", "expected"),
        [
            pytest.param({}, PROMISE, id="none"),
            pytest.param({"x-llm-d-slo-ttft-ms": "2000"}, Promise(2.0, 0.1), id="looser"),
            pytest.param({"x-llm-d-slo-ttft-ms": "1"}, PROMISE, id="tighter does not count"),
            pytest.param({"x-llm-d-slo-tpot-ms": "150.5"}, Promise(0.8, 0.1505), id="per output token"),
        ],
    )
    def test_a_client_may_only_loosen_its_tiers_promise(self, header: dict[str, str], expected: Promise) -> None:
        assert loosened(self.PROMISE, header) == expected

    @pytest.mark.parametrize("text", ["-1", "0", "nan", "inf", "1e300", "9" * 400, "soon", "", "٣x"])
    def test_a_wild_number_is_refused_by_the_headers_name(self, text: str) -> None:
        with pytest.raises(BadRequest) as caught:
            loosened(self.PROMISE, {"x-llm-d-slo-ttft-ms": text})
        assert caught.value.param == "x-llm-d-slo-ttft-ms"

    def test_a_hint_promises_nothing_where_the_tier_did_not(self) -> None:
        assert loosened(Promise(), {"x-llm-d-slo-ttft-ms": "100"}) == Promise()


def salt(sharing: Sharing, tier: str = "gold", tenant: str | None = "acme", request: str = "r1", key: str = "k") -> str:
    return cache_salt(key.encode(), sharing, tier=tier, tenant=tenant, request_id=request)


class TestSalt:
    @pytest.mark.parametrize(
        ("sharing", "other", "shared"),
        [
            pytest.param(Sharing.POOL, {"tier": "bronze", "tenant": "zeta", "request": "r2"}, True, id="Pool"),
            pytest.param(Sharing.TIER, {"tenant": "zeta", "request": "r2"}, True, id="Tier: same tier"),
            pytest.param(Sharing.TIER, {"tier": "bronze"}, False, id="Tier: another tier"),
            pytest.param(Sharing.TENANT, {"tier": "bronze", "request": "r2"}, True, id="Tenant: same tenant"),
            pytest.param(Sharing.TENANT, {"tenant": "zeta"}, False, id="Tenant: another tenant"),
            pytest.param(Sharing.NONE, {}, True, id="None: the request itself"),
            pytest.param(Sharing.NONE, {"request": "r2"}, False, id="None: another request of the tenant"),
        ],
    )
    def test_only_one_scope_shares_a_salt(self, sharing: Sharing, other: dict[str, str], shared: bool) -> None:
        assert (salt(sharing) == salt(sharing, **other)) is shared

    def test_nobody_known_shares_with_nobody(self) -> None:
        assert salt(Sharing.TENANT, tenant=None, request="r1") != salt(Sharing.TENANT, tenant=None, request="r2")

    def test_a_tenant_called_like_a_tier_does_not_meet_it(self) -> None:
        assert salt(Sharing.TENANT, tenant="gold") != salt(Sharing.TIER, tier="gold")
        assert salt(Sharing.TENANT, tenant="pool") != salt(Sharing.POOL)

    def test_another_salt_key_is_another_cache(self) -> None:
        assert salt(Sharing.POOL, key="old") != salt(Sharing.POOL, key="new")

    def test_the_salt_does_not_tell_its_scope(self) -> None:
        assert "acme" not in salt(Sharing.TENANT)
        assert len(salt(Sharing.TENANT)) == 43
