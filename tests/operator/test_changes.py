"""What an edit of a running pool means: live, at a restart, without effect, or refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from cacheaware_api import wire
from cacheaware_api.testing import pools
from cacheaware_api.v1alpha1 import parse_spec
from cacheaware_operator.changes import Changes, applied, compare
from cacheaware_operator.plan import Wanted, plan_engine

MakeWanted = Callable[..., Wanted]


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    functools.reduce(lambda node, part: node[part], parents, spec)[last] = value  # type: ignore[index]  # plain JSON
    return spec


@pytest.mark.parametrize(
    ("path", "value", "kind", "sentence"),
    [
        ("tiers.0.quota.nominalPercent", 40, "live", "spec.tiers[gold].quota.nominalPercent: 50 → 40"),
        ("tiers.0.weight", 2, "live", "spec.tiers[gold].weight: 4 → 2"),
        ("tiers.0.sla.timeToFirstToken", "2s", "live", "spec.tiers[gold].sla.timeToFirstToken: 800ms → 2s"),
        ("tiers.1.retention", "1m", "live", "spec.tiers[bronze].retention: absent → 1m"),
        ("sharing", "Pool", "live", "spec.sharing: absent → Pool"),
        ("defaultTier", "gold", "live", "spec.defaultTier: bronze → gold"),
        ("publicPercent", 10, "live", "spec.publicPercent: 0 → 10"),
        ("replicas", 2, "live", "spec.replicas: 1 → 2"),
        ("model.name", "other", "needs_restart", "spec.model.name: tiny → other"),
        ("model.source", "file:///b", "needs_restart", "spec.model.source: file:///models/tiny → file:///b"),
        ("model.maxModelLen", 1024, "needs_restart", "spec.model.maxModelLen: 2048 → 1024"),
        ("engine.args", [], "needs_restart", "spec.engine.args: ['--max-num-seqs=8'] → []"),
        ("engine.kvCache.memory", "2Gi", "needs_restart", "spec.engine.kvCache.memory: 1Gi → 2Gi"),
        ("engine.kvCache.blockSize", 32, "needs_restart", "spec.engine.kvCache.blockSize: absent → 32"),
        ("engine.image", "example.com/e:1", "no_effect", "spec.engine.image: absent → example.com/e:1"),
        (
            "podTemplate",
            {"nodeSelector": {"a": "b"}},
            "no_effect",
            "spec.podTemplate.nodeSelector: absent → {'a': 'b'}",
        ),
    ],
)
def test_each_field_is_told_with_what_its_change_means(
    make_wanted: MakeWanted, spec: dict[str, Any], path: str, value: Any, kind: str, sentence: str
) -> None:
    found = compare(make_wanted(), make_wanted(changed(spec, path, value)))
    assert found == Changes(**{kind: (sentence,)})


def test_the_engine_s_type_cannot_change(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    (refusal,) = compare(make_wanted(), make_wanted(changed(spec, "engine.type", "VLLM"))).refused
    assert refusal.startswith("spec.engine.type: Torch → VLLM: cannot change: ")


@pytest.mark.parametrize("field", ["name", "namespace"])
def test_another_name_is_another_pool(make_wanted: MakeWanted, field: str) -> None:
    (refusal,) = compare(make_wanted(), make_wanted(**{field: "other"})).refused
    assert refusal.startswith(f"metadata.{field}: ")


def test_a_tier_that_comes_or_goes_is_one_change(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    spec["tiers"][1] = {"name": "silver"}
    spec["defaultTier"] = "silver"
    assert compare(make_wanted(), make_wanted(spec)).live == (
        "spec.tiers[bronze]: present → absent",
        "spec.tiers[silver]: absent → present",
        "spec.defaultTier: bronze → silver",
    )


def test_the_order_of_tiers_and_written_defaults_change_nothing(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    spec["tiers"].reverse()
    spec["tiers"][0] |= {"weight": 1, "priority": 0, "batchingWindow": "0s", "admission": "Queue"}
    spec["replicas"] = 1
    assert not compare(make_wanted(), make_wanted(spec))


def test_keys_are_told_by_their_names_and_never_by_their_hashes(make_wanted: MakeWanted) -> None:
    def key(name: str, tenant: str = "acme") -> wire.ApiKey:
        return wire.ApiKey(name=name, sha256="0" * 64, tenant=tenant, tiers=("gold",))

    before = make_wanted(api_keys=wire.ApiKeys((key("alice"), key("bob"))))
    after = make_wanted(api_keys=wire.ApiKeys((key("alice", "globex"), key("carol"))))
    found = compare(before, after)
    assert found == Changes(live=("API key alice: changed", "API key bob: removed", "API key carol: added"))


def test_gateways_are_told_by_their_names_too(make_wanted: MakeWanted) -> None:
    first, second, third = (wire.GatewaySecret(name, digit * 64) for name, digit in ("m1", "m2", "n3"))
    before, after = (make_wanted(api_keys=wire.ApiKeys((), known)) for known in ((first,), (second, third)))
    assert compare(before, after).live == ("gateway m: changed", "gateway n: added")


def test_a_new_text_from_a_config_map_is_a_change(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    spec |= {
        "publicPercent": 10,
        "publicPrefixes": [{"name": "assistant", "configMapKeyRef": {"name": "prompts", "key": "a"}}],
    }
    found = compare(
        make_wanted(spec, prefix_texts={"assistant": "You help."}),
        make_wanted(spec, prefix_texts={"assistant": "Help."}),
    )
    assert found == Changes(live=("text of public prefix assistant: 9 → 5 characters",))


@settings(deadline=None, max_examples=30)  # a busy machine is no failure
@given(before=pools(), after=pools())
def test_what_engines_were_started_with_never_changes_while_they_run(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    running = Wanted("default", "chat", "uid-1", 1, parse_spec(before["spec"]))
    new = Wanted("default", "chat", "uid-1", 2, parse_spec(after["spec"]))
    result = applied(running, new)
    assert plan_engine(result.spec) == plan_engine(running.spec)
    assert result.spec.tiers == new.spec.tiers
    assert result.generation == 2
    assert not compare(result, new).live  # a second look finds only what waits for a restart


@settings(deadline=None, max_examples=30)  # a busy machine is no failure
@given(pool=pools())
def test_an_object_does_not_differ_from_itself(pool: dict[str, Any]) -> None:
    wanted = Wanted("default", "chat", "uid-1", 1, parse_spec(pool["spec"]))
    assert not compare(wanted, wanted)
