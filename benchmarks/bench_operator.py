"""`make bench-operator`: what the operator costs, with many pools on a real API server.

The operator is the real process under the rights of its manifests; nodes, kubelets, engines and sidecars are stand-ins
in another process. There is no rival: no other operator does this job.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.operator_bed import ROOT, Bed, standing
from benchmarks.report import Report, Row
from e2e.cluster import Object
from e2e.control_plane import StartFailed, Unavailable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

REPLICAS = 5
POOLS_A_NAMESPACE = 20
SLOW_SECONDS = 1.5  # just within what the operator waits
SETTLING_SECONDS = 60.0  # a round of rebalancing, and the rest that a silent sidecar gets: what it tells is still news
TIERS: list[Object] = [
    {
        "name": "gold",
        "priority": 100,
        "weight": 4,
        "quota": {"nominalPercent": 50, "borrowingLimitPercent": 50, "lendingLimitPercent": 25},
        "sla": {"timeToFirstToken": "800ms", "attainmentPercent": 95},
    },
    {"name": "silver", "priority": 50, "weight": 2, "quota": {"nominalPercent": 20}},
    {"name": "bronze", "quota": {"nominalPercent": 20}},
]
SPEC: Object = {
    "model": {"name": "tiny", "source": "file:///models/tiny"},
    "engine": {"type": "Torch", "kvCache": {"memory": "64Mi"}},
    "replicas": REPLICAS,
    "tiers": TIERS,
    "defaultTier": "bronze",
    "identity": {"type": "Open"},
    "rebalancing": {"mode": "Off"},
}

CONSOLE = Console(stderr=True)

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Size:
    pools: int
    idle_seconds: float
    edits: int


FULL = Size(pools=200, idle_seconds=300.0, edits=60)
QUICK = Size(pools=10, idle_seconds=8.0, edits=8)


class Bench:
    """The phases, in their order; each adds its rows."""

    def __init__(self, bed: Bed, size: Size, report: Report, progress: Progress) -> None:
        self._bed = bed
        self._size = size
        self._report = report
        self._progress = progress
        self._keys: list[Key] = []

    async def run(self, phases: Iterable[str]) -> None:
        work: dict[str, Callable[[], Awaitable[None]]] = {
            "ready": self.apply_to_ready,
            "off": lambda: self.idle("Off", 2.0),
            "edits": self.edits,
            "rounds": self.rounds,
            "auto": lambda: self.idle("Auto", 35.0),
        }
        for phase in phases:
            await work[phase]()
            self._bed.check()
            if not CONSOLE.is_terminal:
                CONSOLE.print(f"{phase}: done")  # a log has no progress bar

    async def apply_to_ready(self) -> None:
        bed, size = self._bed, self._size
        self._keys = [(f"bench-{number // POOLS_A_NAMESPACE}", f"pool-{number}") for number in range(size.pools)]
        for namespace in sorted({namespace for namespace, _ in self._keys}):
            await bed.make_namespace(namespace)
        await self._until_it_leads()
        bed.audit.since_last()
        cpu, began = bed.operator.cpu_seconds, time.monotonic()
        ready = asyncio.create_task(self._count("apply to Ready", self._settled, 600))
        await asyncio.gather(*(bed.apply(key[0], _pool(key[1])) for key in self._keys))
        await ready
        seconds, cpu = time.monotonic() - began, bed.operator.cpu_seconds - cpu
        writes = bed.audit.since_last()
        self._report.add(
            Row(f"{size.pools} pools of {REPLICAS} replicas, apply to Ready", seconds, "s", at_most=120),
            Row("API writes per pool, apply to Ready", _without_lease(writes) / size.pools, "writes", at_most=25),
            Row("CPU per pool, apply to Ready", 1000 * cpu / size.pools, "ms"),
        )
        self._report.remarks.append(f"writes from apply to Ready: {_in_words(writes)}")

    async def idle(self, mode: str, most_percent: float) -> None:
        """Nothing is asked of any pool."""
        bed, seconds = self._bed, self._size.idle_seconds
        await self._set_mode(mode)
        await self._pass_time("settling", min(SETTLING_SECONDS, seconds))
        bed.audit.since_last()
        cpu, began = bed.operator.cpu_seconds, time.monotonic()
        most_rss = await self._pass_time(f"idle, rebalancing {mode}", seconds)
        share = 100 * (bed.operator.cpu_seconds - cpu) / (time.monotonic() - began)
        writes = bed.audit.since_last()
        self._report.add(
            Row(f"idle, rebalancing {mode}: CPU", share, "% of a core", at_most=most_percent),
            Row(f"idle, rebalancing {mode}: API writes but the Lease", _without_lease(writes), "writes", at_most=0),
            Row(f"idle, rebalancing {mode}: RSS", most_rss, "MiB", at_most=250),
        )
        if _without_lease(writes):
            self._report.remarks.append(f"writes while idle with {mode}: {_in_words(writes)}")

    async def edits(self) -> None:
        """One quota, pool after pool, as the status tells of it."""
        bed, times = self._bed, []
        task = self._progress.add_task("quota changes", total=self._size.edits)
        for number in range(self._size.edits):
            key = self._keys[number % len(self._keys)]
            before = bed.pools[key]["status"]["revision"]
            tiers = copy.deepcopy(bed.pools[key]["spec"]["tiers"])
            tiers[0]["quota"]["nominalPercent"] = 45 if tiers[0]["quota"]["nominalPercent"] == 50 else 50
            began = time.monotonic()
            await bed.patch_spec(key, {"tiers": tiers})
            await bed.wait_for(_in_force(bed, key, before + 1), f"revision {before + 1} of {key[1]}", 60)
            times.append(time.monotonic() - began)
            self._progress.advance(task)
        self._report.add(
            Row("quota change, edit to acknowledged by all 5 sidecars: median", statistics.median(times), "s"),
            Row("quota change, edit to acknowledged by all 5 sidecars: p95", _percentile(times, 95), "s", at_most=3),
        )

    async def rounds(self) -> None:
        """All pools have their round at once: with every sidecar well, then with two that are not."""
        count = len(self._keys) * REPLICAS
        well = await self._round((), {})
        pods = sorted(await self._bed.metrics_read())
        silent, slow = pods[0], pods[-1]
        ill = await self._round((silent,), {slow: SLOW_SECONDS})
        await self._bed.behave()
        self._report.add(
            Row(f"rebalancing round over {count} sidecars", max(well.values()), "s", at_most=10),
            Row(
                f"the same, one silent and one slow ({SLOW_SECONDS:g} s): all the others",
                max(seconds for pod, seconds in ill.items() if pod not in (silent, slow)),
                "s",
                at_most=10,
            ),
            Row("median sidecar, all well", statistics.median(well.values()), "s"),
            Row("median sidecar, one silent and one slow", statistics.median(ill.values()), "s"),
        )

    # -- parts of phases -----------------------------------------------------------------------------------------------

    async def _round(self, silent: tuple[str, ...], slow: dict[str, float]) -> dict[str, float]:
        """Seconds until each sidecar's metrics were read, since the first pool was told to rebalance."""
        bed = self._bed
        await self._set_mode("Off")
        await bed.behave(silent=silent, slow=slow)
        before = {pod: len(read) for pod, read in (await bed.metrics_read()).items()}
        began = time.monotonic()
        await self._patch_mode("Auto")  # and no wait until all is well again: with a silent sidecar it never is
        task = self._progress.add_task("a rebalancing round", total=len(before) - len(silent))
        while True:
            read = {
                pod: times[before[pod]] - began
                for pod, times in (await bed.metrics_read()).items()
                if len(times) > before[pod]
            }
            done = len(read.keys() - set(silent))
            self._progress.update(task, completed=done)
            if done == len(before) - len(silent):
                return read
            if time.monotonic() - began > 120:
                raise RuntimeError(f"a round read {done} of {len(before)} sidecars in 120 s")
            bed.check()
            await asyncio.sleep(0.5)

    async def _until_it_leads(self) -> None:
        """A pool that comes and is looked at: the operator's watches run."""
        while not any("leases" in what for what in self._bed.audit.since_last()):
            self._bed.check()
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)

    async def _set_mode(self, mode: str) -> None:
        await self._patch_mode(mode)
        await self._count(f"rebalancing {mode}", self._settled, 120, quiet=True)

    async def _patch_mode(self, mode: str) -> None:
        bed = self._bed
        wrong = [key for key in self._keys if bed.pools[key]["spec"]["rebalancing"]["mode"] != mode]
        await asyncio.gather(*(bed.patch_spec(key, {"rebalancing": {"mode": mode}}) for key in wrong))

    def _settled(self, key: Key) -> bool:
        pool = self._bed.pools.get(key)
        status = {} if pool is None else pool.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return (
            conditions.get("Ready") == "True"
            and "Reconciling" not in conditions
            and "Stalled" not in conditions
            and pool is not None
            and status.get("observedGeneration") == pool["metadata"]["generation"]
        )

    async def _count(self, what: str, is_so: Callable[[Key], bool], seconds: float, *, quiet: bool = False) -> None:
        task = self._progress.add_task(what, total=len(self._keys), visible=not quiet)

        def all_are() -> bool:
            done = sum(map(is_so, self._keys))
            self._progress.update(task, completed=done)
            return done == len(self._keys)

        await self._bed.wait_for(all_are, what, seconds)

    async def _pass_time(self, what: str, seconds: float) -> float:
        """The operator's largest resident set meanwhile, in MiB."""
        bed, began, most = self._bed, time.monotonic(), 0.0
        task = self._progress.add_task(what, total=seconds)
        while (passed := time.monotonic() - began) < seconds:
            most = max(most, bed.operator.rss_mib)
            self._progress.update(task, completed=round(passed))
            bed.check()
            await asyncio.sleep(min(1.0, seconds - passed))
        self._progress.update(task, completed=seconds)
        return most


def _pool(name: str) -> Object:
    return {
        "apiVersion": "cacheaware.dev/v1alpha1",
        "kind": "CacheAwarePool",
        "metadata": {"name": name},
        "spec": copy.deepcopy(SPEC),
    }


def _in_force(bed: Bed, key: Key, revision: int) -> Callable[[], bool]:
    def is_so() -> bool:
        status: Any = bed.pools[key]["status"]
        types = {each["type"] for each in status["conditions"]}
        return bool(status["revision"] >= revision and not types & {"Reconciling", "Stalled"})

    return is_so


def _without_lease(writes: Counter[str]) -> int:
    return sum(count for what, count in writes.items() if not what.endswith(" leases"))


def _in_words(writes: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in writes.most_common())


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


async def measure(folder: Path, size: Size, report: Report, phases: Iterable[str]) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C: everything that runs is ended
    words = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=CONSOLE) as progress:
        starting = progress.add_task("an API server, a node, the operator", total=None)
        async with standing(folder) as bed:
            progress.update(starting, total=1, completed=1)
            await Bench(bed, size, report, progress).run(phases)
    crd = (ROOT / "crds" / "cacheawarepools.yaml").stat().st_size
    report.add(Row("CRD file", crd / 1000, "kB", at_most=100))


PHASES = ("ready", "off", "edits", "rounds", "auto")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_operator", description="Measures the operator on a real API server.")
    parser.add_argument("--quick", action="store_true", help="few pools and short idle times: two minutes")
    parser.add_argument("--pools", type=int, metavar="N", help=f"how many pools (default: {FULL.pools})")
    parser.add_argument("--idle-seconds", type=float, metavar="S", help="how long each idle time is measured")
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=PHASES,
        default=PHASES,
        metavar="PHASE",
        help=f"some of {', '.join(PHASES)} in this order (ready has to be the first; default: all)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    options = parser.parse_args()
    if options.phases[0] != "ready":
        parser.error("--phases: the first has to be ready, which makes the pools")
    size = QUICK if options.quick else FULL
    size = Size(options.pools or size.pools, options.idle_seconds or size.idle_seconds, size.edits)
    report = Report("operator", ("cacheaware", "kopf", "aiohttp", "pydantic"), quick=size != FULL)
    folder = Path(tempfile.mkdtemp(prefix="bench-operator-"))
    keep = options.keep
    try:
        asyncio.run(measure(folder, size, report, options.phases))
    except Unavailable as reason:
        print(f"bench-operator: {reason}", file=sys.stderr)
        return 1
    except (RuntimeError, StartFailed) as fault:
        keep = True
        print(f"bench-operator: {fault}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("bench-operator: interrupted; nothing is left running", file=sys.stderr)
        return 130
    finally:
        if keep:
            print(f"bench-operator: logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
