"""`cacheaware replay`: reads what the user names, runs the comparison, shows and writes what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cacheaware.replay import picture
from cacheaware.replay.comparison import Comparison, compare
from cacheaware.replay.engine_cost import engine_cost
from cacheaware.replay.errors import ReplayError
from cacheaware.replay.policies import PolicyName, ordered
from cacheaware.replay.report import render, to_json
from cacheaware.replay.requests import Mapped, Request, merged
from cacheaware.replay.simulation import Setup
from cacheaware.replay.trace import Trace
from cacheaware.replay.trace_formats import TraceFile, trace_file
from cacheaware.replay.virtual_operator import view_of
from cacheaware.replay.workloads import PREFIX, Scale, workload
from cacheaware.validate import render as render_problem
from cacheaware.validate import validate_file
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.v1alpha1 import CacheAwarePoolSpec
from cacheaware_operator.rebalance_terms import terms_of

BLOCK_SIZE = 16  # tokens, where no trace has blocks of its own
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    traces: Sequence[str]
    pool: Path
    capacity: str
    tiers: Sequence[str] = ()
    policies: Sequence[PolicyName] = (PolicyName.CACHEAWARE,)
    baselines: Sequence[PolicyName] = ()
    engine: str = "h200-8b"
    block_size: int | None = None
    rate: float = 1.0
    until: float | None = None
    arrivals: float = 4.0
    seconds: float = 600.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that is needed, read and checked."""

    setup: Setup
    requests: Sequence[Request]
    notes: Sequence[str]


def read_or_tell(command: str, options: Options, console: Console, errors: Console) -> Inputs | None:
    """What `read` reads, with its notes said; None once it was said why it cannot be read."""
    try:
        inputs = read(options)
    except (ReplayError, OSError) as error:
        errors.print(f"cacheaware {command}: {error}", highlight=False, soft_wrap=True, markup=False)
        return None
    for note in inputs.notes:
        console.print(f"Note: {note}", highlight=False, markup=False)
    return inputs


def main(options: Options, out: Path, console: Console, errors: Console) -> int:
    inputs = read_or_tell("replay", options, console, errors)
    if inputs is None:
        return 1
    comparison = run(inputs, ordered([*options.policies, *options.baselines]), errors)
    console.print(render(comparison), highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    described = {
        "traces": list(options.traces),
        "rate": options.rate,
        "seed": options.seed,
        "notes": list(inputs.notes),
    }
    (out / "replay.json").write_text(json.dumps(to_json(comparison, described), indent=1), encoding="utf-8")
    picture.draw(comparison, out / "replay.png")
    console.print(f"Left for you: {out / 'replay.json'} and {out / 'replay.png'}", highlight=False, markup=False)
    return 0


def run(inputs: Inputs, policies: Sequence[PolicyName], console: Console) -> Comparison:
    columns = (TextColumn("{task.description:<13}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bars: dict[PolicyName, TaskID] = {
            policy: progress.add_task(policy, total=len(inputs.requests), start=False)
            for policy in policies
            if policy is not PolicyName.BELADY
        }

        def told(policy: PolicyName, done: int) -> None:
            if not done:
                progress.start_task(bars[policy])
            progress.update(bars[policy], completed=done)

        return compare(inputs.setup, inputs.requests, policies, told)


# -- inputs ------------------------------------------------------------------------------------------------------------


def read(options: Options) -> Inputs:
    """Raises `ReplayError` with the option or the file that is wrong."""
    spec = _pool(options.pool)
    tiers = [tier.name for tier in spec.tiers]
    files = {name: trace_file(Path(name)) for name in options.traces if not name.startswith(PREFIX)}
    block_size = _block_size(options.block_size, list(files.values()))
    if options.rate <= 0:
        raise ReplayError(f"--rate must be above 0, got {options.rate:g}")
    scale = Scale(options.arrivals, options.seconds, tiers, block_size, options.seed)
    traces = [
        files[name].read(block_size, options.seed) if name in files else workload(name, scale)
        for name in options.traces
    ]
    if options.until is not None:
        traces = [trace.until(options.until) for trace in traces]
        for trace in traces:
            if not trace.requests:
                raise ReplayError(f"--until {options.until:g}: {trace.name} has no request by then")
    requests = merged(
        _mapped(traces, options.tiers), view_of(spec, terms_of(spec).nominal), rate=options.rate, seed=options.seed
    )
    capacity = tokens(options.capacity) // block_size
    if capacity < 1:
        raise ReplayError(f"--capacity {options.capacity}: less than a block of {block_size} tokens")
    notes = [note for trace in traces for note in trace.notes]
    if spec.public_prefixes:
        notes.append(f"public prefixes are text, and traces have none: their {spec.public_percent} % stay empty")
    return Inputs(Setup(spec, engine_cost(options.engine), capacity, block_size), requests, notes)


def tokens(text: str) -> int:
    """`3M` is three million."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        raise ReplayError(f"--capacity {text!r}: give the tokens that the cache holds, as 500k, 3M or 1000000")
    return int(float(found[1]) * _FACTORS[found[2].lower()])


def _pool(path: Path) -> CacheAwarePoolSpec:
    try:
        return validate_file(path).pool.spec
    except ObjectInvalid as error:
        raise ReplayError(
            "the pool file is not valid:\n" + "\n".join(render_problem(path, p) for p in error.problems)
        ) from None


def _block_size(wanted: int | None, files: Sequence[TraceFile]) -> int:
    own = [file.block_size for file in files if file.block_size is not None]
    if wanted is not None:
        if wanted < 1:
            raise ReplayError(f"--block-size must be at least 1, got {wanted}")
        return wanted
    return max(own, default=BLOCK_SIZE)


def _mapped(traces: Sequence[Trace], tiers: Sequence[str]) -> list[Mapped]:
    known = {trace.name for trace in traces}
    chosen: dict[str, str] = {}
    for each in tiers:
        name, equals, tier = each.rpartition("=")
        if not equals or not tier:
            raise ReplayError(f"--tier {each}: write TRACE=TIER")
        if name not in known:
            raise ReplayError(f"--tier {each}: there is no trace {name!r}; there are {', '.join(sorted(known))}")
        chosen[name] = tier
    return [Mapped(trace, chosen.get(trace.name)) for trace in traces]
