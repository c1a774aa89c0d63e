"""What an engine's health becomes for a cluster: loading is no fault, and a broken engine is told from a slow start."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cacheaware_engine import probe

StartEngine = Callable[[int], str]


@pytest.fixture
def engine_answering() -> Iterator[StartEngine]:
    """`engine_answering(503)`: the URL of something that answers so."""
    servers: list[HTTPServer] = []

    def start(status: int) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b'{"status": "loading"}')

            def log_message(self, *arguments: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/health"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "ready", "alive"),
    [
        pytest.param(200, 0, 0, id="ready"),
        pytest.param(503, 3, 0, id="loading or draining"),
        pytest.param(500, 1, 1, id="broken"),
        pytest.param(404, 1, 1, id="not an engine"),
    ],
)
def test_the_exit_code_tells_what_the_engine_says(
    engine_answering: StartEngine, status: int, ready: int, alive: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = engine_answering(status)
    assert probe.main([f"--url={url}"]) == ready
    assert probe.main([f"--url={url}", "--alive"]) == alive
    assert '{"status": "loading"}' in capsys.readouterr().out


def test_an_engine_that_does_not_listen_is_not_alive() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/health"
        assert probe.main([f"--url={url}", "--alive"]) == 1


def test_an_engine_that_hangs_is_not_alive() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/health"
        assert probe.main([f"--url={url}", "--alive", "--timeout=0.1"]) == 1


def test_it_runs_as_a_command_without_anything_that_is_slow_to_import(engine_answering: StartEngine) -> None:
    script = (
        "import sys; from cacheaware_engine.probe import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 10 * bool({'torch', 'aiohttp', 'pydantic'} & set(sys.modules)))"
    )
    url = engine_answering(200)
    done = subprocess.run([sys.executable, "-c", script, f"--url={url}"], timeout=60, check=False)
    assert done.returncode == 0


def test_a_url_that_is_none_is_a_bad_setting() -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(["--url=localhost:8001"])
    assert ended.value.code == 2
