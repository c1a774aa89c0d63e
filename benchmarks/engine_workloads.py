"""What the engine benchmark measures: workloads, and how one is timed on anything that takes requests and steps.

Standard library only: the same file runs in each rival's own environment.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

VOCABULARY = (300, 48_000)  # ids that are ordinary tokens of the model


class Subject(Protocol):
    """An engine in this process."""

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Take a request: greedy, and it goes on past the end of text."""

    def step(self) -> list[int]:
        """Run one step; the requests that got a token, in any order."""

    def abort_all(self) -> None:
        """Forget all requests; what they computed may stay cached."""

    def kv_tokens_read(self) -> tuple[int, int] | None:
        """Stored tokens read since the start, and the distinct ones of each step; None: the engine does not say."""


class Kind(StrEnum):
    DECODE = "decode"  # milliseconds a step while all requests decode
    PREFILL = "prefill"  # milliseconds until the first token of one request
    ARRIVALS = "arrivals"  # milliseconds until the first token, 95th percentile of requests that come together
    LOAD = "load"  # milliseconds until requests that come together have all their tokens


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: Kind
    groups: int  # prefixes
    members: int  # requests on each
    prefix: int  # tokens that the members of a group share; 0: nothing
    own: int  # tokens of each request's own
    target: float | None = None  # rival's time over ours, at least


@dataclass(frozen=True, slots=True)
class Measured:
    milliseconds: float  # a step or a first token
    tokens: int = 0  # in a step
    read_amplification: float | None = None


WORKLOADS = (
    Workload("decode 1 x 512", Kind.DECODE, 1, 1, 0, 512, 1.2),
    Workload("decode 8 x 512", Kind.DECODE, 1, 8, 0, 512, 0.95),
    Workload("decode 16 x 512", Kind.DECODE, 1, 16, 0, 512, 0.95),
    Workload("decode 1 on 3072", Kind.DECODE, 1, 1, 3072, 16, 1.15),
    Workload("decode 8 on 3072", Kind.DECODE, 1, 8, 3072, 16, 1.15),
    Workload("decode 16 on 3072", Kind.DECODE, 1, 16, 3072, 16, 1.15),
    Workload("decode 16 on 7500", Kind.DECODE, 1, 16, 7488, 16, 1.3),
    Workload("decode 4 groups x 4 on 1024", Kind.DECODE, 4, 4, 1024, 16, 1.1),
    Workload("prefill 512", Kind.PREFILL, 1, 1, 0, 512, 0.95),
    Workload("prefill 3072", Kind.PREFILL, 1, 1, 0, 3072, 0.95),
    Workload("16 arrivals on 2048", Kind.ARRIVALS, 1, 16, 2048, 16, 1.0),
    Workload("load 8 x 256 + 32", Kind.LOAD, 1, 8, 0, 256),
)
QUICK = ("decode 1 x 512", "prefill 512", "load 8 x 256 + 32", "decode 8 x 512")  # what every engine gets done soon
LOAD_TOKENS = 32  # that each request of a load makes


def measure(subject: Subject, workload: Workload, steps: int, seed: int) -> Measured:
    """One reading. Each seed has prompts of its own, so that nothing is cached but what the workload shares."""
    rng = random.Random(f"{workload.name}/{seed}")
    prefixes = [_tokens(rng, workload.prefix) for _ in range(workload.groups)]
    prompts = [prefix + _tokens(rng, workload.own) for prefix in prefixes for _ in range(workload.members)]
    if workload.kind is Kind.DECODE:
        if workload.prefix:  # resident before the others come, as in a pool that serves them again and again
            for prefix in prefixes:
                _run(subject, [prefix + _tokens(rng, 1)])
        return _decode(subject, prompts, steps)
    if workload.kind is Kind.LOAD:
        return Measured(_load(subject, prompts) * 1e3, tokens=LOAD_TOKENS * len(prompts))
    first = _first_tokens(subject, prompts)
    if workload.kind is Kind.PREFILL:
        return Measured(first[0] * 1e3, tokens=len(prompts[0]))
    return Measured(first[min(len(first) - 1, int(0.95 * len(first)))] * 1e3, tokens=sum(map(len, prompts)))


def _decode(subject: Subject, prompts: Sequence[Sequence[int]], steps: int) -> Measured:
    warm = 3
    started: set[int] = set()
    for request, prompt in enumerate(prompts):  # enough tokens that none ends before it was measured
        subject.add(request, prompt, 512)
    while len(started) < len(prompts):
        started.update(subject.step())
    for _ in range(warm):
        subject.step()
    before = subject.kv_tokens_read()
    times: list[float] = []
    while len(times) < steps:
        begin = time.perf_counter()
        got = subject.step()
        if got:  # an engine that computes ahead may answer a call with nothing
            times.append(time.perf_counter() - begin)
        assert len(got) in (0, len(prompts)), f"{len(got)} of {len(prompts)} requests in a step"
    after = subject.kv_tokens_read()
    amplification = None
    if before is not None and after is not None and after[1] > before[1]:
        amplification = (after[0] - before[0]) / (after[1] - before[1])
    subject.abort_all()
    return Measured(statistics.median(times) * 1e3, len(prompts), amplification)


def _load(subject: Subject, prompts: Sequence[Sequence[int]]) -> float:
    begin = time.perf_counter()
    for request, prompt in enumerate(prompts):
        subject.add(request, prompt, LOAD_TOKENS)
    left = LOAD_TOKENS * len(prompts)
    while left > 0:
        left -= len(subject.step())
    return time.perf_counter() - begin


def _first_tokens(subject: Subject, prompts: Sequence[Sequence[int]]) -> list[float]:
    begin = time.perf_counter()
    for request, prompt in enumerate(prompts):
        subject.add(request, prompt, 4 if len(prompts) > 1 else 1)
    seen: dict[int, float] = {}
    while len(seen) < len(prompts):
        for request in subject.step():
            seen.setdefault(request, time.perf_counter() - begin)
    subject.abort_all()
    return sorted(seen.values())


def _run(subject: Subject, prompts: Sequence[Sequence[int]]) -> None:
    for request, prompt in enumerate(prompts):
        subject.add(request, prompt, 1)
    done: set[int] = set()
    while len(done) < len(prompts):
        done.update(subject.step())


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(*VOCABULARY) for _ in range(count)]
