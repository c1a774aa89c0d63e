"""What vLLM finds where it is pointed to: our scheduler, or its own and somebody who says why."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm runs these in its environment")

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cacheaware_engine.vllm_plugin import entry
from cacheaware_engine.vllm_plugin.install import install
from cacheaware_engine.vllm_plugin.scheduler import TierScheduler
from cacheaware_engine.vllm_plugin.settings import KV_SOCKET
from cacheaware_engine.vllm_plugin.testing import Rig


@pytest.fixture(autouse=True)
def vllms_own_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SchedulerConfig, "get_scheduler_cls", SchedulerConfig.get_scheduler_cls)
    entry._choose.cache_clear()
    yield
    entry._choose.cache_clear()


def config(scheduler: str | None = None) -> Any:
    return SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls=scheduler, async_scheduling=True
    )  # fmt: skip


def test_the_installed_vllm_gets_our_scheduler() -> None:
    assert entry.Scheduler is TierScheduler
    named = config("cacheaware_engine.vllm_plugin.entry.Scheduler")
    assert named.get_scheduler_cls() is TierScheduler


def test_another_version_keeps_its_own_scheduler_and_says_why_on_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KV_SOCKET, str(tmp_path / "kv.sock"))
    monkeypatch.setattr(entry, "installed", lambda: ("0.99.0", tmp_path))
    chosen = entry.Scheduler
    assert issubclass(chosen, AsyncScheduler)
    assert not issubclass(chosen, TierScheduler)
    rig = Rig(chosen, tmp_path, blocks=20)
    rig.add(None, range(10))
    rig.drain()  # it serves as ever
    connection = http.client.HTTPConnection("engine", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(tmp_path / "kv.sock"))
    connection.request("GET", "/kv/ledger")
    answer = connection.getresponse()
    assert answer.status == 501
    assert "vLLM 0.99.0 is not supported" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_what_the_init_container_copies_is_all_that_vllm_needs_of_us(tmp_path: Path) -> None:
    """In vLLM's Python, with nothing of ours on its path but the copied folder, as in the pod."""
    folder = tmp_path / "plugin"
    install(folder)
    look = (
        "import sys, cacheaware_api, cacheaware_engine\n"
        "from vllm.config.scheduler import SchedulerConfig\n"
        "named = 'cacheaware_engine.vllm_plugin.entry.Scheduler'\n"
        "config = SchedulerConfig(max_model_len=64, is_encoder_decoder=False, scheduler_cls=named)\n"
        "chosen = config.get_scheduler_cls()\n"
        "from cacheaware_engine.vllm_plugin.scheduler import TierScheduler\n"
        "assert chosen is TierScheduler, chosen\n"
        "import cacheaware_engine.vllm_plugin.kv_server, cacheaware_engine.vllm_plugin.public_prefixes\n"
        "print(*(name for name in sys.modules if name.startswith('cacheaware_') and '.' not in name))\n"
        "print(*{module.__file__ for name, module in sys.modules.items() if name.startswith('cacheaware_')}, sep='\\n')"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=tmp_path, env={**environment, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    packages, *files = done.stdout.split("\n")
    assert sorted(packages.split()) == ["cacheaware_api", "cacheaware_engine"]
    assert all(file.startswith(f"{folder}/") for file in files if file)


@pytest.mark.parametrize(
    ("socket_is_named", "scheduler", "expected"),
    [
        pytest.param(True, None, TierScheduler, id="a socket is enough"),
        pytest.param(False, None, AsyncScheduler, id="installed, and not asked for"),
        pytest.param(True, "vllm.v1.core.sched.async_scheduler.AsyncScheduler", AsyncScheduler, id="another is named"),
    ],
)
def test_as_a_plugin_of_vllm_it_is_on_where_a_socket_is_named(
    socket_is_named: bool, scheduler: str | None, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if socket_is_named:
        monkeypatch.setenv(KV_SOCKET, str(tmp_path / "kv.sock"))
    else:
        monkeypatch.delenv(KV_SOCKET, raising=False)
    entry.register()
    assert config(scheduler).get_scheduler_cls() is expected
