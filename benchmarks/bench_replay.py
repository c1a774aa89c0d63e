"""`make bench-replay`: the pool's own code on traces and generated loads, in virtual time, beside other policies.

Virtual time does not depend on the machine: the same commit gives the same figures anywhere, and other load only makes
them come later.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Row
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cacheaware.replay.engine_cost import ENGINES
from cacheaware.replay.hindsight import best_static
from cacheaware.replay.measures import Served
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.requests import Mapped, Request, merged
from cacheaware.replay.simulation import Outcome, Setup, Simulation
from cacheaware.replay.trace import Trace
from cacheaware.replay.trace_formats import trace_file
from cacheaware.replay.virtual_operator import view_of
from cacheaware.replay.workloads import Scale, workload
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, parse_spec
from cacheaware_operator.rebalance_terms import terms_of

TRACES = Path(os.environ.get("CACHEAWARE_SHARED", "../shared")) / "traces" / "mooncake"
BOTH_SECONDS = 1022.0  # as long as the shorter of the two traces
TRACE_BLOCK = 512
BLOCK = 128
SMALL_CACHE = 192_000  # tokens: less than the templates of two tiers have
# Steps of 66 ms: with larger ones a first token that was promised in a second waits for the steps of others.
SHORT_STEPS = replace(ENGINES["h200-8b"], max_batched_tokens=2048)
ATTAINMENT = 95.0
CONSOLE = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Size:
    trace_seconds: float
    capacities: Sequence[float]  # millions of tokens; the first is the one with targets for gains
    rates: Sequence[float]
    seeds: int
    seconds: float  # of a generated load


FULL = Size(BOTH_SECONDS, (3, 1, 5, 10), (12, 14, 16, 18, 20, 22, 24), 3, 45.0)
QUICK = Size(120.0, (3, 1), (12, 24), 1, 15.0)

BASE: dict[str, Any] = {
    "model": {"name": "m", "source": "file:///m"},
    "engine": {"type": "VLLM"},
    "defaultTier": "bronze",
    "identity": {"type": "Open"},
    "sharing": "Tier",
    "rebalancing": {"mode": "Auto", "interval": "30s"},
}


def two_tenants(gold_weight: int) -> CacheAwarePoolSpec:
    """Half of the cache each, all of it to be borrowed and lent."""
    tiers = [
        {"name": "gold", "weight": gold_weight, "quota": {"nominalPercent": 50}},
        {"name": "bronze", "quota": {"nominalPercent": 50}},
    ]
    return parse_spec(BASE | {"tiers": tiers})


def promised() -> CacheAwarePoolSpec:
    """Two tiers with promises and windows, as a pool's file has them."""
    tiers = [
        {
            "name": "gold", "priority": 100, "weight": 4, "quota": {"nominalPercent": 50},
            "sla": {"timeToFirstToken": "1s"}, "batchingWindow": "5ms",
        },
        {
            "name": "bronze", "quota": {"nominalPercent": 50},
            "sla": {"timeToFirstToken": "10s"}, "batchingWindow": "200ms",
        },
    ]  # fmt: skip
    return parse_spec(copy.deepcopy(BASE) | {"tiers": tiers})


class Bench:
    def __init__(self, size: Size, report: Report, progress: Progress) -> None:
        self._size = size
        self._report = report
        self._progress = progress

    def run(self, phases: Sequence[str]) -> None:
        work: Mapping[str, Callable[[], None]] = {
            "tenants": self.tenants,
            "controls": self.controls,
            "templated": self.templated,
            "flooder": self.flooder,
        }
        for phase in phases:
            work[phase]()
            if not CONSOLE.is_terminal:
                CONSOLE.print(f"{phase}: done")

    # -- two tenants on public traces ----------------------------------------------------------------------------------

    def tenants(self) -> None:
        if not TRACES.is_dir():
            self._report.remarks.append(f"two tenants: skipped, {TRACES} is missing (CACHEAWARE_SHARED)")
            return
        even = two_tenants(1)
        sources = [
            Mapped(trace_file(TRACES / file).read(TRACE_BLOCK).until(self._size.trace_seconds), tier)
            for file, tier in (("conversation_trace.jsonl", "gold"), ("synthetic_trace.jsonl", "bronze"))
        ]
        requests = _requests(sources, even)
        for millions in self._size.capacities:
            self._two_tenants(even, requests, millions, first=millions == self._size.capacities[0])

    def _two_tenants(
        self, even: CacheAwarePoolSpec, requests: Sequence[Request], millions: float, *, first: bool
    ) -> None:
        setup = _trace_setup(even, millions)
        lru = self._outcome(setup, PolicyName.FCFS_LRU, requests, f"{millions:g}M")
        ours = self._outcome(setup, PolicyName.CACHEAWARE, requests, f"{millions:g}M")
        what = f"two tenants, {millions:g}M tokens"
        self._report.add(
            Row(f"{what}: token hit", _hit(ours), "%", rival=_hit(lru)),
            Row(f"{what}: hit over shared LRU's", _hit(ours) / _hit(lru), "×", at_least=1.20 if first else 0.99),
        )
        if not first:
            return
        shares = best_static(requests, setup.capacity, TRACE_BLOCK, terms_of(even))
        splits = [shares, *({"gold": gold, "bronze": 100 - gold} for gold in (10, 30))]
        best = max(
            (self._outcome(setup, PolicyName.BEST_STATIC, requests, "a split", each) for each in splits), key=_hit
        )
        self._report.add(
            Row(f"{what}: hit over the best static split's", _hit(ours) / _hit(best), "×", at_least=0.92),
        )
        self._report.remarks.append(f"{what}: the best static split was {dict(best.effective or {})}")
        weighted = _trace_setup(two_tenants(4), millions)
        paid = self._outcome(weighted, PolicyName.CACHEAWARE, requests, "4:1")
        gold, gold_lru = paid.tiers["gold"].hit_percent, lru.tiers["gold"].hit_percent
        self._report.add(
            Row(f"{what}, gold weighted 4:1: gold's hit", gold, "%", rival=gold_lru),
            Row(f"{what}, gold weighted 4:1: gold's hit over shared LRU's", gold / gold_lru, "×", at_least=1.8),
            Row(f"{what}, gold weighted 4:1: its price in all hits", _hit(paid) / _hit(lru), "×"),
        )

    # -- controls ------------------------------------------------------------------------------------------------------

    def controls(self) -> None:
        """Where there is nothing to gain, nothing may be lost. Half of what the engine can do, and nearly all of it."""
        spec = promised()
        for name, rates in (("nothing-to-win", (10.0, 25.0)), ("nothing-shared", (4.0, 8.0))):
            for rate in rates:
                setup = Setup(spec, ENGINES["h200-8b"], 400_000 // BLOCK, BLOCK)
                requests = _generated(name, rate, self._size.seconds, spec, seed=0)
                lru = self._outcome(setup, PolicyName.FCFS_LRU, requests, name)
                ours = self._outcome(setup, PolicyName.CACHEAWARE, requests, name)
                what = f"{name}, {rate:g} requests/s"
                self._report.add(
                    Row(f"{what}: time for all over FCFS + LRU's", ours.seconds / lru.seconds, "×", at_most=1.01),
                    Row(f"{what}: mean TTFT over FCFS + LRU's", _mean_ttft(ours) / _mean_ttft(lru), "×", at_most=1.01),
                )

    # -- goodput -------------------------------------------------------------------------------------------------------

    def templated(self) -> None:
        spec, size = promised(), self._size
        setup = Setup(spec, SHORT_STEPS, SMALL_CACHE // BLOCK, BLOCK)
        policies = (PolicyName.CACHEAWARE, PolicyName.NO_WINDOW, PolicyName.FCFS_LRU)
        goodput: dict[PolicyName, list[float]] = {policy: [] for policy in policies}
        for seed in range(size.seeds):
            curves: dict[PolicyName, list[float]] = {policy: [] for policy in policies}
            for rate in size.rates:
                requests = _generated("templated", rate, size.seconds, spec, seed)
                for policy in policies:
                    outcome = self._outcome(setup, policy, requests, f"{rate:g}/s, seed {seed}")
                    curves[policy].append(min(tier.attainment_percent for tier in outcome.tiers.values()))
            for policy in policies:
                goodput[policy].append(_highest(size.rates, curves[policy]))
                curve = zip(size.rates, curves[policy], strict=True)
                told = ", ".join(f"{rate:g}/s {least:.0f} %" for rate, least in curve)
                self._report.remarks.append(f"templated, seed {seed}, {policy}: least attainment of a tier at {told}")
        ours, flat, lru = (statistics.median(goodput[policy]) for policy in policies)
        self._report.add(
            Row(f"templated: goodput with {ATTAINMENT:g} % attainment in every tier", ours, "requests/s", rival=lru),
            Row("templated: goodput over FCFS + LRU's", ours / lru if lru else float("inf"), "×", at_least=1.3),
            Row("templated: goodput over that without windows", ours / flat if flat else float("inf"), "×"),
        )

    # -- fairness ------------------------------------------------------------------------------------------------------

    def flooder(self) -> None:
        spec = parse_spec(BASE | {"tiers": [{"name": "bronze", "quota": {"nominalPercent": 100}}], "sharing": "Tier"})
        setup = Setup(spec, SHORT_STEPS, 400_000 // BLOCK, BLOCK)
        rate = 1.5  # ten times as much floods the engine
        calm, flooded = (_generated(name, rate, self._size.seconds, spec, seed=0) for name in ("quiet", "flooder"))
        for policy, limit in ((PolicyName.CACHEAWARE, 1.2), (PolicyName.FCFS_LRU, None)):
            alone, beside = (self._outcome(setup, policy, each, "flooder") for each in (calm, flooded))
            before, after = _quiet_p95(alone.served), _quiet_p95(beside.served)
            self._report.add(
                Row(f"flooder, {policy}: quiet tenants' p95 TTFT over that without", after / before, "×", at_most=limit)
            )

    def _outcome(
        self,
        setup: Setup,
        policy: PolicyName,
        requests: Sequence[Request],
        what: str,
        shares: Mapping[str, int] | None = None,
    ) -> Outcome:
        task = self._progress.add_task(f"{what}, {policy}", total=len(requests))
        try:
            return Simulation(
                setup,
                policy,
                requests,
                shares=shares,
                progress=lambda done: self._progress.update(task, completed=done),
            ).run()
        finally:
            self._progress.remove_task(task)


# -- inputs ------------------------------------------------------------------------------------------------------------


def _requests(sources: Sequence[Mapped], spec: CacheAwarePoolSpec, seed: int = 0) -> Sequence[Request]:
    return merged(sources, view_of(spec, terms_of(spec).nominal), seed=seed)


def _generated(name: str, rate: float, seconds: float, spec: CacheAwarePoolSpec, seed: int) -> Sequence[Request]:
    trace: Trace = workload(name, Scale(rate, seconds, [tier.name for tier in spec.tiers], BLOCK, seed))
    if name == "flooder":  # the same quiet tenants, under the same name, as without it
        trace = replace(trace, name="quiet")
    return _requests([Mapped(trace)], spec, seed)


def _trace_setup(spec: CacheAwarePoolSpec, millions: float) -> Setup:
    """A model that is small for its GPU: the traces were made by a cluster, and one engine is to keep up with them."""
    return Setup(spec, ENGINES["h200-0.5b"], int(millions * 1e6) // TRACE_BLOCK, TRACE_BLOCK)


# -- figures -----------------------------------------------------------------------------------------------------------


def _hit(outcome: Outcome) -> float:
    return outcome.everything.hit_percent


def _mean_ttft(outcome: Outcome) -> float:
    return statistics.fmean(each.time_to_first_token or 0.0 for each in outcome.served)


def _quiet_p95(served: Sequence[Served]) -> float:
    times = sorted(each.time_to_first_token or 0.0 for each in served if "quiet-" in each.request.tenant)
    return times[int(0.95 * (len(times) - 1))]


def _highest(rates: Sequence[float], attainment: Sequence[float]) -> float:
    """The highest rate up to which the promises are kept; between two rates where the line through them crosses."""
    best = 0.0
    for place, (rate, kept) in enumerate(zip(rates, attainment, strict=True)):
        if kept >= ATTAINMENT:
            best = rate
            continue
        if place:
            before = attainment[place - 1]
            best += (rate - rates[place - 1]) * (before - ATTAINMENT) / (before - kept)
        break
    return best


PHASES = ("tenants", "controls", "templated", "flooder")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-replay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two minutes: that it runs, not what it shows")
    parser.add_argument("--only", action="append", choices=PHASES, help="one part of it")
    arguments = parser.parse_args()
    report = Report("replay", ("cacheaware",), quick=arguments.quick)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as progress:
        Bench(QUICK if arguments.quick else FULL, report, progress).run(arguments.only or PHASES)
    report.finish()


if __name__ == "__main__":
    main()
