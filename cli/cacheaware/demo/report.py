"""What the demo found, per tier and kind of run, and one sentence on what quotas changed. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheaware.demo.drive import Served
from cacheaware_api import wire


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks used by each owner (tiers and `public`) at one moment, in seconds from the run's start."""

    at: float
    used: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load: `kind` is alone, off or on."""

    kind: str
    seconds: float
    served: Sequence[Served]
    samples: Sequence[Sample]
    nominal: Mapping[str, int]  # tier -> blocks guaranteed in this run
    capacity: int
    held: Sequence[wire.Decision] = ()  # those that waited in the pool for company


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier over all runs of one kind, without openings. Seconds, percent, blocks; None where nothing was served."""

    tier: str
    kind: str
    requests: int
    failed: int
    ttft_p50: float | None
    ttft_p95: float | None
    hit_percent: float | None
    used_blocks_mean: float
    used_blocks_max: int
    nominal_blocks: int
    attainment_percent: float | None
    output_tokens_per_second: float


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile, so that it is a value that somebody really saw."""
    if not values:
        return None
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(0, rank - 1)]


def tier_figures(runs: Sequence[Run], kind: str, tier: str, sla_ttft: float | None) -> TierFigures:
    chosen = [run for run in runs if run.kind == kind]
    mine = [served for run in chosen for served in run.served if served.tier == tier and not served.opening]
    good = [served for served in mine if served.error is None]
    times = [served.time_to_first_token for served in good if served.time_to_first_token is not None]
    used = [sample.used.get(tier, 0) for run in chosen for sample in run.samples]
    prompt_tokens = sum(served.prompt_tokens for served in good)
    met = sum(time <= sla_ttft for time in times) if sla_ttft is not None else None
    return TierFigures(
        tier=tier,
        kind=kind,
        requests=len(good),
        failed=len(mine) - len(good),
        ttft_p50=percentile(times, 50),
        ttft_p95=percentile(times, 95),
        hit_percent=100 * sum(s.cached_tokens for s in good) / prompt_tokens if prompt_tokens else None,
        used_blocks_mean=statistics.fmean(used) if used else 0.0,
        used_blocks_max=max(used, default=0),
        nominal_blocks=max((run.nominal.get(tier, 0) for run in chosen), default=0),
        attainment_percent=100 * met / len(mine) if met is not None and mine else None,
        output_tokens_per_second=sum(s.output_tokens for s in good) / sum(run.seconds for run in chosen),
    )


@dataclass(frozen=True, slots=True)
class Company:
    """Requests that waited until the prompt that has the same start was computed, and what that brought them."""

    requests: int
    held_ms: float | None  # median
    hit_percent: float | None

    @classmethod
    def of(cls, decisions: Sequence[wire.Decision]) -> Company:
        ready = [one for one in decisions if one.flush_reason == "prefix-ready" and one.prompt_tokens]
        prompts = sum(one.prompt_tokens or 0 for one in ready)
        return cls(
            requests=len(ready),
            held_ms=statistics.median(one.hold_ms for one in ready) if ready else None,
            hit_percent=100 * sum(one.hit_tokens or 0 for one in ready) / prompts if prompts else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    question: str
    answer: str
    figures: Sequence[TierFigures]
    runs: Sequence[Run]

    def of(self, kind: str, tier: str) -> TierFigures:
        return next(figure for figure in self.figures if (figure.kind, figure.tier) == (kind, tier))

    def total_output(self, kind: str) -> float:
        return sum(figure.output_tokens_per_second for figure in self.figures if figure.kind == kind)

    def sentence(self) -> str:
        off, on, alone = self.of("off", "gold"), self.of("on", "gold"), self.of("alone", "gold")
        throughput = 100 * (self.total_output("on") / self.total_output("off") - 1)
        return (
            f"With quotas gold's prompts were {_percent(on.hit_percent)} cached instead of {_percent(off.hit_percent)} "
            f"({_percent(alone.hit_percent)} when gold is alone), its first token came after {_seconds(on.ttft_p50)} "
            f"instead of {_seconds(off.ttft_p50)} (p95 {_seconds(on.ttft_p95)} instead of {_seconds(off.ttft_p95)}), "
            f"and all tiers together wrote {abs(throughput):.0f} % {'more' if throughput >= 0 else 'fewer'} tokens a "
            "second."
        )

    def company(self) -> Company:
        return Company.of([one for run in self.runs for one in run.held])

    def company_sentence(self) -> str:
        found = self.company()
        if not found.requests:
            return "No request waited for another one with the same start."
        requests = "1 request" if found.requests == 1 else f"{found.requests} requests"
        return (
            f"Silver's readers share documents: {requests} waited {found.held_ms:.0f} ms (median) until theirs was "
            f"computed once, and found {_percent(found.hit_percent)} of their prompts cached."
        )

    def checks(self) -> list[tuple[str, bool]]:
        """What the demo promises, each with whether this machine showed it."""
        off, on, alone = self.of("off", "gold"), self.of("on", "gold"), self.of("alone", "gold")
        hit_on, hit_off, hit_alone = on.hit_percent or 0, off.hit_percent or 0, alone.hit_percent or 0
        company = self.company()
        nobody_waited = not company.requests  # where the engine is fast enough, nobody has to
        return [
            ("gold's hit % with quotas is at least 60", hit_on >= 60),
            ("gold's hit % is at least 3 times that without", hit_on >= 3 * hit_off),
            ("gold's hit % is at least 0.8 of what gold gets alone", hit_on >= 0.8 * hit_alone),
            ("gold's median time to first token is lower", (on.ttft_p50 or 0) < (off.ttft_p50 or 0)),
            ("gold's p95 time to first token is lower", (on.ttft_p95 or 0) < (off.ttft_p95 or 0)),
            ("total output is at most 5 % lower", self.total_output("on") >= 0.95 * self.total_output("off")),
            (
                "who waited for a common prefix found at least half cached",
                nobody_waited or (company.hit_percent or 0) >= 50,
            ),
            ("no request failed", all(figure.failed == 0 for figure in self.figures)),
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "answer": self.answer,
            "sentence": self.sentence(),
            "company": dataclasses.asdict(self.company()),
            "checks": [{"what": what, "met": met} for what, met in self.checks()],
            "figures": [dataclasses.asdict(figure) for figure in self.figures],
            "runs": [
                {
                    "kind": run.kind,
                    "seconds": run.seconds,
                    "capacity": run.capacity,
                    "nominal": dict(run.nominal),
                    "served": [dataclasses.asdict(served) for served in run.served],
                    "samples": [{"at": sample.at, "used": dict(sample.used)} for sample in run.samples],
                }
                for run in self.runs
            ],
        }


def report(question: str, answer: str, runs: Sequence[Run], sla_ttft: Mapping[str, float | None]) -> Report:
    """Judge finished runs; `sla_ttft` maps each tier to its promised seconds to the first token."""
    kinds = sorted({run.kind for run in runs}, key=("off", "on", "alone").index)
    figures = [
        tier_figures(runs, kind, tier, promised)
        for kind in kinds
        for tier, promised in sla_ttft.items()
        if any(served.tier == tier for run in runs if run.kind == kind for served in run.served)
    ]
    return Report(question, answer, figures, runs)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} %"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


KIND_TITLES: Mapping[str, str] = {"off": "quotas off", "on": "quotas on", "alone": "gold alone"}
COLUMNS = ("quotas", "tier", "requests", "TTFT p50", "p95", "hit", "used/nominal", "in SLA", "tokens/s")


def rows(report: Report) -> list[tuple[str, ...]]:
    """The table that is printed, one row per kind of run and tier, under `COLUMNS`."""
    return [
        (
            "on, alone" if figure.kind == "alone" else figure.kind,
            figure.tier,
            f"{figure.requests}" + (f" ({figure.failed} failed)" if figure.failed else ""),
            _seconds(figure.ttft_p50),
            _seconds(figure.ttft_p95),
            _percent(figure.hit_percent),
            f"{figure.used_blocks_mean:.0f}/{figure.nominal_blocks}",
            _percent(figure.attainment_percent),
            f"{figure.output_tokens_per_second:.1f}",
        )
        for figure in report.figures
    ]
