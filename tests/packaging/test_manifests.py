"""What is applied to a cluster: every overlay builds, with the rights that it needs and no more, and valid pools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cacheaware_api.objects import read_pool_file
from cacheaware_api.v1alpha1 import KIND, CacheAwarePool, parse_pool

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ["cluster-wide", "namespaced", "cpu-quickstart", "nvidia-vllm"]
SAMPLES = sorted(path.name for path in (MANIFESTS / "samples").glob("*.yaml"))
IMAGES = ["operator", "sidecar", "engine"]


def kustomize(folder: Path) -> list[Object]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: it builds the overlays")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@pytest.fixture(scope="session")
def overlays() -> dict[str, list[Object]]:
    return {name: kustomize(MANIFESTS / "overlays" / name) for name in OVERLAYS}


def pool_in(path: Path) -> CacheAwarePool:
    """The one pool of a file; what it refers to may be in the cluster."""
    (pool,) = [each for each in yaml.safe_load_all(path.read_text()) if each["kind"] == KIND]
    return parse_pool(pool)


def of_kind(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = [each for each in objects if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def operator_of(objects: list[Object]) -> Object:
    (container,) = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    found: Object = container
    return found


def rules(role: Object) -> Iterator[tuple[str, str, str]]:
    """Each right as group, resource, verb."""
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


class TestOverlays:
    @pytest.mark.parametrize("name", OVERLAYS)
    def test_names_are_there_once_and_every_object_is_somewhere(
        self, overlays: dict[str, list[Object]], name: str
    ) -> None:
        keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in overlays[name]]
        assert len(keys) == len(set(keys))
        cluster_scoped = {"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
        assert all((namespace is None) is (kind in cluster_scoped) for kind, namespace, _ in keys)

    @pytest.mark.parametrize("name", OVERLAYS)
    def test_two_operators_stand_by_for_each_other_except_in_the_quick_start(
        self, overlays: dict[str, list[Object]], name: str
    ) -> None:
        assert of_kind(overlays[name], "Deployment")["spec"]["replicas"] == (1 if name == "cpu-quickstart" else 2)

    @pytest.mark.parametrize("name", OVERLAYS)
    def test_the_operator_is_restricted_and_told_its_images(self, overlays: dict[str, list[Object]], name: str) -> None:
        deployment = of_kind(overlays[name], "Deployment")
        pod, container = deployment["spec"]["template"]["spec"], operator_of(overlays[name])
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        (source,) = container["envFrom"]
        images = of_kind(overlays[name], "ConfigMap", source["configMapRef"]["name"])["data"]
        assert {"--engine-image=$(ENGINE_IMAGE)", "--sidecar-image=$(SIDECAR_IMAGE)"} <= set(container["args"])
        assert set(images) == {"ENGINE_IMAGE", "SIDECAR_IMAGE"}
        assert not any(
            image.endswith(":latest") or ":" not in image for image in [container["image"], *images.values()]
        )

    def test_one_namespace_needs_nothing_of_the_cluster(self, overlays: dict[str, list[Object]]) -> None:
        objects = overlays["namespaced"]
        assert not [each["kind"] for each in objects if each["kind"].startswith(("Cluster", "Custom", "Namespace"))]
        assert "--namespace=$(POD_NAMESPACE)" in operator_of(objects)["args"]
        assert {each["metadata"]["namespace"] for each in objects} == {"cacheaware"}

    def test_cluster_wide_it_watches_every_namespace(self, overlays: dict[str, list[Object]]) -> None:
        objects = overlays["cluster-wide"]
        assert not any(argument.startswith("--namespace") for argument in operator_of(objects)["args"])
        binding = of_kind(objects, "ClusterRoleBinding")
        assert binding["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "cacheaware-operator",
        }
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "cacheaware-operator", "namespace": "cacheaware-system"}
        ]
        assert of_kind(objects, "CustomResourceDefinition")["metadata"]["name"] == "cacheawarepools.cacheaware.dev"


class TestRights:
    @pytest.fixture
    def roles(self, overlays: dict[str, list[Object]]) -> dict[str, set[tuple[str, str, str]]]:
        return {
            "Role": set(rules(of_kind(overlays["namespaced"], "Role", "cacheaware-operator"))),
            "ClusterRole": set(rules(of_kind(overlays["cluster-wide"], "ClusterRole", "cacheaware-operator"))),
        }

    @pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
    def test_the_operator_cannot_write_a_pool_only_its_status(
        self, roles: dict[str, set[tuple[str, str, str]]], kind: str
    ) -> None:
        verbs: dict[str, set[str]] = {}
        for group, resource, verb in roles[kind]:
            if group == "cacheaware.dev":
                verbs.setdefault(resource, set()).add(verb)
        assert verbs == {
            "cacheawarepools": {"get", "list", "watch"},
            "cacheawarepools/status": {"get", "patch", "update"},
        }

    @pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
    def test_it_deletes_nothing_that_serves_or_holds_keys(
        self, roles: dict[str, set[tuple[str, str, str]]], kind: str
    ) -> None:
        deletes = {resource for _, resource, verb in roles[kind] if verb in ("delete", "deletecollection")}
        assert deletes == {"serviceaccounts", "podmonitors", "prometheusrules"}

    @pytest.mark.parametrize("kind", ["Role", "ClusterRole"])
    def test_it_has_no_wildcard_and_gives_no_rights_to_others(
        self, roles: dict[str, set[tuple[str, str, str]]], kind: str
    ) -> None:
        assert not any("*" in right for right in roles[kind])
        assert not {"rbac.authorization.k8s.io"} & {group for group, _, _ in roles[kind]}
        assert not {"pods/exec", "pods/portforward", "pods/log", "nodes"} & {resource for _, resource, _ in roles[kind]}

    def test_cluster_wide_adds_only_looking_at_namespaces_and_definitions(
        self, roles: dict[str, set[tuple[str, str, str]]]
    ) -> None:
        more = roles["ClusterRole"] - roles["Role"]
        assert {(group, resource) for group, resource, _ in more} == {
            ("", "namespaces"),
            ("apiextensions.k8s.io", "customresourcedefinitions"),
        }
        assert {verb for _, _, verb in more} == {"get", "list", "watch"}

    @pytest.mark.parametrize("name", OVERLAYS)
    def test_the_lease_is_the_operator_s_own(self, overlays: dict[str, list[Object]], name: str) -> None:
        role = of_kind(overlays[name], "Role", "cacheaware-operator-lease")
        flag = next(each for each in operator_of(overlays[name])["args"] if each.startswith("--lease-name="))
        lease = flag.partition("=")[2]
        for rule in role["rules"]:
            assert rule["resources"] == ["leases"]
            assert rule.get("resourceNames", [lease]) == [lease]
            assert rule["verbs"] == ["create"] or "resourceNames" in rule
        assert role["metadata"]["namespace"] == of_kind(overlays[name], "Deployment")["metadata"]["namespace"]

    def test_every_kind_that_a_pool_becomes_may_be_applied(
        self, roles: dict[str, set[tuple[str, str, str]]], made_kinds: dict[str, str]
    ) -> None:
        for kind, group in made_kinds.items():
            resource = {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
            for verb in ("get", "list", "watch", "create", "patch"):
                assert (group, resource, verb) in roles["Role"], f"{verb} {resource}"

    @pytest.fixture
    def made_kinds(self) -> dict[str, str]:
        """Every kind that the builders make, with its API group."""
        from cacheaware_operator.cluster.images import Images
        from cacheaware_operator.cluster.internal_secret import InternalSecret
        from cacheaware_operator.cluster.objects import Discovered, OptionalKind, build_objects
        from cacheaware_operator.fleet import Snapshot
        from cacheaware_operator.plan import Wanted, plan_pool

        file = read_pool_file((MANIFESTS / "samples" / "open.yaml").read_bytes())
        wanted = Wanted.from_file(file, uid="u", generation=1)
        objects = build_objects(
            wanted,
            plan_pool(wanted, Snapshot()),
            images=Images(engine="e:1", sidecar="s:1"),
            internal=InternalSecret("a", "b", "c"),
            discovered=Discovered(frozenset(OptionalKind)),
        )
        return {each["kind"]: each["apiVersion"].rpartition("/")[0] for each in objects}


class TestPools:
    @pytest.mark.parametrize("name", SAMPLES)
    def test_a_sample_is_valid(self, name: str) -> None:
        assert pool_in(MANIFESTS / "samples" / name).spec.tiers

    @pytest.mark.parametrize("name", ["cpu-quickstart", "nvidia-vllm"])
    def test_an_overlay_s_pool_is_valid_and_in_a_namespace_that_is_made(
        self, overlays: dict[str, list[Object]], name: str
    ) -> None:
        pool = pool_in(MANIFESTS / "overlays" / name / "pool.yaml")
        assert of_kind(overlays[name], "Namespace", pool.metadata.namespace)

    def test_the_gpu_overlay_s_pool_is_the_sample(self) -> None:
        sample = pool_in(MANIFESTS / "samples" / "gpu-vllm.yaml")
        overlay = pool_in(MANIFESTS / "overlays" / "nvidia-vllm" / "pool.yaml")
        assert overlay.spec == sample.spec


class TestMonitoring:
    def test_the_component_is_taken_by_an_overlay(self, tmp_path: Path) -> None:
        """Built from a copy of the tree, because a kustomization reaches nothing outside its own folders."""
        for folder in ("manifests", "crds"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("cacheaware_api"))
        overlay = tmp_path / "manifests" / "overlays" / "mine"
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(
            "namespace: ops\nresources: [../namespaced]\ncomponents: [../../components/monitoring]\n"
        )
        objects = kustomize(overlay)
        monitor = of_kind(objects, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        container = operator_of(objects)
        assert endpoint["port"] in [port["name"] for port in container["ports"]]
        labels = of_kind(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


class TestArgo:
    @pytest.fixture
    def health(self) -> Any:
        """The shipped script as a function of an object, taken from the ConfigMap that it is shipped in."""
        lupa = pytest.importorskip("lupa", reason="lupa is not installed: it runs the Lua that Argo CD would")
        (config_map,) = kustomize(MANIFESTS / "argocd")
        script = config_map["data"]["resource.customizations.health.cacheaware.dev_CacheAwarePool"]
        lua = lupa.LuaRuntime()
        run = lua.execute(f"return function(obj)\n{script}\nend")

        def judge(generation: int, status: Object | None) -> tuple[str, str]:
            pool: Object = {"metadata": {"generation": generation}}
            if status is not None:
                pool["status"] = status
            answer = run(lua.table_from(pool, recursive=True))
            return answer["status"], answer["message"]

        return judge

    @pytest.mark.parametrize(
        ("conditions", "says"),
        [
            pytest.param({"Ready": "True"}, "Healthy", id="ready"),
            pytest.param({"Ready": "True", "SLAMet": "False"}, "Healthy", id="ready, and an SLA missed"),
            pytest.param({"Ready": "False"}, "Progressing", id="not ready"),
            pytest.param({"Ready": "True", "Reconciling": "True"}, "Progressing", id="an edit rolls out"),
            pytest.param({"Ready": "False", "Stalled": "True"}, "Degraded", id="stalled"),
            pytest.param({"SLAMet": "Unknown"}, "Progressing", id="not judged yet"),
        ],
    )
    def test_health_is_that_of_kstatus(self, health: Any, conditions: dict[str, str], says: str) -> None:
        listed = [
            {"type": type_, "status": status, "reason": "Because", "message": "of it"}
            for type_, status in conditions.items()
        ]
        status, message = health(2, {"observedGeneration": 2, "conditions": listed})
        assert status == says
        assert message in ("Because: of it", "waiting for the operator")

    def test_an_edit_that_nobody_has_seen_is_in_progress(self, health: Any) -> None:
        ready = [{"type": "Ready", "status": "True", "reason": "AllReplicasReady", "message": ""}]
        assert health(3, {"observedGeneration": 2, "conditions": ready})[0] == "Progressing"
        assert health(2, {"observedGeneration": 2, "conditions": ready}) == ("Healthy", "AllReplicasReady")

    @pytest.mark.parametrize("status", [None, {}], ids=["no status", "an empty one"])
    def test_a_new_pool_waits_for_the_operator(self, health: Any, status: Object | None) -> None:
        assert health(1, status) == ("Progressing", "waiting for the operator")


class TestImages:
    @pytest.mark.parametrize("part", IMAGES)
    def test_it_is_built_in_stages_from_one_base_and_runs_as_nobody(self, part: str) -> None:
        text = (ROOT / part / "Dockerfile").read_text()
        compiler = ["${COMPILER}"] if part == "engine" else []
        assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}", "${BASE}", *compiler, "needed"]
        assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
        assert f'["optional-dependencies"]["{part}"]' in text
        assert f'ENTRYPOINT ["python", "-m", "cacheaware_{part}"]' in text

    @pytest.mark.parametrize("part", IMAGES)
    def test_everything_it_copies_is_there_and_not_ignored(self, part: str) -> None:
        allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        text = (ROOT / part / "Dockerfile").read_text()
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
            *sources, _ = line.split()
            for source in sources:
                assert source in allowed, f"{source} is ignored"
                assert (ROOT / source).exists()

    @pytest.mark.parametrize("part", IMAGES)
    def test_it_needs_the_packages_of_the_wheel(self, part: str) -> None:
        """The build backend reads every package that pyproject.toml lists: a folder left out fails the build."""
        project = (ROOT / "pyproject.toml").read_text()
        folders = set(re.findall(r'^    "([a-z]+)/cacheaware', project, re.MULTILINE))
        copied = set(re.findall(r"^COPY (\w+) \w+$", (ROOT / part / "Dockerfile").read_text(), re.MULTILINE))
        assert folders
        assert folders <= copied
