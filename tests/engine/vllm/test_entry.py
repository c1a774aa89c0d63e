"""What vLLM finds where it is pointed to: our scheduler, or its own and somebody who says why."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm runs these in its environment")

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cacheaware_engine.vllm_plugin import entry
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
