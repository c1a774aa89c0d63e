"""Every rule of the object, broken in turn: the error names the field and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_api import rules
from cacheaware_api.engine_flags import OWNED, EngineType, owned_flag
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.v1alpha1 import parse_pool, parse_spec

Spec = dict[str, Any]


def change(*path: str | int, to: Any) -> Callable[[Spec], None]:
    def apply(spec: Spec) -> None:
        place: Any = spec
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = to

    return apply


def remove(*path: str | int) -> Callable[[Spec], None]:
    def apply(spec: Spec) -> None:
        place: Any = spec
        for part in path[:-1]:
            place = place[part]
        del place[path[-1]]

    return apply


def both(*changes: Callable[[Spec], None]) -> Callable[[Spec], None]:
    def apply(spec: Spec) -> None:
        for each in changes:
            each(spec)

    return apply


@pytest.mark.parametrize(
    ("breaks", "expected"),
    [
        pytest.param(
            change("tiers", 1, "quota", "nominalPercent", to=41),
            "spec.tiers: nominalPercent of the tiers plus publicPercent must not exceed 100: "
            "50 + 41 + 10 public = 101: lower them by 1 in all",
            id="shares beyond the whole",
        ),
        pytest.param(
            change("tiers", 0, "quota", "lendingLimitPercent", to=51),
            "spec.tiers[0].quota.lendingLimitPercent: must not exceed nominalPercent (50): lower it to at most 50",
            id="lends more than it has",
        ),
        pytest.param(
            change("tiers", 1, "quota", to={"lendingLimitPercent": 1}),
            "spec.tiers[1].quota.lendingLimitPercent: must not exceed nominalPercent (0): lower it to at most 0",
            id="lends without having",
        ),
        pytest.param(
            change("publicPercent", to=0),
            "spec.publicPrefixes: publicPrefixes need publicPercent above 0: "
            "set spec.publicPercent, or remove the prefixes",
            id="prefixes with a share of 0",
        ),
        pytest.param(
            remove("publicPercent"),
            "spec.publicPrefixes: publicPrefixes need publicPercent above 0: "
            "set spec.publicPercent, or remove the prefixes",
            id="prefixes without a share",
        ),
        pytest.param(
            change("defaultTier", to="silver"),
            "spec.defaultTier: must name one of the tiers: choose one of gold, bronze",
            id="an unknown default tier",
        ),
        pytest.param(
            change("tiers", 0, "name", to="auto"),
            "spec.tiers[0].name: auto and default are reserved: clients send them for no tier in particular: "
            "choose another name",
            id="a tier called auto",
        ),
        pytest.param(
            both(change("tiers", 0, "name", to="default"), remove("defaultTier")),
            "spec.tiers[0].name: auto and default are reserved: clients send them for no tier in particular: "
            "choose another name",
            id="a tier called default",
        ),
        pytest.param(
            change("tiers", 0, "name", to="bronze"),
            "spec.tiers[1].name: must be unique in its list: tiers[0] has the same: choose another name",
            id="two tiers of one name",
        ),
        pytest.param(
            change("tiers", 0, "name", to="Gold"),
            "spec.tiers[0].name: must be a DNS label: lower-case letters, digits and '-', beginning and ending with a "
            "letter or digit, not 'Gold'",
            id="a tier's name is no DNS label",
        ),
        pytest.param(change("tiers", to=[]), "spec.tiers: must have at least 1: add one", id="no tiers"),
        pytest.param(
            change("tiers", 0, "batchingWindow", to="401ms"),
            "spec.tiers[0].batchingWindow: must be at most half of sla.timeToFirstToken (800ms): "
            "lower it to at most 400ms",
            id="a window beyond half of the SLA",
        ),
        pytest.param(
            change("tiers", 0, "batchingWindow", to="5 ms"),
            "spec.tiers[0].batchingWindow: must be a duration such as 250ms, 10s or 1h30m, not '5 ms'",
            id="a window that is no duration",
        ),
        pytest.param(
            change("identity", to={"type": "Open"}),
            "spec.sharing: must not be Tenant with identity.type Open, which knows no tenants: "
            "choose Tier, Pool or None, or another identity.type",
            id="tenants where nobody is known",
        ),
        pytest.param(
            remove("identity", "apiKeys"),
            "spec.identity.apiKeys: apiKeys is required for type APIKeys, and only there: "
            "add apiKeys: {secretRef: {name: …}}",
            id="API keys without keys",
        ),
        pytest.param(
            both(change("identity", "type", to="Open"), remove("sharing")),
            "spec.identity.apiKeys: apiKeys is required for type APIKeys, and only there: "
            "remove it, or set type: APIKeys",
            id="keys without API keys",
        ),
        pytest.param(
            change("identity", to={"type": "TrustedHeaders"}),
            "spec.identity.trustedHeaders: trustedHeaders is required for type TrustedHeaders, and only there: "
            "add trustedHeaders: {secretRef: {name: …}}",
            id="trusted headers without a secret",
        ),
        pytest.param(
            change("identity", "trustedHeaders", to={"secretRef": {"name": "gateway"}}),
            "spec.identity.trustedHeaders: trustedHeaders is required for type TrustedHeaders, and only there: "
            "remove it, or set type: TrustedHeaders",
            id="trusted headers of another type",
        ),
        pytest.param(
            change("publicPrefixes", 1, "configMapKeyRef", to={"name": "a", "key": "b"}),
            "spec.publicPrefixes[1]: exactly one of configMapKeyRef and text is needed: remove one of them",
            id="a prefix from two places",
        ),
        pytest.param(
            remove("publicPrefixes", 1, "text"),
            "spec.publicPrefixes[1]: exactly one of configMapKeyRef and text is needed: add one of them",
            id="a prefix from nowhere",
        ),
        pytest.param(
            change("publicPrefixes", 1, "name", to="assistant"),
            "spec.publicPrefixes[1].name: must be unique in its list: publicPrefixes[0] has the same: "
            "choose another name",
            id="two prefixes of one name",
        ),
        pytest.param(
            change("engine", "env", 0, "valueFrom", to={"fieldRef": {"fieldPath": "metadata.name"}}),
            "spec.engine.env[0]: value and valueFrom exclude each other: remove one of them",
            id="a variable from two places",
        ),
        pytest.param(
            change("engine", "env", 1, "valueFrom", to={}),
            "spec.engine.env[1].valueFrom: exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed: "
            "keep one of them",
            id="a variable from nowhere",
        ),
        pytest.param(
            change("engine", "args", to=["16", "--max-num-seqs"]),
            "spec.engine.args[0]: must begin with a flag: "
            "give each flag as --flag=value, or as --flag and then its value",
            id="arguments that begin with a value",
        ),
        pytest.param(
            change("engine", "args", to=["--threads=2", "--max-model-len=1"]),
            "spec.engine.args[1]: --max-model-len is set by the pool itself: set spec.model.maxModelLen instead",
            id="an owned flag",
        ),
        pytest.param(
            change("rebalancing", "interval", to="10ms"),
            "spec.rebalancing.interval: must be at least 1s: raise it; 30s is a good start",
            id="rebalancing without rest",
        ),
    ],
)
def test_a_broken_rule_is_the_one_problem_that_is_told(
    pool: dict[str, Any], breaks: Callable[[Spec], None], expected: str
) -> None:
    breaks(pool["spec"])
    with pytest.raises(ObjectInvalid) as caught:
        parse_pool(pool)
    assert [str(problem) for problem in caught.value.problems] == [expected]


@pytest.mark.parametrize(
    "reaches",
    [
        pytest.param(change("tiers", 1, "quota", "nominalPercent", to=40), id="shares of the whole"),
        pytest.param(change("tiers", 0, "quota", "lendingLimitPercent", to=50), id="lends all it has"),
        pytest.param(change("tiers", 0, "batchingWindow", to="400ms"), id="a window of half the SLA"),
        pytest.param(change("rebalancing", "interval", to="1s"), id="the least interval"),
    ],
)
def test_a_bound_may_be_reached(pool: dict[str, Any], reaches: Callable[[Spec], None]) -> None:
    reaches(pool["spec"])
    assert parse_pool(pool)


def test_every_problem_is_told_at_once_whether_of_a_field_or_a_rule(pool: dict[str, Any]) -> None:
    spec = pool["spec"]
    spec["tiers"][0]["quota"] = {"nominalPercent": 20, "lendingLimitPercent": 30}
    spec["tiers"][1]["weight"] = "4"
    spec["sharing"] = "tenant"
    spec["teirs"] = []
    del spec["model"]["name"]
    with pytest.raises(ObjectInvalid) as caught:
        parse_spec(spec)
    assert sorted(str(problem) for problem in caught.value.problems) == [
        "spec.model.name: is missing: add it",
        "spec.sharing: must be Pool, Tier, Tenant or None, not 'tenant': did you mean Tenant?",
        "spec.teirs: unknown field: did you mean tiers?",
        "spec.tiers[0].quota.lendingLimitPercent: must not exceed nominalPercent (20): lower it to at most 20",
        "spec.tiers[1].weight: must be an integer, not '4': remove the quotes",
    ]


def test_tiers_that_are_all_wrong_are_not_called_too_few(pool: dict[str, Any]) -> None:
    for tier in pool["spec"]["tiers"]:
        tier["weight"] = 0
    with pytest.raises(ObjectInvalid) as caught:
        parse_pool(pool)
    assert [problem.path for problem in caught.value.problems] == ["spec.tiers[0].weight", "spec.tiers[1].weight"]


def test_the_engine_type_cannot_change(pool: dict[str, Any]) -> None:
    other = pool["spec"] | {"engine": {"type": "VLLM"}}
    (broken,) = rules.broken_by_change(pool["spec"], other)
    assert broken.path == ("engine", "type")
    assert broken.message == rules.ENGINE_TYPE_IMMUTABLE
    assert broken.fix == "it was Torch: make a second pool with VLLM and move the traffic"
    assert rules.broken_by_change(pool["spec"], pool["spec"]) == []


@pytest.mark.parametrize(
    ("engine", "argument", "flag"),
    [
        pytest.param("Torch", "--port", "--port", id="the flag itself"),
        pytest.param("Torch", "--port=80", "--port", id="with its value"),
        pytest.param("Torch", "--kv-s=x", "--kv-socket", id="a beginning that argparse completes"),
        pytest.param("Torch", "--max-num-seqs=4", None, id="a free flag"),
        pytest.param("Torch", "--max-num-batched-tokens", None, id="another"),
        pytest.param("Torch", "4", None, id="a value"),
        pytest.param("Torch", "-5", None, id="a negative value"),
        pytest.param("VLLM", "--api_key=x", "--api-key", id="vLLM takes underscores"),
        pytest.param("VLLM", "--no-enable-prefix-caching", "--no-enable-prefix-caching", id="a negation"),
        pytest.param("VLLM", "--kv-transfer-config.role=x", "--kv-transfer-config", id="a part of a flag"),
        pytest.param("VLLM", "--config", "--config", id="a file of flags"),
        pytest.param("VLLM", "-dp=2", "-dp", id="a short flag"),
        pytest.param("VLLM", "--max-num-seqs", None, id="free in vLLM"),
        pytest.param("VLLM", "--tensor-parallel-size=2", None, id="free in vLLM too"),
    ],
)
def test_flags_that_the_pool_owns(engine: str, argument: str, flag: str | None) -> None:
    assert owned_flag(EngineType(engine), argument) == flag


@pytest.mark.parametrize("engine", EngineType)
def test_every_owned_flag_is_refused_by_name(pool: dict[str, Any], engine: EngineType) -> None:
    pool["spec"]["engine"]["type"] = engine.value
    pool["spec"]["engine"]["args"] = list(OWNED[engine])
    with pytest.raises(ObjectInvalid) as caught:
        parse_pool(pool)
    assert [problem.message for problem in caught.value.problems] == [
        f"{flag} is set by the pool itself" for flag in OWNED[engine]
    ]
