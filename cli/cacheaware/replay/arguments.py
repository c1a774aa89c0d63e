"""The command line of `cacheaware replay`: its options, and the help that teaches them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheaware.replay.comparison import BASELINES
from cacheaware.replay.engine_cost import DEFAULT_ENGINE, ENGINES
from cacheaware.replay.policies import PolicyName
from cacheaware.replay.workloads import PREFIX, WORKLOADS

_POLICIES = ", ".join(PolicyName)


def replay_command(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE…",
            help="Trace files (Mooncake, WEKA, Azure, or the explain log of a pool; the format is found out), or "
            f"generated workloads: {', '.join(PREFIX + name for name in WORKLOADS)}.",
            show_default=False,
        ),
    ],
    pool: Annotated[
        Path, typer.Option("--pool", "-f", help="The pool file: tiers, quotas, SLAs, rebalancing.", show_default=False)
    ],
    capacity: Annotated[str, typer.Option(help="Tokens that the KV cache holds: 500k, 3M.", show_default=False)],
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACE=TIER",
            help="Which tier a trace's requests are of, by the file's name up to its first dot. Else the tier that the "
            "trace tells, else the pool's defaultTier.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[PolicyName] | None,
        typer.Option(help=f"What to run: {_POLICIES}. [default: cacheaware]", show_default=False),
    ] = None,
    baseline: Annotated[
        list[PolicyName] | None,
        typer.Option(
            help=f"What to run beside it, any of the same. [default: {', '.join(BASELINES)}]", show_default=False
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help=f"What a step costs: {', '.join(ENGINES)}, or a YAML file with an engine's figures.")
    ] = DEFAULT_ENGINE,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens a block; a multiple of the traces' own. [default: the largest of the traces']",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="How many times faster than in the trace requests arrive.")] = 1.0,
    until: Annotated[
        float | None, typer.Option(help="Only the first so many seconds of every trace.", show_default=False)
    ] = None,
    arrivals: Annotated[float, typer.Option(help="Generated workloads: requests a second.")] = 4.0,
    seconds: Annotated[float, typer.Option(help="Generated workloads: how long they last.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of generated workloads, and of what a trace leaves open.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for replay.json and replay.png.", file_okay=False)] = Path(
        "replay-out"
    ),
) -> None:
    """Run request traces through a pool's own code in virtual time, beside other policies. No GPU, no cluster.

    Scheduler, prefix index, block accounting and rebalancer are those of a running pool; only the engine is a model of
    what its steps cost. The same command with the same seed gives the same figures.

    [bold]Would these quotas do better than one LRU?[/bold] Two traces, a tier each, a cache of three million tokens:

    cacheaware replay chat.jsonl agents.jsonl -f pool.yaml --tier chat=gold --tier agents=bronze --capacity 3M

    [bold]What did yesterday's traffic want?[/bold] Your own pool's log, on a cache twice as large:

    cacheaware replay explain.jsonl -f pool.yaml --capacity 2M --engine cpu-135m

    [bold]When does it break?[/bold] Templated prompts at eight requests a second, with the window and without:

    cacheaware replay @templated -f pool.yaml --capacity 200k --arrivals 8 --baseline no-window --baseline fcfs-lru
    """
    from rich.console import Console

    from cacheaware.replay.command import Options, main

    options = Options(
        traces=traces,
        pool=pool,
        capacity=capacity,
        tiers=tier or (),
        policies=policy or (PolicyName.CACHEAWARE,),
        baselines=BASELINES if baseline is None else baseline,
        engine=engine,
        block_size=block_size,
        rate=rate,
        until=until,
        arrivals=arrivals,
        seconds=seconds,
        seed=seed,
    )
    raise typer.Exit(main(options, out, Console(), Console(stderr=True)))
