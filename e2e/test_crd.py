"""The CRD on a real API server: what it refuses and in which words, what it keeps, and what kubectl shows of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from e2e.cluster import Answer, Cluster, Object
from e2e.damage import damaged
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cacheaware_api.engine_flags import OWNED, EngineType
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.testing import full_spec, pools
from cacheaware_api.v1alpha1 import parse_pool

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pool(name: str = "chat", **spec: Any) -> Object:
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {"name": name},
        "spec": spec or full_spec(),
    }


def path_of(namespace: str, name: str = "") -> str:
    return f"/apis/cacheaware.dev/v1alpha1/namespaces/{namespace}/cacheawarepools" + (f"/{name}" if name else "")


def create(cluster: Cluster, written: Object, namespace: str = "default", dry_run: bool = True) -> Answer:
    """Create as kubectl would: unknown fields are refused. A dry run checks everything and stores nothing."""
    query = {"dryRun": "All"} if dry_run else {}
    return cluster.request("POST", path_of(namespace), written, fieldValidation="Strict", **query)


# -- what is refused --------------------------------------------------------------------------------------------------


def change(*path: str | int, to: Any) -> Callable[[Object], None]:
    def apply(spec: Object) -> None:
        place: Any = spec
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = to

    return apply


def remove(*path: str | int) -> Callable[[Object], None]:
    def apply(spec: Object) -> None:
        place: Any = spec
        for part in path[:-1]:
            place = place[part]
        del place[path[-1]]

    return apply


def both(*changes: Callable[[Object], None]) -> Callable[[Object], None]:
    def apply(spec: Object) -> None:
        for each in changes:
            each(spec)

    return apply


@pytest.mark.parametrize(
    ("breaks", "field", "message"),
    [
        pytest.param(
            change("tiers", 1, "quota", "nominalPercent", to=41),
            "spec.tiers",
            "nominalPercent of the tiers plus publicPercent must not exceed 100: [50, 41] + 10 public = 101: "
            "lower them by 1 in all",
            id="shares beyond the whole",
        ),
        pytest.param(
            change("tiers", 0, "quota", "lendingLimitPercent", to=51),
            "spec.tiers[0].quota.lendingLimitPercent",
            "must not exceed nominalPercent (50): lower it to at most 50",
            id="lends more than it has",
        ),
        pytest.param(
            change("tiers", 1, "quota", to={"lendingLimitPercent": 1}),
            "spec.tiers[1].quota.lendingLimitPercent",
            "must not exceed nominalPercent (0): lower it to at most 0",
            id="lends without having",
        ),
        pytest.param(
            change("publicPercent", to=0),
            "spec.publicPrefixes",
            "publicPrefixes need publicPercent above 0: set spec.publicPercent, or remove the prefixes",
            id="prefixes with a share of 0",
        ),
        pytest.param(
            remove("publicPercent"),
            "spec.publicPrefixes",
            "publicPrefixes need publicPercent above 0: set spec.publicPercent, or remove the prefixes",
            id="prefixes without a share",
        ),
        pytest.param(
            change("defaultTier", to="silver"),
            "spec.defaultTier",
            'must name one of the tiers: choose one of ["gold", "bronze"]',
            id="an unknown default tier",
        ),
        pytest.param(
            change("tiers", 0, "name", to="auto"),
            "spec.tiers[0].name",
            "auto and default are reserved: clients send them for no tier in particular: choose another name",
            id="a tier called auto",
        ),
        pytest.param(
            both(change("tiers", 0, "name", to="default"), remove("defaultTier")),
            "spec.tiers[0].name",
            "auto and default are reserved: clients send them for no tier in particular: choose another name",
            id="a tier called default",
        ),
        pytest.param(
            change("tiers", 0, "batchingWindow", to="401ms"),
            "spec.tiers[0].batchingWindow",
            "must be at most half of sla.timeToFirstToken (800ms): lower it to at most 400ms",
            id="a window beyond half of the SLA",
        ),
        pytest.param(
            change("identity", to={"type": "Open"}),
            "spec.sharing",
            "must not be Tenant with identity.type Open, which knows no tenants: "
            "choose Tier, Pool or None, or another identity.type",
            id="tenants where nobody is known",
        ),
        pytest.param(
            remove("identity", "apiKeys"),
            "spec.identity.apiKeys",
            "apiKeys is required for type APIKeys, and only there: add apiKeys: {secretRef: {name: …}}",
            id="API keys without keys",
        ),
        pytest.param(
            both(change("identity", "type", to="Open"), remove("sharing")),
            "spec.identity.apiKeys",
            "apiKeys is required for type APIKeys, and only there: remove it, or set type: APIKeys",
            id="keys without API keys",
        ),
        pytest.param(
            change("identity", to={"type": "TrustedHeaders"}),
            "spec.identity.trustedHeaders",
            "trustedHeaders is required for type TrustedHeaders, and only there: "
            "add trustedHeaders: {secretRef: {name: …}}",
            id="trusted headers without a secret",
        ),
        pytest.param(
            change("identity", "trustedHeaders", to={"secretRef": {"name": "gateway"}}),
            "spec.identity.trustedHeaders",
            "trustedHeaders is required for type TrustedHeaders, and only there: "
            "remove it, or set type: TrustedHeaders",
            id="trusted headers of another type",
        ),
        pytest.param(
            change("publicPrefixes", 1, "configMapKeyRef", to={"name": "a", "key": "b"}),
            "spec.publicPrefixes[1]",
            "exactly one of configMapKeyRef and text is needed: remove one of them",
            id="a prefix from two places",
        ),
        pytest.param(
            remove("publicPrefixes", 1, "text"),
            "spec.publicPrefixes[1]",
            "exactly one of configMapKeyRef and text is needed: add one of them",
            id="a prefix from nowhere",
        ),
        pytest.param(
            change("engine", "env", 0, "valueFrom", to={"fieldRef": {"fieldPath": "metadata.name"}}),
            "spec.engine.env[0]",
            "value and valueFrom exclude each other: remove one of them",
            id="a variable from two places",
        ),
        pytest.param(
            change("engine", "env", 1, "valueFrom", to={}),
            "spec.engine.env[1].valueFrom",
            "exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed: keep one of them",
            id="a variable from nowhere",
        ),
        pytest.param(
            change("engine", "args", to=["16", "--max-num-seqs"]),
            "spec.engine.args",
            "must begin with a flag: give each flag as --flag=value, or as --flag and then its value",
            id="arguments that begin with a value",
        ),
        pytest.param(
            change("engine", "args", to=["--threads=2", "--max-model-len=1"]),
            "spec.engine.args",
            "--max-model-len is set by the pool itself: set spec.model.maxModelLen instead",
            id="an owned flag",
        ),
        pytest.param(
            change("rebalancing", "interval", to="10ms"),
            "spec.rebalancing.interval",
            "must be at least 1s: raise it; 30s is a good start",
            id="rebalancing without rest",
        ),
        pytest.param(
            change("engine", "kvCache", "memory", to="0Gi"),
            "spec.engine.kvCache.memory",
            "must be more than 0 bytes",
            id="no memory",
        ),
        pytest.param(
            change("engine", "kvCache", "memory", to="8Ei"),
            "spec.engine.kvCache.memory",
            "must be at most 9223372036854775806 bytes, the most that Kubernetes can say",
            id="more memory than there is",
        ),
        pytest.param(
            change("podTemplate", "nodeSelector", to={"a b": "c"}),
            "spec.podTemplate.nodeSelector",
            "every name in it must be a name such as app or example.com/app, of at most 317 characters",
            id="a label that is none",
        ),
    ],
)
def test_a_broken_rule_is_refused_with_the_field_and_what_to_do(
    installed: Cluster, breaks: Callable[[Object], None], field: str, message: str
) -> None:
    written = pool()
    breaks(written["spec"])
    refused = create(installed, written)
    assert refused.status == 422, refused.body
    ((where, what),) = refused.causes
    assert where == field
    assert what.endswith(message)
    with pytest.raises(ObjectInvalid):
        parse_pool(written)


@pytest.mark.parametrize(
    ("breaks", "field", "message"),
    [
        pytest.param(change("tiers", to=[]), "spec.tiers", "should have at least 1 items", id="no tiers"),
        pytest.param(remove("model", "name"), "spec.model.name", "Required value", id="a field is missing"),
        pytest.param(change("tiers", 0, "name", to="bronze"), "spec.tiers[1]", "Duplicate value", id="a tier twice"),
        pytest.param(
            change("publicPrefixes", 1, "name", to="assistant"),
            "spec.publicPrefixes[1]",
            "Duplicate value",
            id="a prefix twice",
        ),
        pytest.param(change("sharing", to="tenant"), "spec.sharing", '"Tenant"', id="a word that is none"),
        pytest.param(change("tiers", 0, "weight", to="4"), "spec.tiers[0].weight", "integer", id="text for a number"),
        pytest.param(change("tiers", 0, "weight", to=0), "spec.tiers[0].weight", "than or equal to 1", id="too small"),
        pytest.param(change("tiers", 0, "batchingWindow", to="5 ms"), "spec.tiers[0].batchingWindow", "ms", id="time"),
    ],
)
def test_what_the_schema_alone_refuses_names_the_field_too(
    installed: Cluster, breaks: Callable[[Object], None], field: str, message: str
) -> None:
    written = pool()
    breaks(written["spec"])
    refused = create(installed, written)
    assert refused.status == 422, refused.body
    assert [where for where, _ in refused.causes] == [field]
    assert message in refused.causes[0][1]


def test_an_unknown_field_is_refused_by_name(installed: Cluster) -> None:
    refused = create(installed, pool(**full_spec(), teirs=[]))
    assert (refused.status, refused.body["reason"]) == (400, "BadRequest")
    assert 'unknown field "spec.teirs"' in refused.body["message"]


@pytest.mark.parametrize("engine", EngineType)
def test_every_owned_flag_is_refused_by_name(installed: Cluster, engine: EngineType) -> None:
    for flag, instead in OWNED[engine].items():
        written = pool()
        written["spec"]["engine"] |= {"type": engine.value, "args": [f"{flag}=1"]}
        ((_, message),) = create(installed, written).causes
        fix = f"set {instead} instead" if instead else "leave it out"
        assert message.endswith(f"{flag} is set by the pool itself: {fix}")


def test_a_name_too_long_for_what_is_named_after_it_is_refused(installed: Cluster) -> None:
    refused = create(installed, pool("x" * 55))
    assert [where for where, _ in refused.causes] == ["metadata.name"]
    assert create(installed, pool("x" * 54)).ok


def test_the_engine_type_cannot_change(installed: Cluster, namespace: str) -> None:
    stored = create(installed, pool(), namespace, dry_run=False)
    changed = copy.deepcopy(stored.body)
    changed["spec"]["engine"]["type"] = "VLLM"
    changed["spec"]["engine"]["args"] = []
    refused = installed.request("PUT", path_of(namespace, "chat"), changed)
    ((where, what),) = refused.causes
    assert where == "spec.engine.type"
    assert what.endswith("it was Torch: make a second pool with VLLM and move the traffic")
    changed["spec"]["engine"]["type"] = "Torch"
    assert installed.request("PUT", path_of(namespace, "chat"), changed).ok


# -- one verdict ------------------------------------------------------------------------------------------------------


def refused_by_models(written: Object) -> str | None:
    try:
        parse_pool(written)
    except ObjectInvalid as error:
        return str(error)
    return None


def same_verdict(cluster: Cluster, written: Object) -> bool:
    """Compare the verdicts of API server and models; True if both took the object."""
    answer = create(cluster, written)
    problem = refused_by_models(written)
    assert answer.status in (201, 400, 422), answer.body
    if answer.ok:
        assert problem is None, f"only the models refuse it: {problem}\n{written}"
    else:
        assert problem is not None, f"only the API server refuses it: {answer.body['message']}\n{written}"
    return answer.ok


@settings(PATIENT, max_examples=100)
@given(written=pools())
def test_the_api_server_takes_every_pool_that_the_models_take(installed: Cluster, written: Object) -> None:
    assert same_verdict(installed, written)


@settings(PATIENT, max_examples=500)
@given(written=st.one_of(st.builds(pool), st.builds(pool), pools()).flatmap(damaged))
def test_api_server_and_models_have_one_verdict_on_damaged_pools(installed: Cluster, written: Object) -> None:
    event("taken" if same_verdict(installed, written) else "refused")


def test_the_pool_with_every_field_is_taken(installed: Cluster) -> None:
    assert same_verdict(installed, pool())
