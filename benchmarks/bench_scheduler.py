"""`make bench-scheduler`: what the scheduler's decisions cost, and what they are worth on a real engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import scheduler_decisions, scheduler_live
from benchmarks.report import Report, Row
from rich.console import Console

CONSOLE = Console(stderr=True)
PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "decisions": scheduler_decisions.measure,
    "live": scheduler_live.measure,
    "hints": scheduler_live.measure_hints,
}
USUAL = ("decisions", "live")  # hints are off by default: measured when asked for


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_scheduler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most two minutes, for CI: rougher figures")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part of it; hints only run so")
    arguments = parser.parse_args()
    report = Report("scheduler", ["cacheaware"], quick=arguments.quick)
    for part, run in PARTS.items():
        if part == arguments.only or (arguments.only is None and part in USUAL):
            CONSOLE.print(f"measuring: {part} …")
            report.add(*run(arguments.quick))
    report.finish()


if __name__ == "__main__":
    main()
