"""`cacheaware up` from its start to its end, as a real process with stand-ins for engine and sidecar."""

import dataclasses
import hashlib
import io
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from cacheaware import state_file
from cacheaware.display import display
from cacheaware.testing import POOL, UpProcess, all_gone, nobody_listens
from cacheaware.up import _Events
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState

RunUp = Callable[..., UpProcess]


# -- start ------------------------------------------------------------------------------------------------------------


def test_it_prints_where_the_pool_is_and_how_to_ask_it(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    state = up.ready()
    said = "\n".join(up.lines)
    (replica,) = state.replicas
    assert f"{replica.url}/v1" in said
    assert f"curl {replica.url}/v1/chat/completions" in said
    assert f'OpenAI(base_url="{replica.url}/v1"' in said


def test_each_replica_has_the_next_port(run_up: RunUp, pool_file: Path, free_pair: int) -> None:
    pool_file.write_text(POOL.replace("spec:\n", "spec:\n  replicas: 2\n"))
    state = run_up(pool_file, port=free_pair).ready()
    assert [replica.url for replica in state.replicas] == [
        f"http://127.0.0.1:{free_pair}",
        f"http://127.0.0.1:{free_pair + 1}",
    ]


def test_only_its_owner_may_read_the_state_the_secrets_and_the_sockets(
    run_up: RunUp, pool_file: Path, state_home: Path
) -> None:
    state = run_up(pool_file).ready()
    folder = Path(state.folder)
    private = [state_home / "cacheaware" / "default-chat.json", *(folder / "secrets").iterdir()]
    assert len(private) == 5
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_invalid_file_is_refused_with_every_problem_in_it(run_up: RunUp, pool_file: Path) -> None:
    pool_file.write_text(POOL.replace("weight: 4", "weight: 0").replace("nominalPercent: 30", "nominalPercent: 130"))
    code, said = run_up(pool_file).end()
    assert code == 1
    assert "spec.tiers[0].weight" in said
    assert "spec.tiers[1].quota.nominalPercent" in said


def test_a_missing_file_is_named(run_up: RunUp, tmp_path: Path) -> None:
    code, said = run_up(tmp_path / "nowhere.yaml").end()
    assert code == 1
    assert "nowhere.yaml: cannot be read: No such file or directory" in said


def test_what_one_machine_does_not_have_is_refused_by_name(run_up: RunUp, pool_file: Path) -> None:
    variable = "{name: A, valueFrom: {secretKeyRef: {name: a, key: b}}}"
    pool_file.write_text(POOL.replace("Torch}", f"Torch, env: [{variable}]}}"))
    code, said = run_up(pool_file).end()
    assert code == 1
    assert "spec.engine.env[0].valueFrom" in said


def test_fields_for_a_cluster_are_noticed_and_passed_over(run_up: RunUp, pool_file: Path) -> None:
    pool_file.write_text(POOL + "  podTemplate: {nodeSelector: {disk: ssd}}\n")
    up = run_up(pool_file)
    up.expect("spec.podTemplate has no effect here")
    up.ready()


def test_a_port_in_use_is_named_with_the_flag_to_change(run_up: RunUp, pool_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = run_up(pool_file, port=port).end()
    assert code == 1
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "--port" in said


def test_an_engine_that_cannot_start_ends_it_with_the_engine_s_own_words(
    run_up: RunUp, pool_file: Path, state_home: Path
) -> None:
    pool_file.write_text(
        POOL.replace(
            "{type: Torch}", '{type: Torch, env: [{name: STANDIN_EXIT, value: "2:--threads: no such number"}]}'
        )
    )
    code, said = run_up(pool_file).end()
    assert code == 1
    assert "the engine of chat-0 ended (exit code 2)" in said
    assert "    --threads: no such number" in said
    assert "chat-0-engine.log" in said
    assert not (state_home / "cacheaware" / "default-chat.json").exists()


def test_quotas_that_an_engine_refuses_at_the_start_end_it(run_up: RunUp, pool_file: Path) -> None:
    code, said = run_up(pool_file, STANDIN_REFUSE="3 tiers and 2 sequences").end()
    assert code == 1
    assert "cacheaware up: chat-0: 3 tiers and 2 sequences" in said


def test_output_of_the_parts_goes_to_a_file_each(run_up: RunUp, pool_file: Path, state_home: Path) -> None:
    state = run_up(pool_file).ready()
    logs = state_home / "cacheaware" / "default-chat-logs"
    assert {part.log for part in state.parts} == {str(logs / f"chat-0-{name}.log") for name in ("engine", "sidecar")}
    assert "stand-in engine listens" in (logs / "chat-0-engine.log").read_text()


def test_a_second_one_for_the_same_pool_is_refused_with_the_pid_of_the_first(run_up: RunUp, pool_file: Path) -> None:
    first = run_up(pool_file)
    first.ready()
    code, said = run_up(pool_file).end()
    assert code == 1
    assert f"pid {first.process.pid}" in said
    assert first.process.poll() is None


def test_another_pool_runs_beside_it(run_up: RunUp, pool_file: Path, tmp_path: Path, state_home: Path) -> None:
    run_up(pool_file).ready()
    other = tmp_path / "other.yaml"
    other.write_text(POOL.replace("name: chat", "name: batch"))
    run_up(other).expect("Pool default/batch is ready")
    assert [state.pool.name for state in state_file.read_all(state_home / "cacheaware")] == ["batch", "chat"]


# -- edits ------------------------------------------------------------------------------------------------------------


def test_an_edit_of_a_quota_is_applied_live_and_its_acknowledgement_told(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    before = up.ready()
    pool_file.write_text(POOL.replace("nominalPercent: 50", "nominalPercent: 20"))
    up.expect("Changed: spec.tiers[gold].quota.nominalPercent: 50 → 20")
    up.expect("Applied: revision 2, acknowledged by 1 engine")
    after = up.until(lambda state: state.revision is not None and state.revision.number == 2)
    assert [part.pid for part in after.parts] == [part.pid for part in before.parts]
    assert after.pool.generation == 2


def test_a_file_replaced_by_rename_is_an_edit_too(run_up: RunUp, pool_file: Path, tmp_path: Path) -> None:
    up = run_up(pool_file)
    up.ready()
    (tmp_path / "new").write_text(POOL.replace("weight: 4", "weight: 5"))
    os.replace(tmp_path / "new", pool_file)
    up.expect("Changed: spec.tiers[gold].weight: 4 → 5")


def test_an_invalid_edit_is_told_with_all_its_problems_and_changes_nothing(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    up.ready()
    pool_file.write_text(POOL.replace("weight: 4", "weight: many").replace("nominalPercent: 30", "nominalPercent: -1"))
    up.expect("spec.tiers[0].weight")
    up.expect("spec.tiers[1].quota.nominalPercent")
    up.expect("was not applied; the pool runs on as before")
    pool_file.write_text(POOL.replace("weight: 4", "weight: 6"))
    up.expect("Changed: spec.tiers[gold].weight: 4 → 6")
    up.expect("Applied: revision 2")


def test_an_edit_that_needs_a_restart_says_so_and_the_rest_of_it_is_applied(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    before = up.ready()
    pool_file.write_text(
        POOL.replace("{type: Torch}", "{type: Torch, kvCache: {memory: 2Gi}}").replace("weight: 4", "weight: 3")
    )
    up.expect("Changed: spec.tiers[gold].weight: 4 → 3")
    up.expect("Not applied: spec.engine.kvCache.memory: absent → 2Gi")
    up.expect("Applied: revision 2")
    assert up.pids() == [part.pid for part in before.parts]


def test_an_edit_that_cannot_be_is_refused_whole(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    up.ready()
    for old, new, words in (
        ("{name: chat}", "{name: other}", "metadata.name: chat → other"),
        ("type: Torch", "type: VLLM", "spec.engine.type: Torch → VLLM: cannot change"),
        ("Torch}", "Torch, env: [{name: A, valueFrom: {secretKeyRef: {name: a, key: b}}}]}", "env[0].valueFrom"),
    ):
        pool_file.write_text(POOL.replace(old, new).replace("nominalPercent: 50", "nominalPercent: 10"))
        up.expect(words)
        up.expect("was not applied")
    state = up.state()
    assert state.revision is not None
    assert state.revision.number == 1


def test_replicas_come_and_go_while_it_runs(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    up.ready()
    pool_file.write_text(POOL.replace("spec:\n", "spec:\n  replicas: 2\n"))
    up.expect("Applied; the view is still revision 1")
    grown = up.until(lambda state: len(state.replicas) == 2)
    assert len(up.pids()) == 4
    pool_file.write_text(POOL)
    up.expect("Changed: spec.replicas: 2 → 1")
    up.expect("Applied")
    up.until(lambda state: len(state.replicas) == 1)
    assert all_gone([part.pid for part in grown.parts if part.replica == "chat-1" and part.pid is not None])


def test_a_further_replica_whose_port_is_in_use_is_refused(run_up: RunUp, pool_file: Path, free_pair: int) -> None:
    up = run_up(pool_file, port=free_pair)
    up.ready()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_pair + 1))
        taken.listen()
        pool_file.write_text(POOL.replace("spec:\n", "spec:\n  replicas: 2\n"))
        up.expect(f"port {free_pair + 1} on 127.0.0.1 is in use")
        up.expect("was not applied")


def test_a_further_replica_that_cannot_start_is_told_and_the_first_runs_on(
    run_up: RunUp, pool_file: Path, tmp_path: Path
) -> None:
    """The second engine finds the marker that the first one left, and refuses to start."""
    marker = tmp_path / "started"
    up = run_up(pool_file, STANDIN_ONLY_ONE=str(marker))
    first = up.ready()
    pool_file.write_text(POOL.replace("spec:\n", "spec:\n  replicas: 2\n"))
    up.expect("the engine of chat-1 ended (exit code 1)")
    up.expect("The other replicas run on")
    assert set(up.pids()) >= {part.pid for part in first.parts}


def test_keys_change_without_a_new_revision(run_up: RunUp, pool_file: Path) -> None:
    def with_keys(*names: str) -> str:
        entries = "".join(
            f"  {name}: '{{sha256: {hashlib.sha256(name.encode()).hexdigest()}, tenant: {name}, tiers: [gold]}}'\n"
            for name in names
        )
        return (
            POOL.replace("{type: Open}", "{type: APIKeys, apiKeys: {secretRef: {name: keys}}}")
            + f"---\napiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\nstringData:\n{entries}"
        )

    pool_file.write_text(with_keys("alice"))
    up = run_up(pool_file)
    state = up.ready()
    pool_file.write_text(with_keys("alice", "bob"))
    up.expect("Changed: API key bob: added")
    up.expect("Applied; the view is still revision 1")
    assert hashlib.sha256(b"bob").hexdigest() in (Path(state.folder) / "secrets" / "api-keys.json").read_text()


# -- a part dies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["engine", "sidecar"])
def test_a_killed_part_comes_back_and_the_pool_says_so(run_up: RunUp, pool_file: Path, part: str) -> None:
    up = run_up(pool_file)
    before = next(each for each in up.ready().parts if each.name == part)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    up.expect(f"chat-0: the {part} ended (killed by SIGKILL); starts again in 1 s")
    up.expect(f"chat-0: the {part} is ready again")
    state = up.until(lambda state: all(each.state == "Ready" for each in state.parts))
    after = next(each for each in state.parts if each.name == part)
    assert after.restarts == 1
    assert after.pid != before.pid


def test_a_part_that_ended_and_came_back_between_two_looks_is_told_of_all_the_same() -> None:
    out = io.StringIO()
    before = PartSnapshot(PartName.ENGINE, PartState.READY)
    after = dataclasses.replace(before, restarts=1, ended="ended (killed by SIGKILL); starts again in 1 s")
    _Events(display(Console(file=out), Console(file=out)))._tell(("chat-0", "engine"), before, after)
    first, second = out.getvalue().splitlines()
    assert first.startswith("chat-0: the engine ended (killed by SIGKILL); starts again in 1 s")
    assert second == "chat-0: the engine is ready again."


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_nothing_left(run_up: RunUp, pool_file: Path, number: signal.Signals) -> None:
    up = run_up(pool_file)
    state = up.ready()
    pids = up.pids()
    up.send(number)
    code, _ = up.end()
    assert code == 0
    assert all_gone(pids)
    assert nobody_listens(state.replicas[0].url)
    assert not Path(state.folder).exists()
    assert list((up.state_home / "cacheaware").glob("*.json")) == []


def test_a_signal_while_it_starts_ends_it_too(run_up: RunUp, pool_file: Path, tmp_path: Path) -> None:
    up = run_up(pool_file, STANDIN_LOADING=str(tmp_path / "never"))
    up.expect("loading")
    pids = up.pids()
    up.send(signal.SIGINT)
    code, _ = up.end()
    assert code == 0
    assert all_gone(pids)


def test_a_second_ctrl_c_ends_at_once_what_does_not_want_to_end(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file, STANDIN_STUBBORN="1")
    up.ready()
    pids = up.pids()
    up.send(signal.SIGINT)
    up.expect("Stopping")
    up.send(signal.SIGINT)
    code, said = up.end()
    assert code == 0
    assert "Ending everything at once" in said
    assert all_gone(pids)


def test_when_it_is_killed_itself_no_process_stays_and_the_next_one_cleans_up(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    state = up.ready()
    pids = up.pids()
    up.send(signal.SIGKILL)
    up.end()
    assert all_gone(pids)
    assert Path(state.folder).exists()
    again = run_up(pool_file).ready()
    assert not Path(state.folder).exists()
    assert again.pid != state.pid


def test_no_process_of_it_stays_in_its_session(run_up: RunUp, pool_file: Path) -> None:
    up = run_up(pool_file)
    up.ready()
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert len(children) == 2
    up.send(signal.SIGTERM)
    up.end()
    assert all_gone(child.pid for child in children)
