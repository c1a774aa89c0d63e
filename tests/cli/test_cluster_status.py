"""`cacheaware status --context`: what it shows of a cluster, and what it says where there is nothing to show."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cacheaware.__main__ import app
from cacheaware_api.testing import full_status

PATH = "/apis/cacheaware.dev/v1alpha1/namespaces/{}/cacheawarepools"


def pool(name: str, *, namespace: str = "models", status: dict[str, Any] | None) -> dict[str, Any]:
    written = {"metadata": {"name": name, "namespace": namespace}, "spec": {}}
    return written if status is None else {**written, "status": status}


class ApiServer(ThreadingHTTPServer):
    """Answers by path; anything else is 404."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, Any]] = {}

    def has(self, namespace: str, *pools: dict[str, Any]) -> None:
        self.answers[PATH.format(namespace)] = (200, {"items": list(pools)})


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        status, body = self.server.answers.get(self.path.partition("?")[0], (404, {"reason": "NotFound"}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        kubeconfig = tmp_path / "kubeconfig"
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "production", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
            "current-context": "production",
        }
        kubeconfig.write_text(yaml.safe_dump(config))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def status(server: ApiServer) -> Callable[..., Any]:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["status", "--context", "production", *arguments])

    return run


def test_the_only_pool_of_the_contexts_namespace_is_shown(server: ApiServer, status: Callable[..., Any]) -> None:
    server.has("models", pool("chat", status=full_status()))
    result = status()
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("models/chat: Ready ")
    assert "LAST MOVES OF QUOTA" in result.stdout


def test_a_namespace_and_a_name_say_which(server: ApiServer, status: Callable[..., Any]) -> None:
    server.has("other", *(pool(name, namespace="other", status=full_status()) for name in ("a", "b")))
    shown = json.loads(status("b", "-n", "other", "-o", "json").stdout)
    assert shown["metadata"] == {"name": "b", "namespace": "other"}
    assert shown["status"] == full_status()


@pytest.mark.parametrize(
    ("pools", "arguments", "words"),
    [
        pytest.param(None, [], "kubectl apply -f crds/", id="no such kind"),
        pytest.param([], [], "namespace models: name one of its pools; there are: none", id="no pool"),
        pytest.param(["a", "b"], [], "there are: a, b", id="several"),
        pytest.param(["a"], ["x"], "there is no pool x; there are: a", id="not this one"),
        pytest.param(["a"], ["a"], "pool a has no status yet: is the operator running?", id="nobody looks after it"),
        pytest.param(["a"], ["--context", "laptop"], "the kubeconfig has production", id="no such context"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    server: ApiServer, status: Callable[..., Any], pools: list[str] | None, arguments: list[str], words: str
) -> None:
    if pools is not None:
        server.has("models", *(pool(name, status=None) for name in pools))
    result = status(*arguments)
    assert result.exit_code == 1
    assert words in result.stderr


def test_a_refusal_is_told(server: ApiServer, status: Callable[..., Any]) -> None:
    server.answers[PATH.format("models")] = (403, {"reason": "Forbidden"})
    result = status()
    assert result.exit_code == 1
    assert "the cluster answered 403 Forbidden about pools in models" in result.stderr
