"""What every benchmark ends with: a table for people and `benchmarks/out/<name>.json`, with versions and machine.

A row has what was measured, our figure, a rival's where there is one, and a target where one was set. A figure that
misses its target is a row like any other: a benchmark fails only if it could not measure.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).resolve().parent / "out"
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    ours: float
    unit: str
    rival: float | None = None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours in parts of the rival's."""
        return self.ours / self.rival if self.rival else None

    @property
    def target(self) -> str | None:
        words = [
            f"{sign} {limit:g}" for sign, limit in (("≥", self.at_least), ("≤", self.at_most)) if limit is not None
        ]
        return " and ".join(words) or None

    @property
    def met(self) -> bool | None:
        """None where no target was set."""
        if self.target is None:
            return None
        return (self.at_most is None or self.ours <= self.at_most) and (
            self.at_least is None or self.ours >= self.at_least
        )

    def plain(self) -> dict[str, object]:
        return {
            "what": self.what,
            "ours": self.ours,
            "rival": self.rival,
            "ratio": self.ratio,
            "unit": self.unit,
            "target": self.target,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    processor: str
    cores: int
    memory_gib: float
    system: str
    load_before: float  # of the last minute: what else ran

    @classmethod
    def here(cls) -> Machine:
        return cls(
            _processor(),
            psutil.cpu_count() or 1,
            round(psutil.virtual_memory().total / _GIB, 1),
            platform.platform(terse=True),
            round(os.getloadavg()[0], 2),
        )


@dataclass(slots=True)
class Report:
    """Made before the first measurement, so that it knows what the machine was doing then."""

    name: str
    packages: Sequence[str]  # whose versions matter
    versions: dict[str, str] = field(default_factory=dict)  # of what is no package
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    machine: Machine = field(default_factory=Machine.here)

    def add(self, *rows: Row) -> None:
        self.rows += rows

    def finish(self) -> Path:
        """Print the table, write the file."""
        versions = {"python": platform.python_version()} | {each: _version(each) for each in self.packages}
        content = {
            "rows": [row.plain() for row in self.rows],
            "versions": versions | self.versions,
            "command": " ".join(["python", *sys.orig_argv[1:]]),
            "machine": asdict(self.machine) | {"load_after": round(os.getloadavg()[0], 2)},
            "quick": self.quick,
            "remarks": self.remarks,
        }
        OUT.mkdir(exist_ok=True)
        file = OUT / f"{self.name}.json"
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        console = Console()
        if not console.is_terminal:
            console = Console(width=120)  # of a log, no line is to be folded more than needed
        console.print(self._table())
        for remark in self.remarks:
            console.print(f"- {remark}")
        console.print(f"Written to {file}")
        return file

    def _table(self) -> Table:
        table = Table(title=f"{self.name}{' (quick)' if self.quick else ''}", title_justify="left")
        table.add_column("what", overflow="fold")
        for heading in ("ours", "rival", "ratio"):
            table.add_column(heading, justify="right")
        for heading in ("unit", "target", "met"):
            table.add_column(heading)
        for row in self.rows:
            met = "" if row.met is None else "yes" if row.met else "no"
            figures = (_figure(row.ours), _figure(row.rival), _figure(row.ratio))
            table.add_row(row.what, *figures, row.unit, row.target or "", met)
        return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
