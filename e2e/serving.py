"""Pools whose pods run: what it takes to have one on a node, and to call it as its clients do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster import Object
from e2e.node_cluster import NodeCluster
from e2e.space import Space
from openai import OpenAI

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
MODEL = "tiny"
HTTP, CONTROL = 8000, 9400
_ROOT = Path(__file__).resolve().parents[1]

# A random model of two layers, which writes what it likes; prompts and answers may be long.
CONTEXT = 16384
_PROBE = 40  # tokens
_KEYS: Mapping[str, Object] = {
    "gold": {"tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"},
    "bronze": {"tenant": "initech", "tiers": ["bronze"], "defaultTier": "bronze"},
}


def key_entry(key: str, holder: str) -> str:
    """One entry of a Secret with API keys, for a key of one of `gold` and `bronze`."""
    return json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), **_KEYS[holder]})


def serving_pool(name: str = "chat", **fields: Any) -> Object:
    """Two replicas of the tiny model, two tiers, two keys: `gold-key` and `bronze-key`."""
    spec: Object = {
        "model": {"name": MODEL, "source": "pvc://models/tiny", "maxModelLen": CONTEXT},
        "engine": {
            "type": "Torch",
            "args": ["--threads=1"],
            "kvCache": {"memory": "32Mi"},
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        },
        "replicas": 2,
        "tiers": [
            {"name": "gold", "priority": 10, "quota": {"nominalPercent": 50}},
            {"name": "bronze", "quota": {"nominalPercent": 30}},
        ],
        "defaultTier": "bronze",
        "identity": {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}},
    }
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {"name": name},
        "spec": spec | fields,
    }


def operator_overlay(cluster: NodeCluster, overlay: str, namespace: str) -> Path:
    """A kustomization of our own over one of the project's, as a user writes one to take images from elsewhere."""
    folder = cluster.folder / f"install-{overlay}"
    folder.mkdir(exist_ok=True)
    name, _, tag = cluster.images.operator.rpartition(":")
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [os.path.relpath(_ROOT / "manifests" / "overlays" / overlay, folder.resolve())],
        "images": [{"name": "cacheaware/operator", "newName": name, "newTag": tag}],
        "configMapGenerator": [
            {
                "name": "cacheaware-images",
                "behavior": "merge",
                "literals": [f"ENGINE_IMAGE={cluster.images.engine}", f"SIDECAR_IMAGE={cluster.images.sidecar}"],
            }
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


class ServingSpace(Space):
    """A namespace whose pods run under the restricted standard."""

    def __init__(self, cluster: NodeCluster, name: str) -> None:
        super().__init__(cluster, name)
        self.node = cluster

    def prepare(self) -> None:
        """What a pool of `serving_pool` names: a claim with the model, and the callers' keys."""
        size = {"storage": "1Gi"}
        reference = {"name": "models", "namespace": self.name}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"models-{self.name}"},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": reference,
                "hostPath": {"path": str(self.node.folder / "models")},
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models"},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": f"models-{self.name}",
                "resources": {"requests": size},
            },
        }
        keys = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys"},
            "stringData": {holder: key_entry(f"{holder}-key", holder) for holder in _KEYS},
        }
        self.apply(volume, claim, keys)

    def wait_ready(self, name: str = "chat", timeout: float = 180) -> None:
        try:
            self.kubectl_for(timeout, "wait", "--for=condition=Ready", f"--timeout={timeout:.0f}s", f"cap/{name}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def kubectl_for(self, timeout: float, *arguments: str) -> str:
        return self.cluster.kubectl("--namespace", self.name, *arguments, timeout=timeout + 10).stdout

    def story(self) -> str:
        """What a person would look at first."""
        said = [
            self.cluster.kubectl("--namespace", self.name, *arguments, check=False).stdout
            for arguments in (
                ("get", "cap,pods", "-o", "wide"),
                ("get", "events", "--sort-by=.lastTimestamp"),
                ("logs", "--selector=app.kubernetes.io/name=cacheaware", "--all-containers", "--tail=15", "--prefix"),
                (
                    "get",
                    "cap",
                    "-o",
                    "jsonpath={range .items[*].status.conditions[*]}{.type}={.status} {.message}\n{end}",
                ),
            )
        ]
        return "\n".join(said)

    # -- pods ---------------------------------------------------------------------------------------------------------

    def pods(self, name: str = "chat") -> list[Object]:
        """Those that are not ending."""
        path = f"/api/v1/namespaces/{self.name}/pods"
        found = self.cluster.request("GET", path, labelSelector=f"cacheaware.dev/pool={name}").body["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self, name: str = "chat") -> list[Object]:
        """Of a pod that was just made, the kubelet has not said anything yet."""
        return [
            pod
            for pod in self.pods(name)
            if any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
        ]

    def restarts(self, name: str = "chat") -> dict[str, int]:
        """Of every container of every pod, by the pod's uid: it changes when anything was started anew."""
        return {
            f"{pod['metadata']['uid']}/{each['name']}": each["restartCount"]
            for pod in self.pods(name)
            for kind in ("initContainerStatuses", "containerStatuses")
            for each in pod["status"].get(kind, ())
        }

    # -- callers ------------------------------------------------------------------------------------------------------

    def service_url(self, name: str = "chat") -> str:
        address = self.get(f"/api/v1/{{}}/services/{name}")["spec"]["clusterIP"]
        return f"http://{address}:{HTTP}"

    @contextlib.contextmanager
    def client(self, url: str | None = None, key: str = "gold-key") -> Iterator[OpenAI]:
        """OpenAI's own client, which does not try again: what fails is seen."""
        base = f"{url or self.service_url()}/v1"
        with OpenAI(base_url=base, api_key=key, max_retries=0, timeout=60) as client:
            yield client

    def internal(self, entry: str, name: str = "chat") -> str:
        """A text of the pool's internal Secret."""
        data = self.get(f"/api/v1/{{}}/secrets/{name}-internal")["data"]
        return base64.b64decode(data[entry]).decode()

    def status_of(self, pod: Object) -> Any:
        """What a sidecar says of itself to whoever holds the token."""
        status, body = call(pod_url(pod, CONTROL), "/pool/status", token=self.internal("control-token").splitlines()[0])
        assert status == 200, body
        return body


@contextlib.contextmanager
def serving_space(cluster: NodeCluster) -> Iterator[ServingSpace]:
    """A namespace of the restricted standard, with what `serving_pool` needs."""
    with cluster.namespace(RESTRICTED) as name:
        space = ServingSpace(cluster, name)
        space.prepare()
        yield space


def pod_url(pod: Object, port: int = HTTP) -> str:
    return f"http://{pod['status']['podIP']}:{port}"


def call(url: str, path: str, token: str | None = None, body: Any = None, timeout: float = 30) -> tuple[int, Any]:
    """One request on a connection of its own; the answer's status and body (text where it is no JSON)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    return answer.status, json.loads(text) if text.startswith(("{", "[")) else text


def question(words: int = 8, **fields: Any) -> Object:
    """A chat request of its own; `words` makes the prompt longer."""
    text = " ".join([secrets.token_hex(4), *["the"] * words])
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


class Callers:
    """Clients that ask all the time, each on a new connection, so that every change of the Service is felt."""

    def __init__(self, url: str, key: str = "gold-key", count: int = 2) -> None:
        self.key = key
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop.wait(0.1):
            try:
                status, body = call(self._url, "/v1/chat/completions", self.key, question())
            except OSError as error:
                self.failures.append(f"{time.monotonic():.1f}: {error!r}")
                continue
            if status == 200:
                self.answered += 1
            else:
                self.failures.append(f"{time.monotonic():.1f}: {status} {body}")


def tokens_of(url: str, seconds: float, key: str = "gold-key") -> int:
    """How many tokens an answer of about so many seconds has here and now: machines differ, and so does their load."""
    begin = time.monotonic()
    status, body = call(url, "/v1/chat/completions", key, question(max_tokens=_PROBE, ignore_eos=True))
    assert status == 200, body
    return min(int(seconds * _PROBE / (time.monotonic() - begin)), CONTEXT - 100)


class Stream(threading.Thread):
    """A long answer that is being read; `finished` waits for its end."""

    def __init__(self, url: str, tokens: int, key: str = "gold-key") -> None:
        super().__init__()
        self.began = threading.Event()
        self.chunks = 0
        self.finish_reason: str | None = None
        self.fault: Exception | None = None
        self._url, self._tokens, self._key = url, tokens, key

    def run(self) -> None:
        try:
            with (
                OpenAI(base_url=f"{self._url}/v1", api_key=self._key, max_retries=0, timeout=120) as client,
                client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": secrets.token_hex(8)}],
                    max_tokens=self._tokens,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ) as stream,
            ):
                for chunk in stream:
                    self.chunks += 1
                    self.began.set()
                    for choice in chunk.choices:
                        self.finish_reason = choice.finish_reason or self.finish_reason
        except Exception as error:  # the thread's outermost frame: the test tells what it is
            self.fault = error
        finally:
            self.began.set()

    def finished(self, timeout: float = 90) -> bool:
        """Whether it came to its proper end."""
        self.join(timeout)
        assert not self.is_alive(), f"the stream still goes on after {timeout:.0f} s"
        assert self.fault is None, f"after {self.chunks} chunks: {self.fault!r}"
        return self.finish_reason == "length"
