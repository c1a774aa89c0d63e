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

from cacheaware.replay.engine_cost import ENGINES, EngineCost
from cacheaware.replay.fairness import largest_lag
from cacheaware.replay.hindsight import best_static
from cacheaware.replay.measures import Served
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.requests import Mapped, Request, merged
from cacheaware.replay.simulation import Outcome, Setup, Simulation
from cacheaware.replay.trace import Trace
from cacheaware.replay.trace_formats import trace_file
from cacheaware.replay.virtual_operator import view_of
from cacheaware.replay.workloads import Scale, workload
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec, EngineType, parse_spec
from cacheaware_operator.rebalance_terms import terms_of
from cacheaware_sidecar.tiers import promise_of

TRACES = Path(os.environ.get("CACHEAWARE_SHARED", "../shared")) / "traces" / "mooncake"
BOTH_SECONDS = 1022.0  # as long as the shorter of the two traces
TRACE_BLOCK = 512
BLOCK = 128
SMALL_CACHE = 192_000  # tokens: less than the templates of two tiers have
ENDLESS_CACHE = 4_000_000  # tokens: more than anything here brings
# Steps of 66 ms: with larger ones a first token that was promised in a second waits for the steps of others.
SHORT_STEPS = replace(ENGINES["h200-8b"], max_batched_tokens=2048)
SHORTER_STEPS = replace(ENGINES["h200-8b"], max_batched_tokens=512)
ATTAINMENT = 95.0
CONSOLE = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Size:
    trace_seconds: float
    capacities: Sequence[float]  # millions of tokens; the first is the one with targets for gains
    rates: Sequence[float]
    seeds: int
    seconds: float  # of a generated load
    warm_up: float  # seconds in front of a templated load: what came then is served and not counted
    endless_rates: Sequence[float]  # with a cache that keeps everything


FULL = Size(BOTH_SECONDS, (3, 1, 5, 10), (18, 20, 22, 24, 26, 28, 30, 32), 3, 45.0, 30.0, (28, 34, 40, 46, 52, 58))
QUICK = Size(120.0, (3, 1), (12, 24), 1, 15.0, 5.0, (24,))

BASE: dict[str, Any] = {
    "model": {"name": "m", "source": "file:///m"},
    "engine": {"type": "Torch"},
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


def promised(nominal: int = 50, engine: EngineType = EngineType.TORCH) -> CacheAwarePoolSpec:
    """Two tiers with promises and windows, as a pool's file has them, and so many percent of the cache each."""
    tiers = [
        {
            "name": "gold", "priority": 100, "weight": 4, "quota": {"nominalPercent": nominal},
            "sla": {"timeToFirstToken": "1s"}, "batchingWindow": "5ms",
        },
        {
            "name": "bronze", "quota": {"nominalPercent": nominal},
            "sla": {"timeToFirstToken": "10s"}, "batchingWindow": "200ms",
        },
    ]  # fmt: skip
    return parse_spec(copy.deepcopy(BASE) | {"tiers": tiers, "engine": {"type": engine}})


def templated_pool(engine: EngineType = EngineType.TORCH) -> CacheAwarePoolSpec:
    """The same with little that is surely a tier's own: what runs holds nearly all of a small cache, and where each
    tier has its own half a request waits for its tier's while the other's could do without.
    """
    return promised(nominal=5, engine=engine)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second up to which promises are kept: without the first seconds, and with them."""

    warm: float
    cold: float


class Bench:
    def __init__(self, size: Size, report: Report, progress: Progress) -> None:
        self._size = size
        self._report = report
        self._progress = progress
        self._all = progress.add_task("all runs", total=None, start=False)

    def run(self, phases: Sequence[str]) -> None:
        work: Mapping[str, Callable[[], None]] = {
            "tenants": self.tenants,
            "controls": self.controls,
            "templated": self.templated,
            "flooder": self.flooder,
        }
        self._progress.update(self._all, total=sum(self._runs(phase) for phase in phases))
        for phase in phases:
            work[phase]()
            if not CONSOLE.is_terminal:
                CONSOLE.print(f"{phase}: done")

    def _runs(self, phase: str) -> int:
        """Simulations of a phase, for the progress bar."""
        size = self._size
        match phase:
            case "tenants":
                return 2 * len(size.capacities) + 4
            case "templated":
                return size.seeds * (5 * len(size.rates) + 2 * len(size.endless_rates))
            case _:
                return 8

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
        """A pool that has just started computes every template once, whatever its policy: the first seconds are served
        and not counted. What a cache without end would allow is the bound on all that a cache policy can win.
        """
        size = self._size
        policies = (PolicyName.CACHEAWARE, PolicyName.NO_WINDOW, PolicyName.FCFS_LRU)
        two = (PolicyName.CACHEAWARE, PolicyName.FCFS_LRU)
        small = self._goodput(SMALL_CACHE, size.rates, policies)
        apart = self._goodput(SMALL_CACHE, size.rates, two, EngineType.VLLM)
        endless = self._goodput(ENDLESS_CACHE, size.endless_rates, two)
        ours, flat, lru = (small[policy] for policy in policies)
        what = f"templated: goodput with {ATTAINMENT:g} % attainment in every tier"
        self._report.add(
            Row(what, ours.warm, "requests/s", rival=lru.warm),
            Row("templated: goodput over FCFS + LRU's", _over(ours.warm, lru.warm), "×", at_least=1.3),
            Row("templated: goodput over that without windows", _over(ours.warm, flat.warm), "×"),
            Row("templated: goodput over FCFS + LRU's, cold start counted", _over(ours.cold, lru.cold), "×"),
            Row(
                f"{what}, prefixes read for each answer", apart[PolicyName.CACHEAWARE].warm, "requests/s",
                rival=apart[PolicyName.FCFS_LRU].warm,
            ),
            Row(
                f"{what}, endless cache", endless[PolicyName.CACHEAWARE].warm, "requests/s",
                rival=endless[PolicyName.FCFS_LRU].warm,
            ),
        )  # fmt: skip

    def _goodput(
        self,
        cache: int,
        rates: Sequence[float],
        policies: Sequence[PolicyName],
        engine: EngineType = EngineType.TORCH,
    ) -> Mapping[PolicyName, Goodput]:
        """Medians over the seeds."""
        spec, size = templated_pool(engine), self._size
        setup = Setup(spec, SHORT_STEPS, cache // BLOCK, BLOCK)
        found: dict[PolicyName, list[Goodput]] = {policy: [] for policy in policies}
        for seed in range(size.seeds):
            kept: dict[PolicyName, list[tuple[float, float]]] = {policy: [] for policy in policies}
            for rate in rates:
                requests = _generated("templated", rate, size.warm_up + size.seconds, spec, seed)
                for policy in policies:
                    outcome = self._outcome(setup, policy, requests, f"{rate:g}/s, seed {seed}")
                    kept[policy].append((_attainment(outcome, spec, size.warm_up), _attainment(outcome, spec, 0.0)))
            for policy in policies:
                warm, cold = zip(*kept[policy], strict=True)
                found[policy].append(Goodput(_highest(rates, warm), _highest(rates, cold)))
                told = ", ".join(f"{rate:g}/s {least:.0f} %" for rate, least in zip(rates, warm, strict=True))
                self._report.remarks.append(
                    f"templated, {cache // 1000}k tokens of cache, {engine}, seed {seed}, {policy}: goodput "
                    f"{found[policy][-1].warm:.1f} requests/s; least attainment of a tier at {told}"
                )
        return {
            policy: Goodput(
                statistics.median(each.warm for each in found[policy]),
                statistics.median(each.cold for each in found[policy]),
            )
            for policy in policies
        }

    # -- fairness ------------------------------------------------------------------------------------------------------

    def flooder(self) -> None:
        """A prompt that comes waits for the step that is being computed, and is in the next. Where steps are always
        full of the flooder's prompts no order helps against that, so shorter steps are shown beside.
        """
        self._flood(SHORT_STEPS, target=True)
        self._flood(SHORTER_STEPS, target=False)

    def _flood(self, cost: EngineCost, *, target: bool) -> None:
        spec = parse_spec(BASE | {"tiers": [{"name": "bronze", "quota": {"nominalPercent": 100}}], "sharing": "Tier"})
        setup = Setup(spec, cost, 400_000 // BLOCK, BLOCK)
        rate = 1.5  # ten times as much floods the engine
        calm, flooded = (_generated(name, rate, self._size.seconds, spec, seed=0) for name in ("quiet", "flooder"))
        for policy in (PolicyName.CACHEAWARE, PolicyName.FCFS_LRU):
            alone, beside = (self._outcome(setup, policy, each, "flooder") for each in (calm, flooded))
            before, after = _quiet_p95(alone.served), _quiet_p95(beside.served)
            ours = policy is PolicyName.CACHEAWARE
            what = f"flooder, steps of {cost.max_batched_tokens} tokens, {policy}"
            self._report.add(
                Row(f"{what}: quiet tenants' p95 TTFT over that without", after / before, "×",
                    at_most=1.2 if ours and target else None),
                Row(f"{what}: their p95 TTFT, beside that without", 1000 * after, "ms", rival=1000 * before),
            )  # fmt: skip
            if target and (lag := largest_lag(beside.served, credit=0.0)) is not None:  # no promises: nobody is urgent
                self._report.add(
                    Row(f"{what}: largest service lag over its bound", lag.part, "×", at_most=1.0 if ours else None)
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
        self._progress.start_task(self._all)
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
            self._progress.advance(self._all)


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


def _attainment(outcome: Outcome, spec: CacheAwarePoolSpec, since: float) -> float:
    """Percent of the requests that came since then and got what was promised, in the tier that had least."""
    promises = {tier.name: promise_of(tier) for tier in view_of(spec, terms_of(spec).nominal).tiers}
    least = 100.0
    for name, promise in promises.items():
        mine = [each for each in outcome.served if each.request.tier == name and each.request.at >= since]
        least = min(least, 100 * sum(each.meets(promise) for each in mine) / max(1, len(mine)))
    return least


def _over(one: float, other: float) -> float:
    return one / other if other else float("inf")


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
