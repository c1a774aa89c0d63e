"""What the plugin adds to a step, without a model: run in vLLM's environment, prints one JSON object.

The same load goes through vLLM's own scheduler and through ours, alternating; what differs between the two is the time
in our hooks. The load is decoding by 64 requests with a full cache of 20,000 blocks, and what arrives in between.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cacheaware_api import wire
from cacheaware_engine.vllm_plugin.scheduler import TierScheduler
from cacheaware_engine.vllm_plugin.testing import Rig

BLOCKS, BLOCK_SIZE, CONCURRENT, PROMPT = 20_000, 16, 64, 2_000


def make(scheduler_class: Any) -> Rig:
    rig = Rig(
        scheduler_class, Path(tempfile.mkdtemp()), blocks=BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=CONCURRENT,
        max_batched=8_192, max_model_len=4_096,
    )  # fmt: skip
    if scheduler_class is TierScheduler:
        tiers = tuple(
            wire.TierQuota(name, priority, 1, nominal, nominal, BLOCKS, nominal)
            for name, priority, nominal in (("gold", 100, 8_000), ("bronze", 0, 8_000))
        )
        rig.scheduler.control.set_quotas(wire.Quotas(wire.Revision("bench", 1), tiers, 0))
    return rig


def load(rig: Rig, number: int) -> None:
    """A request like no other, of either tier."""
    start = number * 7 % 251
    tokens = [(start + place * (number + 3)) % 250 for place in range(PROMPT)]
    rig.add("gold" if number % 2 else "bronze", tokens, max_tokens=200, priority=-(number % 2))


def steps(rig: Rig, count: int, number: int) -> tuple[list[float], int]:
    """CPU seconds of each step, so that others on the machine do not count; whoever ends is followed by another."""
    seconds = []
    for _ in range(count):
        while len(rig.scheduler.requests) < CONCURRENT:
            load(rig, number)
            number += 1
        before = time.thread_time()
        rig.step()
        seconds.append(time.thread_time() - before)
    return seconds, number


def reclaim_steps() -> int:
    """Steps from the arrival of an entitled request at a pool full of running borrowers to the one that computes it."""
    rig = Rig(TierScheduler, Path(tempfile.mkdtemp()), blocks=400, block_size=16, max_num_seqs=32, max_batched=2_048)
    tiers = (wire.TierQuota("gold", 100, 1, 200, 200, 400, 200), wire.TierQuota("bronze", 0, 1, 50, 50, 400, 50))
    rig.scheduler.control.set_quotas(wire.Quotas(wire.Revision("bench", 1), tiers, 0))
    for number in range(30):
        rig.add("bronze", [(number * 5 + place * (number + 2)) % 250 for place in range(190)], max_tokens=60)
    for _ in range(8):
        rig.step()
    wanted = rig.add("gold", list(range(150)), priority=-100)
    for count in range(1, 50):
        if wanted in rig.step():
            return count
    return 50


def main(count: int) -> None:
    logging.disable(logging.WARNING)
    rigs = {"stock": make(AsyncScheduler), "plugin": make(TierScheduler)}
    numbers = dict.fromkeys(rigs, 0)
    seconds: dict[str, list[float]] = {name: [] for name in rigs}
    for name, rig in rigs.items():
        _, numbers[name] = steps(rig, 120, 0)  # the cache fills
    for _ in range(8):
        for name, rig in rigs.items():
            took, numbers[name] = steps(rig, count // 8, numbers[name])
            seconds[name] += took
    means = {name: statistics.fmean(took) * 1e3 for name, took in seconds.items()}
    medians = {name: statistics.median(took) * 1e3 for name, took in seconds.items()}
    print(json.dumps({"mean_ms": means, "median_ms": medians, "reclaim_steps": reclaim_steps()}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 800)
