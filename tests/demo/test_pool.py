"""The pool of the demo, with either engine: the same cache and tiers, so that both tell one story."""

from __future__ import annotations

import pytest

from cacheaware.demo.run import pool_file
from cacheaware_api.engine_flags import EngineType, owned_flag


@pytest.mark.parametrize("quotas", [True, False])
def test_with_vllm_everything_but_the_engine_is_the_same(quotas: bool) -> None:
    torch, vllm = (pool_file(quotas, engine).pool.spec for engine in (EngineType.TORCH, EngineType.VLLM))
    assert (torch.engine.type, vllm.engine.type) == (EngineType.TORCH, EngineType.VLLM)
    assert vllm.engine.kv_cache.memory == torch.engine.kv_cache.memory
    assert vllm.engine.args[: len(torch.engine.args)] == torch.engine.args
    assert not [flag for flag in vllm.engine.args if owned_flag(EngineType.VLLM, flag)]
    assert vllm.model_copy(update={"engine": torch.engine}) == torch


@pytest.mark.parametrize("engine", list(EngineType))
def test_without_quotas_nothing_is_anybodys(engine: EngineType) -> None:
    tiers = pool_file(quotas=False, engine=engine).pool.spec.tiers
    assert {(tier.quota.nominal_percent, tier.retention) for tier in tiers} == {(0, "0s")}
