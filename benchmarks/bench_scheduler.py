"""`make bench-scheduler`: what the scheduler's decisions cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks import scheduler_decisions
from benchmarks.report import Report, Row
from rich.console import Console

CONSOLE = Console(stderr=True)
PARTS: dict[str, Callable[[bool], list[Row]]] = {"decisions": scheduler_decisions.measure}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_scheduler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="at most two minutes, for CI: rougher figures")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part of it")
    arguments = parser.parse_args()
    report = Report("scheduler", ["cacheaware"], quick=arguments.quick)
    for part, run in PARTS.items():
        if arguments.only in (None, part):
            CONSOLE.print(f"measuring: {part} …")
            report.add(*run(arguments.quick))
    report.finish()


if __name__ == "__main__":
    main()
