"""Who is calling, which tier that means, and under which salt its blocks are hashed."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

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
            },
            gateways=("secret-of-a-gateway", "the-one-before-it"),
        ),
    )
)


def with_key(authorization: str | None) -> Caller:
    sent = CIMultiDict({} if authorization is None else {"Authorization": authorization})
    return identify(IdentityType.API_KEYS, sent, KEYS, "bronze")


class TestIdentity:
    @pytest.mark.parametrize(
        ("authorization", "tenant"),
        [
            pytest.param("Bearer key-of-acme", "acme", id="known"),
            pytest.param("bearer   key-of-zeta  ", "zeta", id="scheme in any case, spaces"),
        ],
    )
    def test_a_known_key_tells_its_tenant(self, authorization: str, tenant: str) -> None:
        assert with_key(authorization).tenant == tenant

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
            with_key(authorization)
        assert caught.value.status == 401
        assert caught.value.headers["WWW-Authenticate"] == "Bearer"

    def test_the_digest_of_a_key_is_no_key(self) -> None:
        digest = api_keys_json({"key-of-acme": {}})["keys"][0]["sha256"]
        with pytest.raises(Unauthorized):
            with_key(f"Bearer {digest}")

    def test_an_open_pool_knows_nobody_whatever_is_sent(self) -> None:
        sent = CIMultiDict({"Authorization": "Bearer key-of-acme", **PROOF, "x-cacheaware-tenant": "acme"})
        assert identify(IdentityType.OPEN, sent, KEYS, "bronze") == OPEN_CALLER


PROOF = {"x-cacheaware-gateway-secret": "secret-of-a-gateway"}


def behind_gateway(*headers: tuple[str, str], default_tier: str | None = "bronze") -> Caller:
    sent = CIMultiDict([*PROOF.items(), *headers])
    return identify(IdentityType.TRUSTED_HEADERS, sent, KEYS, default_tier)


class TestGateway:
    @pytest.mark.parametrize(
        ("headers", "tenant", "tier"),
        [
            pytest.param(
                [("X-CacheAware-Tenant", "acme"), ("X-CacheAware-Tier", "gold")], "acme", "gold", id="our names"
            ),
            pytest.param(
                [("x-llm-d-inference-fairness-id", "acme"), ("x-llm-d-inference-objective", "gold")],
                "acme",
                "gold",
                id="aliases",
            ),
            pytest.param(
                [("x-cacheaware-tier", "gold"), ("x-llm-d-inference-objective", "gold")],
                None,
                "gold",
                id="both, and they agree",
            ),
            pytest.param([("x-cacheaware-tenant", " acme "), ("x-cacheaware-tier", "")], "acme", None, id="empty"),
            pytest.param([], None, None, id="nothing"),
        ],
    )
    def test_one_that_proves_itself_is_believed(
        self, headers: list[tuple[str, str]], tenant: str | None, tier: str | None
    ) -> None:
        caller = behind_gateway(*headers)
        assert (caller.tenant, caller.decided_tier, caller.key_name) == (tenant, tier, "gateway-0")

    @pytest.mark.parametrize(
        "proof",
        [
            pytest.param(None, id="none"),
            pytest.param("", id="empty"),
            pytest.param("secret-of-a-gatewa", id="nearly"),
            pytest.param("secret-of-a-gateway-and-more", id="more"),
            pytest.param("key-of-acme", id="an API key"),
            pytest.param(api_keys_json({}, ["secret-of-a-gateway"])["gateways"][0]["sha256"], id="its hash"),
            pytest.param("\udcff", id="bytes that are no text"),
        ],
    )
    def test_anybody_else_is_401_whatever_the_headers_say(self, proof: str | None) -> None:
        sent = CIMultiDict({"x-cacheaware-tenant": "acme", "x-cacheaware-tier": "gold"})
        sent["Authorization"] = "Bearer key-of-acme"
        if proof is not None:
            sent["x-cacheaware-gateway-secret"] = proof
        with pytest.raises(Unauthorized, match="gateway"):
            identify(IdentityType.TRUSTED_HEADERS, sent, KEYS, "bronze")

    def test_two_secrets_count_so_that_one_can_be_rotated(self) -> None:
        sent = CIMultiDict({"x-cacheaware-gateway-secret": "the-one-before-it"})
        assert identify(IdentityType.TRUSTED_HEADERS, sent, KEYS, None).key_name == "gateway-1"

    @pytest.mark.parametrize(
        ("headers", "named"),
        [
            pytest.param(
                [("x-cacheaware-tier", "bronze"), ("x-llm-d-inference-objective", "gold")],
                "x-cacheaware-tier",
                id="one of them is the client's",
            ),
            pytest.param(
                [("x-cacheaware-tier", "bronze"), ("x-cacheaware-tier", "gold")], "x-cacheaware-tier", id="tier twice"
            ),
            pytest.param(
                [("x-cacheaware-tenant", "a"), ("x-cacheaware-tenant", "a")], "x-cacheaware-tenant", id="tenant twice"
            ),
            pytest.param([("x-cacheaware-gateway-secret", "x")], "x-cacheaware-gateway-secret", id="proof twice"),
            pytest.param([("x-cacheaware-tenant", "a" * 254)], "x-cacheaware-tenant", id="too long"),
            pytest.param([("x-cacheaware-tenant", "a\tb")], "x-cacheaware-tenant", id="control characters"),
        ],
    )
    def test_headers_that_a_client_may_have_added_to_are_refused(
        self, headers: list[tuple[str, str]], named: str
    ) -> None:
        with pytest.raises(BadRequest) as caught:
            behind_gateway(*headers)
        assert caught.value.param == named

    @pytest.mark.parametrize(
        ("said", "requested", "chosen"),
        [
            pytest.param("gold", None, "gold", id="decided"),
            pytest.param("gold", "auto", "gold", id="decided, the client leaves it open"),
            pytest.param("gold", "gold", "gold", id="decided, the client agrees"),
            pytest.param(None, None, "bronze", id="not said: the pool's default"),
            pytest.param(None, "bronze", "bronze", id="not said, the client names the default"),
        ],
    )
    def test_the_gateway_decides_the_tier(self, said: str | None, requested: Any, chosen: str) -> None:
        caller = behind_gateway(*([] if said is None else [("x-cacheaware-tier", said)]))
        assert choose_tier(requested, caller, view()).tier.name == chosen

    @pytest.mark.parametrize(
        ("said", "requested", "error", "param"),
        [
            pytest.param("bronze", "gold", TierNotAllowed, "service_tier", id="a client that wants more"),
            pytest.param(None, "gold", TierNotAllowed, "service_tier", id="a client that chooses itself"),
            pytest.param("platinum", None, UnknownTier, "x-cacheaware-tier", id="unknown is never the default"),
            pytest.param("platinum", "bronze", UnknownTier, "x-cacheaware-tier", id="unknown, whatever is asked"),
        ],
    )
    def test_and_nobody_else(self, said: str | None, requested: Any, error: type[Refusal], param: str) -> None:
        caller = behind_gateway(*([] if said is None else [("x-cacheaware-tier", said)]))
        with pytest.raises(error) as caught:
            choose_tier(requested, caller, view())
        assert caught.value.param == param

    def test_without_any_default_a_gateway_must_name_the_tier(self) -> None:
        with pytest.raises(UnknownTier, match="no default tier"):
            choose_tier(None, behind_gateway(default_tier=None), view(defaultTier=None))


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
        assert choose_tier(requested, caller, view(defaultTier=default)).tier.name == chosen

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
        assert choose_tier(None, caller, view()).tier.name == "bronze"


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
