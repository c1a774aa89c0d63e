"""All objects of a pool together: what is always true of them, whatever the pool says."""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_api import testing, wire
from cacheaware_api.v1alpha1 import parse_spec
from cacheaware_operator.cluster.images import Images
from cacheaware_operator.cluster.internal_secret import InternalSecret
from cacheaware_operator.cluster.names import selector
from cacheaware_operator.cluster.objects import Discovered, OptionalKind, build_objects
from cacheaware_operator.cluster.view_file import read_view
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.plan import Wanted, plan_pool

Object = dict[str, Any]
BuildPool = Callable[..., Any]

IMAGES = Images(engine="example.test/engine:1", sidecar="example.test/sidecar:1")
INTERNAL = InternalSecret(salt_key="salt", control_token="token", hop_key="hop")

ALWAYS = [
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "NetworkPolicy",
    "Service",
    "Service",
    "Deployment",
    "PodDisruptionBudget",
]


def wanted_from(pool: Object) -> Wanted:
    return Wanted("team-a", pool["metadata"]["name"], "uid-1", 1, parse_spec(pool["spec"]), prefix_texts=_texts(pool))


def _texts(pool: Object) -> dict[str, str]:
    return {prefix["name"]: prefix["text"] for prefix in pool["spec"].get("publicPrefixes", ())}


def objects_of(wanted: Wanted, kinds: frozenset[OptionalKind] = frozenset(OptionalKind)) -> tuple[Object, ...]:
    plan = plan_pool(wanted, Snapshot())
    return build_objects(wanted, plan, images=IMAGES, internal=INTERNAL, discovered=Discovered(kinds))


def template_of(objects: tuple[Object, ...]) -> Object:
    (found,) = [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]
    template: Object = found
    return template


class TestEveryPool:
    @given(testing.pools(), st.frozensets(st.sampled_from(OptionalKind)))
    @settings(max_examples=30, deadline=None)
    def test_becomes_objects_that_an_api_server_can_take(self, pool: Object, kinds: frozenset[OptionalKind]) -> None:
        wanted = wanted_from(pool)
        objects = objects_of(wanted, kinds)
        assert [each["kind"] for each in objects] == ALWAYS + [kind.value for kind in OptionalKind if kind in kinds]
        seen = set()
        for each in objects:
            metadata = each["metadata"]
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", metadata["name"])
            assert metadata["namespace"] == "team-a"
            (owner,) = metadata["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == ("uid-1", True)
            assert "finalizers" not in metadata
            for labels in _label_maps(each):
                for key, value in labels.items():
                    assert re.fullmatch(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?", key)
                    assert re.fullmatch(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?", value)
            seen.add((each["kind"], metadata["name"]))
        assert len(seen) == len(objects), "no two objects are one"
        assert json.loads(json.dumps(objects)) == list(objects), "plain JSON, with keys that are texts"

    @given(testing.pools())
    @settings(max_examples=30, deadline=None)
    def test_says_only_what_it_means(self, pool: Object) -> None:
        """Server-side apply owns every field that is sent: a null or an empty text would take a field from others."""
        for each in objects_of(wanted_from(pool)):
            for path, value in _leaves(each):
                assert value is not None, path
                assert value != "" or path.endswith((".value", ".matchLabels")), path
            assert "status" not in each

    @given(testing.pools(), testing.pools())
    @settings(max_examples=50, deadline=None)
    def test_restarts_nothing_for_tiers_quotas_keys_or_scale(self, pool: Object, edit: Object) -> None:
        edited = copy.deepcopy(pool)
        edited["spec"] = {**copy.deepcopy(edit["spec"]), **{part: pool["spec"][part] for part in ("model", "engine")}}
        assert template_of(objects_of(wanted_from(edited))) == template_of(objects_of(wanted_from(pool)))

    @given(testing.pools())
    @settings(max_examples=10, deadline=None)
    def test_becomes_the_same_objects_each_time(self, pool: Object) -> None:
        assert objects_of(wanted_from(pool)) == objects_of(wanted_from(pool))


class TestScale:
    @pytest.mark.parametrize("replicas", [0, 1, 7])
    def test_replicas_are_copied_from_the_pool_and_from_nowhere_else(
        self, build_pool: BuildPool, replicas: int
    ) -> None:
        assert build_pool(replicas=replicas)("Deployment")["spec"]["replicas"] == replicas

    def test_the_selector_as_text_selects_what_the_deployment_does(self, build_pool: BuildPool) -> None:
        labels = build_pool()("Deployment")["spec"]["selector"]["matchLabels"]
        assert selector("chat") == ",".join(f"{key}={value}" for key, value in labels.items())


class TestRestarts:
    @pytest.mark.parametrize(
        "fields",
        [
            pytest.param({"model": {"source": "hf://org/other"}}, id="model source"),
            pytest.param({"model": {"name": "other"}}, id="model name"),
            pytest.param({"model": {"maxModelLen": 1024}}, id="context"),
            pytest.param({"engine": {"image": "example.test/other:2"}}, id="image"),
            pytest.param({"engine": {"args": ["--max-num-seqs=4"]}}, id="arguments"),
            pytest.param({"engine": {"env": [{"name": "B", "value": "2"}]}}, id="environment"),
            pytest.param({"engine": {"kvCache": {"memory": "2Gi"}}}, id="cache size"),
            pytest.param({"engine": {"kvCache": {"memory": "1Gi", "blockSize": 32}}}, id="block size"),
            pytest.param({"engine": {"kvCache": {"memory": "1Gi", "dtype": "INT8"}}}, id="cache dtype"),
            pytest.param({"engine": {"resources": {"requests": {"cpu": "1"}}}}, id="resources"),
            pytest.param({"podTemplate": {"nodeSelector": {"a": "b"}}}, id="pod template"),
        ],
    )
    def test_what_an_engine_is_started_with_is_a_rollout(self, build_pool: BuildPool, fields: dict[str, Any]) -> None:
        assert build_pool(**fields).template != build_pool().template

    def test_a_new_view_key_or_token_is_none(self, build_pool: BuildPool) -> None:
        keys = wire.ApiKeys((wire.ApiKey("gold", "0" * 64, "acme", ("gold",)),))
        before = build_pool()
        after = build_pool(wanted={"api_keys": keys, "generation": 2}, tiers=[{"name": "only"}], defaultTier="only")
        assert before("ConfigMap") != after("ConfigMap")
        assert before("Secret") != after("Secret")
        assert before.template == after.template


class TestView:
    def test_the_file_is_the_view_and_gives_its_number_back(self, make_wanted: Callable[..., Wanted]) -> None:
        wanted = make_wanted()
        plan = plan_pool(wanted, Snapshot())
        (config_map,) = [each for each in objects_of(wanted) if each["kind"] == "ConfigMap"]
        assert config_map["metadata"]["name"] == "chat-view"
        assert read_view(config_map["data"]) == plan.view

    @pytest.mark.parametrize(
        "data",
        [
            pytest.param(None, id="no ConfigMap"),
            pytest.param({}, id="no entry"),
            pytest.param({"view.json": "{"}, id="no JSON"),
            pytest.param({"view.json": '{"model": "m"}'}, id="no view"),
        ],
    )
    def test_what_nobody_can_read_counts_as_missing(self, data: dict[str, str] | None) -> None:
        assert read_view(data) is None


class TestSecret:
    def test_it_has_what_the_sidecar_reads(self, build_pool: BuildPool) -> None:
        keys = wire.ApiKeys((wire.ApiKey("gold", "0" * 64, "acme", ("gold",), "gold"),))
        secret = build_pool(wanted={"api_keys": keys})("Secret")
        assert secret["metadata"]["name"] == "chat-internal"
        texts = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
        assert set(texts) == {"salt-key", "control-token", "hop-key", "api-keys.json"}
        assert wire.from_json(wire.ApiKeys, json.loads(texts["api-keys.json"])) == keys
        assert "stringData" not in secret

    def test_keys_are_made_once(self) -> None:
        first = InternalSecret.completed(None)
        assert len({first.salt_key, first.control_token, first.hop_key}) == 3
        again = InternalSecret.completed(build_pool_secret(first)["data"], fresh=_never)
        assert again == first

    @pytest.mark.parametrize(
        "broken", ["", "IA==", "not base64!", "/w=="], ids=["empty", "blank", "no base64", "bytes"]
    )
    def test_only_what_is_missing_or_unusable_is_made_anew(self, broken: str) -> None:
        data = {**build_pool_secret(INTERNAL)["data"], "hop-key": broken}
        completed = InternalSecret.completed(data, fresh=lambda: "new")
        assert (completed.salt_key, completed.control_token, completed.hop_key) == ("salt", "token", "new")

    def test_of_a_rotated_token_the_first_line_is_sent_and_all_are_kept(self) -> None:
        internal = InternalSecret("salt", "\nnew\nold\n", "hop")
        assert internal.bearer == "new"
        assert InternalSecret.completed(build_pool_secret(internal)["data"], fresh=_never) == internal

    def test_it_is_never_shown(self) -> None:
        assert "token" not in repr(INTERNAL)
        assert "token" not in f"{INTERNAL}"


class TestNetwork:
    def test_the_control_port_is_for_operator_peers_and_monitoring(self, build_pool: BuildPool) -> None:
        spec = build_pool()("NetworkPolicy")["spec"]
        clients, control = spec["ingress"]
        assert clients == {"ports": [{"port": 8000, "protocol": "TCP"}]}
        assert control["ports"] == [{"port": 9400, "protocol": "TCP"}]
        assert [each["podSelector"]["matchLabels"] for each in control["from"]] == [
            {"app.kubernetes.io/name": "cacheaware-operator"},
            {"cacheaware.dev/pool": "chat"},
            {"app.kubernetes.io/name": "prometheus"},
        ]
        assert "namespaceSelector" not in control["from"][1], "peers are pods of the same namespace"
        assert spec["podSelector"]["matchLabels"] == {"cacheaware.dev/pool": "chat"}
        assert spec["policyTypes"] == ["Ingress"]

    def test_the_operator_s_namespace_counts_where_it_is_known(self, make_wanted: Callable[..., Wanted]) -> None:
        wanted = make_wanted()
        objects = build_objects(
            wanted,
            plan_pool(wanted, Snapshot()),
            images=IMAGES,
            internal=INTERNAL,
            discovered=Discovered(),
            operator_namespace="ops",
        )
        (policy,) = [each for each in objects if each["kind"] == "NetworkPolicy"]
        operator = policy["spec"]["ingress"][1]["from"][0]
        assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ops"}}


class TestServices:
    def test_clients_see_the_openai_side_only(self, build_pool: BuildPool) -> None:
        spec = build_pool()("Service", "chat")["spec"]
        assert [port["port"] for port in spec["ports"]] == [8000]
        assert spec["type"] == "ClusterIP"

    def test_peers_and_operator_reach_every_pod_ready_or_not(self, build_pool: BuildPool) -> None:
        spec = build_pool()("Service", "chat-peers")["spec"]
        assert spec["clusterIP"] == "None"
        assert spec["publishNotReadyAddresses"] is True
        assert {port["port"] for port in spec["ports"]} == {8000, 9400}

    def test_a_name_that_begins_with_a_digit_becomes_a_host_name(self, build_pool: BuildPool) -> None:
        pool = build_pool(wanted={"name": "7b"})
        assert pool("Service", "p-7b")
        assert pool("Service", "p-7b-peers")
        assert pool("Deployment", "7b")

    def test_the_longest_name_still_fits(self, build_pool: BuildPool) -> None:
        for name in ("a" * 54, "7" * 54):
            assert max(len(each["metadata"]["name"]) for each in build_pool(wanted={"name": name}).objects) <= 63


def test_a_node_drain_takes_one_pod_at_a_time_and_a_pool_of_one_too(build_pool: BuildPool) -> None:
    spec = build_pool(replicas=1)("PodDisruptionBudget")["spec"]
    assert spec["maxUnavailable"] == 1
    assert "minAvailable" not in spec


def test_the_pods_account_has_no_token(build_pool: BuildPool) -> None:
    assert build_pool()("ServiceAccount")["automountServiceAccountToken"] is False


def build_pool_secret(internal: InternalSecret) -> Object:
    wanted = Wanted("team-a", "chat", "uid-1", 1, parse_spec(MINIMAL))
    objects = build_objects(
        wanted, plan_pool(wanted, Snapshot()), images=IMAGES, internal=internal, discovered=Discovered()
    )
    return next(each for each in objects if each["kind"] == "Secret")


MINIMAL = {
    "model": {"name": "tiny", "source": "file:///models/tiny"},
    "engine": {"type": "Torch"},
    "tiers": [{"name": "only"}],
    "identity": {"type": "Open"},
}


def _never() -> str:
    raise AssertionError("a key that is there must be kept")


def _label_maps(value: Any) -> Iterator[dict[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("labels", "matchLabels"):
                yield inner
            yield from _label_maps(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _label_maps(inner)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value
