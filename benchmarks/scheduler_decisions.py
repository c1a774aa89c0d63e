"""What deciding costs: a request's way through the scheduler with ten thousand waiting, keying, the index's memory."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.report import Row

from cacheaware_api.wire import StepReport
from cacheaware_sidecar.prefix_key import prefix_key
from cacheaware_sidecar.scheduling import EngineView, Scheduler, Slots, Terms, Used, Waiting
from cacheaware_sidecar.scheduling.prefix_index import PrefixIndex

WAITING = 10_000
TERMS = {"gold": Terms(4, 100, window=0.005), "silver": Terms(2, 50, window=0.025), "bronze": Terms(1, 0, window=0.5)}
PROMISES = {"gold": 0.8, "silver": 3.0, "bronze": 10.0}


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who waits."""

    what: str
    tenants: int
    families: int  # prompts that start alike
    prompt_chunks: int
    windows: bool = True


CROWDS = (
    Crowd("300 tenants, 50 system prompts", 300, 50, 64),
    Crowd("the same without windows, the default", 300, 50, 64, windows=False),
    Crowd("one tenant, all prompts different", 1, 1_000_000, 64),
    Crowd("5,000 tenants", 5_000, 1_000, 64),
    Crowd("one family of 10,000", 10, 1, 64),
    Crowd("prompts of 10k tokens", 300, 50, 625),
)


def measure(quick: bool) -> list[Row]:
    rounds = 500 if quick else 3_000
    rows = [
        Row(f"decision, {WAITING:,} waiting: {crowd.what}", decision_seconds(crowd, rounds) * 1e6, "µs", at_most=50)
        for crowd in CROWDS
    ]
    rows.append(Row("keying a prompt of 10k tokens", keying_seconds() * 1e3, "ms", at_most=2))
    rows.append(Row("an index of 1M chunks", index_megabytes(1_000_000), "MB", at_most=500))
    return rows


class _Ticking:
    """Virtual time: what is measured is deciding, not waiting."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def requests(crowd: Crowd, clock: _Ticking, rng: random.Random) -> Iterator[Waiting]:
    number = 0
    while True:
        number += 1
        tier = rng.choice(sorted(TERMS))
        family = rng.randrange(crowd.families)
        common = crowd.prompt_chunks // 2
        # short names instead of digests: equal ones are equal, which is all that counts here
        chunks = tuple(
            f"{family}.{place}".encode().ljust(16) if place < common else f"{number}/{place}".encode().ljust(16)
            for place in range(crowd.prompt_chunks)
        )
        yield Waiting(
            f"req-{number}",
            tier,
            f"tenant-{rng.randrange(crowd.tenants)}",
            clock.now,
            16.0 * crowd.prompt_chunks,
            100.0,
            deadline=clock.now + PROMISES[tier],
            chunks=chunks,
        )


def without_windows(terms: Mapping[str, Terms]) -> dict[str, Terms]:
    return {name: replace(each, window=0.0) for name, each in terms.items()}


def decision_seconds(crowd: Crowd, rounds: int) -> float:
    """Everything that a request costs on its way: coming, being picked, its first token, its end."""
    clock, rng = _Ticking(), random.Random(1)
    scheduler = Scheduler(TERMS if crowd.windows else without_windows(TERMS), clock)
    for tokens in (256, 8) * 10:
        scheduler.step(StepReport(1, tokens, 0, 0, 0, 0.001 + 1e-5 * tokens))
    view = EngineView(Slots(64))
    coming = requests(crowd, clock, rng)
    for _ in range(WAITING):
        scheduler.add(next(coming))
    inside = [dispatch.request for dispatch in scheduler.next(view).dispatches]
    fresh = [next(coming) for _ in range(rounds)]
    taken = []
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 10, 10)  # as the sidecar sets it
    for request in fresh:
        clock.now += 0.002
        started = time.thread_time()
        scheduler.add(request)
        sent = list(scheduler.next(view).dispatches)
        if inside:
            done = inside.pop(0)
            scheduler.first_byte(done.id)
            sent += scheduler.next(view).dispatches
            scheduler.finished(done.id, Used(round(done.prompt_tokens), 100, 0))
            sent += scheduler.next(view).dispatches
        taken.append(time.thread_time() - started)
        inside += [dispatch.request for dispatch in sent]
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    return sum(taken) / len(taken)


def keying_seconds() -> float:
    """A chat of 10k tokens, as 40 kB of text, in ten messages."""
    rng = random.Random(1)
    words = ["alpha", "beta", "import", "class", "return", "value", "range", "system", "context", "answer"]
    messages = [
        {"role": "user" if turn % 2 else "assistant", "content": " ".join(rng.choices(words, k=640))}
        for turn in range(10)
    ]
    body = {"model": "m", "messages": messages}
    return _median(lambda: prefix_key("/v1/chat/completions", body, "salt"), 50)


def index_megabytes(chunks: int) -> float:
    """Resident memory that an index of so many chunks adds, in a process of its own."""
    code = f"from benchmarks.scheduler_decisions import _fill_index; print(_fill_index({chunks}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    return float(json.loads(ran.stdout))


def _fill_index(chunks: int) -> float:
    before = _resident_bytes()
    index = PrefixIndex(chunks)
    for prompt in range(chunks // 1000 + 1):
        path = tuple(hashlib.blake2b(f"{prompt}.{n}".encode(), digest_size=16).digest() for n in range(1000))
        index.insert(Waiting("r", "gold", "acme", 0.0, chunks=path))
    assert len(index) == chunks
    return (_resident_bytes() - before) / 1e6


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _median(run: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.thread_time()
        run()
        taken.append(time.thread_time() - started)
    return statistics.median(taken)
