"""`cacheaware demo`: one question, then the same mixed load with KV quotas off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    out: Annotated[Path, typer.Option(help="Where the results go: demo.json and blocks.png.", file_okay=False)] = Path(
        "demo-out"
    ),
) -> None:
    """Ask a real model one question, then drive the same mixed load with KV quotas off and on (about 4 minutes).

    Gold holds conversations, silver asks about documents, bronze floods the pool with one-shot prompts, in a cache too
    small for all. The load, its sizes and its seed are in the package (demo/load.yaml), the pool too (demo/pool.yaml).
    Exit code 0 if it could measure and every request was answered.

    [bold]cacheaware demo[/bold]

    [bold]cacheaware demo --out results[/bold]
    """
    from rich.console import Console

    from cacheaware.demo.run import main
    from cacheaware.display import display

    console = Console()
    raise typer.Exit(main(out, display(console, Console(stderr=True)), console))
