"""The state file: who holds a pool's name, and what is left when its holder was killed."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheaware import state_file
from cacheaware.state_file import AlreadyRunning, PoolIdentity, State, StateUnreadable


@pytest.fixture
def state(tmp_path: Path) -> State:
    """As this very process would write it."""
    folder = tmp_path / "cacheaware-work"
    folder.mkdir()
    started = state_file.process_started(os.getpid())
    assert started is not None
    return State(
        pid=os.getpid(),
        started=started,
        folder=str(folder),
        file="pool.yaml",
        pool=PoolIdentity("default", "chat", "uid-1", 1, {"replicas": 1}),
        replicas=(),
        token="secret",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return state_file.path_for("default", "chat", tmp_path / "state")


def giving(state: State) -> Callable[[], State]:
    return lambda: state


def test_a_state_is_read_back_as_it_was_written(path: Path, state: State) -> None:
    state_file.claim(path, giving(state))
    assert path.name == "default-chat.json"
    assert state_file.read(path) == state
    assert path.stat().st_mode & 0o777 == 0o600
    assert state.is_running()


def test_a_name_that_a_running_process_holds_is_refused_with_its_pid(path: Path, state: State) -> None:
    state_file.claim(path, giving(state))
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        state_file.claim(path, lambda: pytest.fail("nothing may be made for a name that is held"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"pid": 2**22 + 1}, id="no such process"),
        pytest.param({"started": 1.0}, id="another process has the pid now"),
    ],
)
def test_a_stale_state_is_replaced_and_its_folder_removed(path: Path, state: State, change: dict[str, float]) -> None:
    stale = dataclasses.replace(state, **change)  # type: ignore[arg-type]  # pid is an int, started a float
    state_file.write(path, stale)
    assert not stale.is_running()
    fresh = dataclasses.replace(state, folder="elsewhere")
    state_file.claim(path, giving(fresh))
    assert state_file.read(path) == fresh
    assert not Path(state.folder).exists()


def test_a_stale_state_cannot_make_us_remove_a_folder_that_is_not_ours(
    path: Path, state: State, tmp_path: Path
) -> None:
    precious = tmp_path / "documents"
    precious.mkdir()
    state_file.write(path, dataclasses.replace(state, started=1.0, folder=str(precious)))
    state_file.claim(path, giving(state))
    assert precious.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"pid": "x"}'])
def test_a_file_that_cannot_be_read_holds_nothing(path: Path, state: State, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(StateUnreadable, match="remove it"):
        state_file.read(path)
    assert list(state_file.read_all(path.parent)) == []
    state_file.claim(path, giving(state))
    assert state_file.read(path) == state


def test_releasing_leaves_a_state_that_somebody_else_has_written(path: Path, state: State) -> None:
    other = dataclasses.replace(state, pid=state.pid + 1)
    state_file.write(path, other)
    state_file.release(path, state)
    assert state_file.read(path) == other
    state_file.release(path, other)
    assert not path.exists()


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        pytest.param({"XDG_STATE_HOME": "/var/state"}, Path("/var/state/cacheaware"), id="set"),
        pytest.param({"XDG_STATE_HOME": "relative"}, Path.home() / ".local/state/cacheaware", id="relative is ignored"),
        pytest.param({}, Path.home() / ".local/state/cacheaware", id="unset"),
    ],
)
def test_states_lie_where_the_xdg_rules_say(environment: dict[str, str], folder: Path) -> None:
    assert state_file.state_folder(environment) == folder
