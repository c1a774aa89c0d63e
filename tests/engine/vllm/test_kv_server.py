"""The KV side of the plugin over its socket: the same messages and refusals as the Torch engine's."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_engine.blocks import BlockPool, Request
from cacheaware_engine.vllm_plugin.control import Control
from cacheaware_engine.vllm_plugin.errors import PluginRefused
from cacheaware_engine.vllm_plugin.kv_server import KvServer, serve, serve_refusal
from cacheaware_engine.vllm_plugin.step_costs import StepCosts

QUOTAS: dict[str, Any] = {
    "revision": {"pool_uid": "a", "number": 2},
    "public": 4,
    "tiers": [{"name": "gold", "priority": 1, "weight": 1, "nominal": 10, "effective": 10, "limit": 20, "lending": 10}],
}


class Letters:
    """A tokenizer of one token a letter."""

    def of(self, prefix: wire.PublicPrefix) -> Sequence[int]:
        return [ord(letter) for letter in prefix.text or ""]


class Engine:
    def __init__(self) -> None:
        self.pool = BlockPool(20, 2, 4)
        self.costs = StepCosts(bytes_per_token=8)
        self.control = Control(self.pool, self.costs, threading.RLock(), Letters(), 2)


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def server(engine: Engine, tmp_path: Path) -> Iterator[KvServer]:
    made = serve(engine.control, tmp_path / "kv.sock")
    yield made
    made.close()


@pytest.fixture
def connection(server: KvServer) -> Iterator[Connection]:
    made = Connection(server.path)
    yield made
    made.close()


def ask(connection: Connection, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, body=payload)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_quotas_are_put_in_force_and_the_ledger_says_so(connection: Connection, engine: Engine) -> None:
    status, applied = ask(connection, "PUT", "/kv/quotas", QUOTAS)
    assert (status, applied["revision"]) == (200, QUOTAS["revision"])
    status, ledger = ask(connection, "GET", "/kv/ledger")
    assert (status, wire.from_json(wire.Ledger, ledger)) == (200, engine.pool.ledger())
    assert ledger["tiers"]["gold"]["nominal"] == 10


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        pytest.param({"revision": {"pool_uid": "a", "number": 1}}, 409, "stale_revision", id="older"),
        pytest.param({"public": 3}, 409, "stale_revision", id="equal with other content"),
        pytest.param({}, 200, None, id="equal"),
        pytest.param({"revision": {"pool_uid": "b", "number": 1}}, 200, None, id="another pool"),
        pytest.param({"revision": {"pool_uid": "a", "number": 3}, "public": 11}, 422, "quota_refused", id="sums"),
        pytest.param({"public": -1}, 400, "invalid", id="ill-typed"),
    ],
)
def test_a_change_of_quotas_is_taken_or_refused_and_then_nothing_changes(
    connection: Connection, engine: Engine, change: dict[str, Any], status: int, code: str | None
) -> None:
    ask(connection, "PUT", "/kv/quotas", QUOTAS)
    before = engine.pool.quotas
    answered, body = ask(connection, "PUT", "/kv/quotas", QUOTAS | change)
    assert answered == status
    if code is not None:
        assert body["error"]["code"] == code
        assert engine.pool.quotas == before


def test_public_prefixes_are_tokenised_and_their_blocks_counted(connection: Connection) -> None:
    ask(connection, "PUT", "/kv/quotas", QUOTAS)
    prefixes = {"prefixes": [{"name": "assistant", "text": "abcdefg"}]}
    status, ledger = ask(connection, "PUT", "/kv/public", prefixes)
    assert (status, ledger["public"]["prefixes"]) == (200, {"assistant": {"blocks": 3, "resident": 0}})
    too_long = {"prefixes": [{"name": "assistant", "text": "abcdefghijkl"}]}
    status, body = ask(connection, "PUT", "/kv/public", too_long)
    assert (status, body["error"]["code"]) == (422, "quota_refused")
    assert "they need 6 blocks and the public share is 4" in body["error"]["message"]


def test_a_long_poll_answers_when_the_ledger_changes_and_not_before(connection: Connection, engine: Engine) -> None:
    sequence = engine.pool.sequence
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(connection, "GET", f"/kv/ledger?after={sequence}&wait=50"))
    )
    asking.start()
    assert not answers
    with engine.control._lock:
        engine.pool.submit(Request("a", "gold", 1, [[]], [1], 2))
    asking.join(60)
    ((status, ledger),) = answers
    assert (status, ledger["waiting"]) == (200, 1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        pytest.param("GET", "/kv/nothing", None, 404, id="no such path"),
        pytest.param("PUT", "/kv/quotas", b"{", 400, id="no JSON"),
        pytest.param("GET", "/kv/ledger?after=x", None, 400, id="no number"),
        pytest.param("GET", "/kv/ledger?after=1&wait=61", None, 400, id="too long"),
    ],
)
def test_what_is_wrong_is_said_and_the_connection_lives_on(
    connection: Connection, method: str, path: str, body: bytes | None, status: int
) -> None:
    answered, error = ask(connection, method, path, body)
    assert (answered, "message" in error["error"]) == (status, True)
    assert ask(connection, "GET", "/kv/ledger")[0] == 200


def test_a_fault_of_ours_is_an_answer_and_a_line_in_the_log(
    connection: Connection, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(prefix: wire.PublicPrefix) -> Sequence[int]:
        raise OSError("the tokenizer's file is gone")

    monkeypatch.setattr(engine.control._tokens, "of", fail)
    status, body = ask(connection, "PUT", "/kv/public", {"prefixes": [{"name": "assistant", "text": "abc"}]})
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "the tokenizer's file is gone" in caplog.text


def test_steps_are_told_as_events(connection: Connection, engine: Engine) -> None:
    class Output:
        total_num_scheduled_tokens = 3
        num_scheduled_tokens = {"a": 3}  # noqa: RUF012  # what vLLM's is, in one line

    class InVllm:
        num_computed_tokens = 5

    connection.request("GET", "/kv/steps")
    response = connection.getresponse()
    engine.costs.scheduled(Output, {"a": InVllm})
    engine.costs.computed(Output)
    line = response.fp.readline()
    report = json.loads(line.removeprefix(b"data: "))
    assert (report["steps"], report["tokens"], report["query_context"]) == (1, 3, 3 + 4 + 5)
    assert report["kv_bytes_read"] == 5 * 8
    response.close()


def test_the_socket_is_its_owners_alone(server: KvServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


def test_a_leftover_is_replaced_and_a_living_server_is_not(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = serve(engine.control, path)
    with pytest.raises(PluginRefused, match="another process listens"):
        serve(engine.control, path)
    server.close()


def test_a_vllm_without_the_scheduler_says_why_there_are_no_accounts(tmp_path: Path) -> None:
    server = serve_refusal("vLLM 0.99.0 is not supported", tmp_path / "kv.sock")
    connection = Connection(server.path)
    for method, path in (("GET", "/kv/ledger"), ("PUT", "/kv/quotas")):
        status, body = ask(connection, method, path, QUOTAS if method == "PUT" else None)
        assert (status, body["error"]["code"]) == (501, "unsupported_version")
        assert body["error"]["message"] == "vLLM 0.99.0 is not supported"
    connection.close()
    server.close()
