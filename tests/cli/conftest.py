"""A pool file, a state folder of its own, and `cacheaware up` to run in it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheaware.testing import POOL, UpProcess
from cacheaware_operator import ports
from cacheaware_operator.errors import PortInUse


@pytest.fixture
def state_home(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def environment(state_home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(state_home), "COLUMNS": "200"}


@pytest.fixture
def run_up(state_home: Path, environment: dict[str, str]) -> Iterator[Callable[..., UpProcess]]:
    started: list[UpProcess] = []

    def start(file: Path, port: int = 0, **extra: str) -> UpProcess:
        up = UpProcess(file, {**environment, **extra}, state_home, port=port)
        started.append(up)
        return up

    yield start
    for up in started:
        up.clean_up()


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    file = tmp_path / "pool.yaml"
    file.write_text(POOL)
    return file


@pytest.fixture
def free_pair() -> int:
    """A port that is free, and so is the next one."""
    while True:
        (port,) = ports.free_ports(1)
        try:
            ports.require_free([port, port + 1], port)
        except PortInUse:
            continue
        return port
