"""What is to run follows from the object; command lines follow from what is to run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_operator.commands import (
    ReplicaPlace,
    engine_arguments,
    engine_environment,
    sidecar_arguments,
    threads_per_engine,
    vllm_arguments,
)
from cacheaware_operator.fleet import ReplicaSnapshot, Snapshot
from cacheaware_operator.plan import Wanted, plan_engine, plan_pool

MakeWanted = Callable[..., Wanted]
MakeReplica = Callable[..., ReplicaSnapshot]

PLACE = ReplicaPlace(
    name="chat-0",
    port=8000,
    control_port=9400,
    engine_port=8001,
    kv_socket=Path("/run/kv.sock"),
    view_file=Path("/run/view.json"),
    secrets_dir=Path("/run/secrets"),
)


def test_a_plan_names_every_replica_and_keeps_the_view_that_runs(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    wanted = make_wanted(spec | {"replicas": 3})
    plan = plan_pool(wanted, Snapshot())
    assert plan.replicas == ("chat-0", "chat-1", "chat-2")
    again = plan_pool(wanted, Snapshot(view=plan.view))
    assert again == plan


def test_an_engine_is_told_what_the_spec_says_and_its_own_flags_come_last(make_wanted: MakeWanted) -> None:
    assert engine_arguments(plan_engine(make_wanted().spec), PLACE) == (
        "--model=file:///models/tiny",
        "--served-model-name=tiny",
        "--host=127.0.0.1",
        "--port=8001",
        "--kv-socket=/run/kv.sock",
        "--kv-cache-dtype=auto",
        f"--kv-cache-memory={2**30}",
        "--max-model-len=2048",
        "--max-num-seqs=8",
    )


def test_what_the_spec_leaves_out_is_left_to_the_engine(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    del spec["model"]["maxModelLen"], spec["engine"]["kvCache"]
    arguments = engine_arguments(plan_engine(make_wanted(spec).spec), PLACE)
    assert not any(each.startswith(("--max-model-len", "--kv-cache-memory", "--block-size")) for each in arguments)


@pytest.mark.parametrize(
    ("kv_cache", "given"),
    [
        pytest.param({}, [], id="absent: vLLM knows what its device can do"),
        pytest.param({"blockSize": 64}, ["--block-size=64"], id="as the pool says"),
    ],
)
def test_the_block_size_of_a_vllm_is_its_own_unless_the_pool_says_otherwise(
    make_wanted: MakeWanted, spec: dict[str, Any], kv_cache: dict[str, Any], given: list[str]
) -> None:
    spec["engine"] |= {"type": "VLLM", "args": [], "kvCache": kv_cache}
    arguments = vllm_arguments(plan_engine(make_wanted(spec).spec), PLACE, "/venv/bin/python")
    assert [each for each in arguments if each.startswith("--block-size")] == given


def test_threads_of_the_pool_s_own_args_count_more_than_ours(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    spec["engine"]["args"] = ["--threads=3"]
    arguments = engine_arguments(plan_engine(make_wanted(spec).spec), PLACE, threads=1)
    assert [each for each in arguments if each.startswith("--threads")] == ["--threads=1", "--threads=3"]


@pytest.mark.parametrize(
    ("cores", "replicas", "threads"),
    [
        pytest.param(8, 1, None, id="one engine finds out itself"),
        pytest.param(8, 2, 4, id="shared evenly"),
        pytest.param(8, 3, 2, id="rounded down"),
        pytest.param(2, 5, 1, id="never less than one"),
    ],
)
def test_engines_share_the_cores(cores: int, replicas: int, threads: int | None) -> None:
    assert threads_per_engine(cores, replicas) == threads


def test_an_engine_s_environment_is_ours_and_what_the_pool_adds(make_wanted: MakeWanted, spec: dict[str, Any]) -> None:
    inherited = {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE"}
    environment = engine_environment(plan_engine(make_wanted().spec), inherited)
    assert (environment["PATH"], environment["OMP_WAIT_POLICY"], environment["A"]) == ("/bin", "ACTIVE", "1")
    spec["engine"]["env"] = [{"name": "OMP_WAIT_POLICY", "value": "PASSIVE"}]
    assert engine_environment(plan_engine(make_wanted(spec).spec), inherited)["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_sidecar_is_told_where_everything_is() -> None:
    assert sidecar_arguments(PLACE) == (
        "--host=127.0.0.1",
        "--port=8000",
        "--control-host=127.0.0.1",
        "--control-port=9400",
        "--engine-url=http://127.0.0.1:8001",
        "--kv-socket=/run/kv.sock",
        "--view-file=/run/view.json",
        "--secrets-dir=/run/secrets",
    )


# -- numbers of views --------------------------------------------------------------------------------------------------


def test_a_view_that_is_still_known_keeps_its_number(make_wanted: MakeWanted, make_replica: MakeReplica) -> None:
    view = plan_pool(make_wanted(), Snapshot()).view
    assert plan_pool(make_wanted(), Snapshot(view=view, replicas=(make_replica(number=1),))).view == view


def test_a_number_that_a_replica_has_seen_is_not_used_again_when_the_last_view_is_lost(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    snapshot = Snapshot(view=None, replicas=(make_replica("a", number=7), make_replica("b", number=5)))
    assert plan_pool(make_wanted(), snapshot).view.revision.number == 8


def test_a_view_that_was_set_back_overtakes_what_replicas_have(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    old = plan_pool(make_wanted(), Snapshot()).view
    snapshot = Snapshot(view=old, replicas=(make_replica(number=4),))
    assert plan_pool(make_wanted(), snapshot).view.revision.number == 5


def test_what_replicas_have_of_another_object_does_not_count(
    make_wanted: MakeWanted, make_replica: MakeReplica
) -> None:
    snapshot = Snapshot(replicas=(make_replica(number=7),))
    assert plan_pool(make_wanted(uid="uid-2"), snapshot).view.revision == wire.Revision("uid-2", 1)
