"""`make bench-sidecar`: what a request pays for passing through the sidecar, beside two Rust routers.

All subjects run before the same stub engine and take turns in every round, so that what else the machine does meets all
of them. Added latency is what a subject's percentile has beyond that of the bare engine in the same round; a rate for
one core is requests by the subject's own processor seconds, which a busy neighbour hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from benchmarks.report import Report, Row
from benchmarks.sidecar_load import Answered, Connections, chat, closed_loop, connect, open_loop, request
from benchmarks.sidecar_subjects import (
    ROUTER_VERSIONS,
    NotInstalled,
    Subject,
    install_routers,
    router_versions,
    running_engine,
    running_router,
    running_sidecar,
)
from rich.console import Console

CONSOLE = Console(stderr=True)
TWO_KB = "A prompt of two thousand bytes. " * 64
LARGE = "The quick brown fox jumps over the lazy dog; " * 78_000  # 3.5 MB
CHUNKS_PER_SECOND = 20
STREAMS = 1000
CROWD, CROWD_STREAMS, CROWD_CHUNKS = 200, 300, 80


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int
    latency_seconds: float
    saturation_seconds: float
    stream_seconds: float
    large_prompts: int


FULL = Size(rounds=7, latency_seconds=6, saturation_seconds=3, stream_seconds=15, large_prompts=3)
QUICK = Size(rounds=2, latency_seconds=2, saturation_seconds=1.5, stream_seconds=5, large_prompts=2)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def good(answers: Sequence[Answered], name: str) -> Sequence[Answered]:
    """Only good answers are timed; any other one is told."""
    bad = [answer.status for answer in answers if not answer.good]
    if bad:
        CONSOLE.print(f"{name}: {len(bad)} of {len(answers)} answers failed, with status {sorted(set(bad))}")
    return [answer for answer in answers if answer.good]


async def added_latency(engine: Subject, subjects: Sequence[Subject], size: Size) -> list[Row]:
    """To the first byte of a stream."""
    body = chat(TWO_KB, stream=(3, 0))
    p50: dict[str, list[float]] = {subject.name: [] for subject in (engine, *subjects)}
    p99: dict[str, list[float]] = {subject.name: [] for subject in (engine, *subjects)}
    for _ in range(size.rounds):
        for subject in (engine, *subjects):
            answers = await open_loop(subject.url, request(subject.url, body), rate=50, seconds=size.latency_seconds)
            times = [1000 * (each.first_byte - each.sent) for each in good(answers, subject.name)]
            p50[subject.name].append(percentile(times, 50))
            p99[subject.name].append(percentile(times, 99))

    def added(found: dict[str, list[float]], name: str) -> float:
        return statistics.median(a - b for a, b in zip(found[name], found[engine.name], strict=True))

    rows = []
    for words, found, limit in (("p50", p50, 1.0), ("p99", p99, 5.0)):
        what = f"added to the first byte, 50 requests/s, 2 KB prompts, {words}"
        rows += _rows(subjects, what, "ms", [added(found, each.name) for each in subjects], at_most=limit)
    return rows


async def saturation(subjects: Sequence[Subject], size: Size) -> list[Row]:
    body = chat("Hi")
    a_core: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    in_all: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for _ in range(size.rounds):
        for subject in subjects:
            before = subject.cpu_seconds
            answers = await closed_loop(
                subject.url, request(subject.url, body), connections=32, seconds=size.saturation_seconds
            )
            count = len(good(answers, subject.name))
            a_core[subject.name].append(count / (subject.cpu_seconds - before))
            in_all[subject.name].append(count / size.saturation_seconds)
    rows = []
    for what, found, limit in (
        ("saturation: small requests by processor seconds of the subject", a_core, 1500.0),
        ("saturation: small requests by seconds, on the cores that were free", in_all, None),
    ):
        figures = [statistics.median(found[each.name]) for each in subjects]
        rows += _rows(subjects, what, "requests/s", figures, at_least=limit)
    return rows


async def many_streams(engine: Subject, subjects: Sequence[Subject], size: Size) -> list[Row]:
    chunks = int(size.stream_seconds * CHUNKS_PER_SECOND)
    body = chat("Hi", stream=(chunks, 1 / CHUNKS_PER_SECOND))
    delays, errors, memory, left, cpu = [], [], [], [], []
    for subject in (engine, *subjects):
        before, used = subject.descriptors, subject.cpu_seconds
        most = 0.0
        connections = Connections(subject.url)
        tasks = []
        for _ in range(STREAMS):
            tasks.append(asyncio.create_task(connections.ask(request(subject.url, body), 60 + size.stream_seconds)))
            await asyncio.sleep(2 / STREAMS)  # spread over two seconds, as arrivals are
        waiting = asyncio.gather(*tasks)
        while not waiting.done():
            most = max(most, subject.memory_mib)
            await asyncio.wait([waiting], timeout=0.2)
        answers = await waiting
        connections.close()
        cpu.append((subject.cpu_seconds - used) / (STREAMS * chunks) * 1e6)
        bad = sum(not each.good or len(each.delays) < 0.99 * chunks for each in answers)
        errors.append(float(bad))
        delays.append(1000 * percentile([delay for each in answers for delay in each.delays], 99))
        memory.append(most)
        await asyncio.sleep(1.5)  # idle connections to the engine are dropped meanwhile
        left.append(float(max(0, subject.descriptors - before)))
    told = f"{STREAMS} streams of {CHUNKS_PER_SECOND} chunks/s: "
    rows = _rows(subjects, told + "errors", "streams", errors[1:], at_most=0)
    rows += _rows(subjects, told + f"p99 chunk delay (bare engine {delays[0]:.1f})", "ms", delays[1:], at_most=50)
    rows += _rows(subjects, told + "processor time of a chunk", "µs", cpu[1:])
    rows += _rows(subjects, told + "memory (RSS)", "MiB", memory[1:], at_most=250)
    rows += _rows(subjects, told + "descriptors left 1.5 s after", "", left[1:], at_most=2)
    return rows


async def crowd(subjects: Sequence[Subject], size: Size) -> list[Row]:
    """Many requests at once beside running streams, on new connections and then on the same: what the streams feel."""
    stream, small = chat("Hi", stream=(CROWD_CHUNKS, 1 / CHUNKS_PER_SECOND)), chat("Hi")
    worst: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for _ in range(min(3, size.rounds)):
        for subject in subjects:
            streams, others = Connections(subject.url), Connections(subject.url)
            running = []
            for _ in range(CROWD_STREAMS):
                running.append(asyncio.create_task(streams.ask(request(subject.url, stream))))
                await asyncio.sleep(0.004)
            for _ in range(2):
                await asyncio.sleep(0.5)
                await asyncio.gather(*(others.ask(request(subject.url, small)) for _ in range(CROWD)))
            answers = good(await asyncio.gather(*running), subject.name)
            worst[subject.name].append(percentile([1000 * max(each.delays) for each in answers], 50))
            streams.close()
            others.close()
            await asyncio.sleep(1)  # idle connections to the engine are dropped meanwhile
    what = f"{CROWD} requests at once beside {CROWD_STREAMS} streams: the worst delay of a stream's chunks, median"
    return _rows(subjects, what, "ms", [statistics.median(worst[each.name]) for each in subjects])


async def large_prompt(engine: Subject, subjects: Sequence[Subject], size: Size) -> list[Row]:
    """One at a time, while another connection asks for the health every millisecond: what the others feel."""
    body = chat(LARGE)
    added: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    felt: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    for _ in range(size.rounds):
        for subject in subjects:
            for _ in range(size.large_prompts):
                bare = await _one(engine, body)
                stop = asyncio.Event()
                pings = asyncio.create_task(_pings(subject, stop))
                await asyncio.sleep(0.05)
                added[subject.name].append(1000 * (await _one(subject, body) - bare))
                stop.set()
                felt[subject.name].append(1000 * await pings)
    rows = _rows(
        subjects, "3.5 MB prompt: added", "ms", [statistics.median(added[each.name]) for each in subjects], at_most=60
    )
    slowest = [statistics.median(felt[each.name]) for each in subjects]
    rows += _rows(subjects, "3.5 MB prompt: slowest health check meanwhile, median", "ms", slowest)
    return rows


async def blocked_loop(engine: Subject, folder: Path, size: Size) -> list[Row]:
    """The longest turns of our event loop while such prompts pass, by its own clock (`sidecar_turns.py`)."""
    body, spans = chat(LARGE), list[tuple[float, float]]()
    turns = folder / "turns.json"
    async with running_sidecar(engine, folder, turns) as subject:
        for _ in range(size.rounds * size.large_prompts):
            began = time.monotonic()
            await _one(subject, body)
            spans.append((began, time.monotonic()))
    took = json.loads(turns.read_text())
    longest = [1000 * max((each for at, each in took if began <= at <= ended), default=0.0) for began, ended in spans]
    return [
        Row("3.5 MB prompt: longest turn of the event loop, median", statistics.median(longest), "ms", at_most=5),
        Row("3.5 MB prompt: longest turn of the event loop, of all", max(longest), "ms"),
    ]


async def _one(subject: Subject, body: bytes) -> float:
    client = await connect(subject.url)
    answer = await client.ask(request(subject.url, body))
    client.close()
    good([answer], subject.name)
    return answer.ended - answer.sent if answer.good else math.nan


async def _pings(subject: Subject, stop: asyncio.Event) -> float:
    client = await connect(subject.url)
    message = request(subject.url, None, "/health" if subject.name != "ours" else "/healthz")
    slowest = 0.0
    while not stop.is_set():
        answer = await client.ask(message)
        slowest = max(slowest, answer.ended - answer.sent)
        await asyncio.sleep(0.001)
    client.close()
    return slowest


def _rows(
    subjects: Sequence[Subject],
    what: str,
    unit: str,
    figures: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> list[Row]:
    """Ours against each of the others; the target stands once."""
    ours, *others = figures
    if not others:
        return [Row(what, ours, unit, at_most=at_most, at_least=at_least)]
    return [
        Row(
            f"{what}; rival: {subject.name}",
            ours,
            unit,
            rival=None if math.isnan(figure) else figure,  # one that failed was told above
            at_most=at_most if number == 0 else None,
            at_least=at_least if number == 0 else None,
        )
        for number, (subject, figure) in enumerate(zip(subjects[1:], others, strict=True))
    ]


async def measure(report: Report, size: Size, routers: Sequence[str], only: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="ca-") as name:
        folder = Path(name)
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(running_engine(folder))
            started = [running_sidecar(engine, folder), *(running_router(each, engine, folder) for each in routers)]
            subjects = [await stack.enter_async_context(each) for each in started]
            parts: dict[str, Callable[[], Awaitable[list[Row]]]] = {
                "latency": lambda: added_latency(engine, subjects, size),
                "saturation": lambda: saturation(subjects, size),
                "streams": lambda: many_streams(engine, subjects, size),
                "crowd": lambda: crowd(subjects, size),
                "large": lambda: large_prompt(engine, subjects, size),
                "turns": lambda: blocked_loop(engine, folder, size),
            }
            for part, run in parts.items():
                if only in (None, part):
                    CONSOLE.print(f"measuring: {part} …")
                    report.add(*await run())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_sidecar", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most two minutes, for CI: rougher figures")
    parser.add_argument("--no-rivals", action="store_true", help="ours alone")
    parser.add_argument(
        "--only", choices=("latency", "saturation", "streams", "crowd", "large", "turns"), help="one part of it"
    )
    parser.add_argument("--pip-arg", action="append", default=[], help="for pip, which installs the rivals; repeatable")
    arguments = parser.parse_args()
    report = Report("sidecar", ["cacheaware", "aiohttp", "uvloop"], quick=arguments.quick)
    routers: list[str] = []
    if not arguments.no_rivals:
        try:
            install_routers(arguments.pip_arg)
            routers = list(ROUTER_VERSIONS)
            report.versions |= router_versions()
        except NotInstalled as error:
            report.remarks.append(f"the Rust routers could not be installed, so ours stands alone: {error}")
    uvloop.run(measure(report, QUICK if arguments.quick else FULL, routers, arguments.only))
    report.finish()


if __name__ == "__main__":
    main()
