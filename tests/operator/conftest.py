"""A pool to change one thing of, and what a healthy replica of it reports."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cacheaware_api import wire
from cacheaware_api.v1alpha1 import parse_spec
from cacheaware_operator.fleet import PartName, PartSnapshot, PartState, ReplicaSnapshot
from cacheaware_operator.plan import Wanted

SPEC: dict[str, Any] = {
    "model": {"name": "tiny", "source": "file:///models/tiny", "maxModelLen": 2048},
    "engine": {
        "type": "Torch",
        "args": ["--max-num-seqs=8"],
        "env": [{"name": "A", "value": "1"}],
        "kvCache": {"memory": "1Gi"},
    },
    "tiers": [
        {
            "name": "gold",
            "priority": 100,
            "weight": 4,
            "quota": {"nominalPercent": 50, "lendingLimitPercent": 25},
            "sla": {"timeToFirstToken": "800ms", "attainmentPercent": 95},
            "retention": "10m",
        },
        {"name": "bronze", "quota": {"nominalPercent": 30}},
    ],
    "defaultTier": "bronze",
    "identity": {"type": "Open"},
}

MakeWanted = Callable[..., Wanted]


@pytest.fixture
def spec() -> dict[str, Any]:
    return copy.deepcopy(SPEC)


@pytest.fixture
def make_wanted() -> MakeWanted:
    """`make_wanted(spec, field=…)`: a Wanted around a spec as YAML gives it."""

    def make(spec: dict[str, Any] | None = None, **fields: Any) -> Wanted:
        wanted = Wanted("default", "chat", "uid-1", 1, parse_spec(copy.deepcopy(SPEC if spec is None else spec)))
        return dataclasses.replace(wanted, **fields)

    return make


@pytest.fixture
def make_account() -> Callable[..., wire.TierLedger]:
    def make(held: int = 0, cached: int = 0, borrowed: int = 0, lent: int = 0) -> wire.TierLedger:
        return wire.TierLedger(
            nominal=50,
            effective=50,
            limit=100,
            held=held,
            cached=cached,
            lapsed=0,
            borrowed=borrowed,
            lent=lent,
            slots=wire.Slots(nominal=4, running=0),
            evicted_total=0,
            reclaimed_total=0,
            preempted_total=0,
            hit_tokens_total=0,
            query_tokens_total=0,
        )

    return make


@pytest.fixture
def make_replica(make_account: Callable[..., wire.TierLedger]) -> Callable[..., ReplicaSnapshot]:
    """A ready replica with a full status; name any part of it to change it."""

    def make(
        name: str = "chat-0",
        *,
        number: int = 1,
        capacity: int = 100,
        block_size: int = 16,
        accounts: dict[str, wire.TierLedger] | None = None,
        figures: dict[str, wire.TierFigures] | None = None,
        prefixes: dict[str, wire.PrefixLedger] | None = None,
        conditions: tuple[wire.Condition, ...] = (),
        enforcement: wire.Enforcement = wire.Enforcement.ENGINE,
        engine: PartSnapshot | None = None,
        ready: bool = True,
        answers: bool = True,
        problem: str | None = None,
    ) -> ReplicaSnapshot:
        revision = wire.Revision("uid-1", number)
        ledger = wire.Ledger(
            sequence=1,
            revision=revision,
            block_size=block_size,
            bytes_per_token=1000,
            capacity=capacity,
            free=capacity,
            public=wire.PublicLedger(share=10, held=0, cached=0, prefixes=prefixes or {}),
            tiers=accounts or {"gold": make_account(), "bronze": make_account()},
            running=0,
            waiting=0,
            max_sequences=8,
        )
        status = wire.PoolStatus(
            applied=revision,
            capacity=capacity,
            ledger=ledger,
            tiers=figures or {},
            enforcement=enforcement,
            conditions=conditions,
            key_algorithm="test",
        )
        return ReplicaSnapshot(
            name,
            (engine or PartSnapshot(PartName.ENGINE, PartState.READY), PartSnapshot(PartName.SIDECAR, PartState.READY)),
            ready=ready,
            status=status if answers else None,
            problem=problem,
        )

    return make
