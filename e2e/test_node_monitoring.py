"""What a real Prometheus makes of the operator and the sidecars, found as a cluster's Prometheus finds them."""

from __future__ import annotations

import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.control_plane import free_ports
from e2e.serving import CONTROL, ServingSpace, call, pod_url, question

_METRICS = 8080  # of the operator


def operators(chat: ServingSpace) -> list[Any]:
    found: list[Any] = chat.get("/api/v1/namespaces/cacheaware-system/pods")["items"]
    return found


@pytest.fixture(scope="module")
def prometheus(chat: ServingSpace, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It asks the API server which pods there are, and takes what a PodMonitor would name."""
    folder = tmp_path_factory.mktemp("prometheus")
    discovery = [{"role": "pod", "kubeconfig_file": str(chat.node.kubeconfig)}]

    def keep(label: str, value: str) -> dict[str, Any]:
        return {"source_labels": [f"__meta_kubernetes_pod_{label}"], "regex": value, "action": "keep"}

    def name(label: str, target: str) -> dict[str, Any]:
        return {"source_labels": [f"__meta_kubernetes_{label}"], "target_label": target}

    jobs = [
        {
            "job_name": "sidecars",
            "kubernetes_sd_configs": discovery,
            "relabel_configs": [
                keep("label_app_kubernetes_io_name", "cacheaware"),
                keep("container_port_number", "8000"),
                name("namespace", "namespace"),
                name("pod_name", "pod"),
                name("pod_label_cacheaware_dev_pool", "pool"),
            ],
        },
        {
            "job_name": "operator",
            "honor_labels": True,
            "kubernetes_sd_configs": discovery,
            "relabel_configs": [
                keep("label_app_kubernetes_io_name", "cacheaware-operator"),
                keep("container_port_name", "metrics"),
            ],
        },
    ]
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
    (port,) = free_ports(1)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                tools / "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        print((folder / "log").read_text()[-3000:])


def query(prometheus: str, expression: str) -> dict[str, float]:
    """The values of an instant query, by their labels as text."""
    try:
        status, body = call(prometheus, f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    except ConnectionRefusedError:  # it is still starting
        return {}
    if status != 200:
        return {}
    return {str(each["metric"]): float(each["value"][1]) for each in body["data"]["result"]}


def test_prometheus_finds_and_reads_every_sidecar_and_the_operator(chat: ServingSpace, prometheus: str) -> None:
    up = f'sum by (job) (up{{job="operator"}} or up{{namespace="{chat.name}"}})'
    wanted = {"{'job': 'sidecars'}": 2.0, "{'job': 'operator'}": float(len(operators(chat)))}
    chat.wait("all targets are up", lambda: query(prometheus, up) == wanted, 60)


def test_the_operators_word_and_the_sidecars_figures_meet_in_one_query(chat: ServingSpace, prometheus: str) -> None:
    pool = f'namespace="{chat.name}",pool="chat"'
    chat.wait("the pool is ready", lambda: 1.0 in query(prometheus, f"cacheaware_pool_ready{{{pool}}}").values(), 60)
    for tier in ("gold", "bronze"):
        capacity = (
            f'sum(cacheaware_kv_quota_blocks{{{pool},tier="{tier}"}}) / sum(cacheaware_kv_capacity_blocks{{{pool}}})'
        )
        chat.wait(f"the share of {tier}", lambda capacity=capacity: query(prometheus, capacity), 60)  # type: ignore[misc]


def test_every_metrics_page_is_clean(chat: ServingSpace, tools: Path) -> None:
    """After requests, errors and refusals, so that series with labels are there."""
    url = chat.service_url()
    for _ in range(4):
        assert call(url, "/v1/chat/completions", "gold-key", question())[0] == 200
    assert call(url, "/v1/chat/completions", "nobody's", question())[0] == 401
    assert call(url, "/v1/chat/completions", "gold-key", {"model": 1})[0] == 400
    token = chat.internal("control-token").splitlines()[0]
    pages = {
        f"{pod['metadata']['name']} {port}": (pod_url(pod, port), token)
        for pod in chat.pods()
        for port in (8000, CONTROL)
    }
    pages |= {pod["metadata"]["name"]: (pod_url(pod, _METRICS), None) for pod in operators(chat)}
    for where, (address, asked_with) in pages.items():
        status, page = call(address, "/metrics", asked_with)
        assert status == 200, where
        assert "cacheaware_" in page, where
        done = subprocess.run(
            [tools / "promtool", "check", "metrics"],
            input=page,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        said = [line for line in (done.stdout + done.stderr).splitlines() if line]
        # vLLM puts a colon into its names, and tools know them by it
        ours = [line for line in said if not (line.startswith("vllm:") and line.endswith("should not contain ':'"))]
        assert done.returncode in (0, 3), f"{where}: {ours}"
        assert not ours, f"{where}: {ours}"
