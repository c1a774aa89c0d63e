"""The `cacheaware` command. Each subcommand imports what it needs when it runs, so that `--help` is quick and the
command works with only the extras that the subcommand needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:
    sys.exit("cacheaware: the command line is not installed: pip install 'cacheaware[cli]'")

app = typer.Typer(
    name="cacheaware",
    help="Spend an LLM engine's KV cache on the right requests: priority tiers, KV quotas and SLAs in one object.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

# What tells whether an extra is installed: a distribution that only this extra brings.
_EXTRAS = {
    "operator": ("aiohttp",),
    "sidecar": ("aiohttp", "prometheus_client"),
    "engine": ("torch", "transformers"),
    "cli": ("rich", "psutil"),
}


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def _require(*extras: str) -> None:
    """End with the command that installs what is missing, instead of with an import error."""
    missing = [extra for extra in extras if any(importlib.util.find_spec(module) is None for module in _EXTRAS[extra])]
    if missing:
        _fail(f"cacheaware: this needs more of cacheaware: pip install 'cacheaware[{','.join(missing)}]'")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cacheaware {importlib.metadata.version('cacheaware')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command(no_args_is_help=True)
def validate(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pool files; [bold]-[/bold] reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="The same as an argument.", show_default=False)
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Check what [bold]cacheaware up[/bold] needs: all Secrets and ConfigMaps in the file too."
        ),
    ] = False,
) -> None:
    """Check pool files and say everything that is wrong with them, without running anything.

    Secrets and ConfigMaps that are not in the file are listed as expected in the cluster.

    Exit code 0 if all are good, 1 otherwise.

    [bold]cacheaware validate -f pool.yaml[/bold]

    [bold]kustomize build . | cacheaware validate -[/bold]
    """
    from cacheaware.validate import validate as check

    paths = [*(files or ()), *(file or ())]
    if not paths:
        _fail("cacheaware validate: name at least one file: cacheaware validate -f pool.yaml", code=2)
    raise typer.Exit(check(paths, local=local))


@app.command(no_args_is_help=True)
def up(
    file: Annotated[
        Path,
        typer.Option("--file", "-f", help="The pool, and in the same file its Secrets and ConfigMaps.", dir_okay=False),
    ],
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first replica, one more for each further one; 0: any free."),
    ] = 8000,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where engines and sidecars write their output; by default beside the pool's state, in "
            "$XDG_STATE_HOME/cacheaware.",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            help="With [bold]engine.type: VLLM[/bold]: a Python that has vLLM; by default the one that runs this.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a pool on this machine: gets the model, starts an engine and a sidecar per replica, prints the URL.

    Edits of the file apply while it runs: tiers, quotas, SLAs, keys, replicas. What needs a restart (the model, the
    engine's flags and cache) is told and left as it was. Ctrl-C lets running requests finish and leaves nothing behind;
    a second Ctrl-C ends everything at once.

    [bold]cacheaware up -f pool.yaml[/bold]

    [bold]cacheaware up -f pool.yaml --port 9000 --log-dir ./logs[/bold]
    """
    _require("cli", "operator", "sidecar", "engine")
    from rich.console import Console

    from cacheaware.display import display
    from cacheaware.local_pool import Options
    from cacheaware.up import main as run
    from cacheaware_operator.local_fleet import Programs

    shown = display(Console(), Console(stderr=True))
    programs = Programs() if vllm_python is None else Programs(vllm_python=str(vllm_python.absolute()))
    raise typer.Exit(run(file, Options(port=port, logs=log_dir, programs=programs), shown))


@app.command()
def status(
    pool: Annotated[
        str | None, typer.Argument(help="Name of the pool; may be left out when only one runs.", show_default=False)
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace of the pool (default: the context's, else default).",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", help="Show a pool of the cluster of this kubeconfig context.", show_default=False),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="table for people, the rest for programs.")] = (
        Output.TABLE
    ),
) -> None:
    """Show a running pool as its object's status would in a cluster: tiers against quotas, conditions, parts.

    Exit code 1 if there is no such pool.

    [bold]cacheaware status[/bold]

    [bold]cacheaware status chat -o json | jq .status.tiers[/bold]

    [bold]cacheaware status chat -n models --context production[/bold]
    """
    _require("cli", "operator")
    import asyncio

    from cacheaware import pool_status, state_file

    state = None
    try:
        if context is not None:
            from cacheaware import cluster_status

            shown = cluster_status.find(context, namespace, pool)
            current = cluster_status.read_status(shown)
        else:
            state = pool_status.find(state_file.state_folder(), namespace or "default", pool)
            current = asyncio.run(pool_status.current_status(state))
            shown = pool_status.as_object(state, current)
    except pool_status.NotRunning as error:
        _fail(f"cacheaware status: {error}")
    if output is Output.JSON:
        typer.echo(pool_status.to_json(shown))
    elif output is Output.YAML:
        typer.echo(pool_status.to_yaml(shown))
    else:
        from rich.console import Console

        from cacheaware import status_table

        console = Console(highlight=False)
        name = f"{shown['metadata']['namespace']}/{shown['metadata']['name']}"
        for part in status_table.render(name, current, state):
            console.print(part, soft_wrap=isinstance(part, str))


@app.command()
def top(
    pool: Annotated[
        str | None, typer.Argument(help="Name of the pool; may be left out when only one runs.", show_default=False)
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the pool.")] = "default",
    url: Annotated[
        str | None,
        typer.Option(help="Instead of a local pool: the control side of one sidecar.", show_default=False),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="With --url: its control token.", envvar="CACHEAWARE_TOKEN", show_default=False),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a running pool: tiers, queues, KV blocks against quotas, hits, latencies. Ctrl-C ends it.

    Exit code 1 if the pool does not run here, or with --once if no sidecar answers.

    [bold]cacheaware top[/bold]

    [bold]cacheaware top --url http://127.0.0.1:9400 --once[/bold]
    """
    _require("cli", "operator")
    from rich.console import Console

    from cacheaware import pool_status, state_file
    from cacheaware import top as watching

    if url is not None and not token:
        _fail("cacheaware top: --url needs the sidecar's control token: --token, or CACHEAWARE_TOKEN", code=2)
    try:
        if url is not None and token:
            source = watching.from_url(url, token)
        else:
            source = watching.from_state(lambda: pool_status.find(state_file.state_folder(), namespace, pool))
        code = watching.main(source, Console(highlight=False), interval=interval, just_once=once)
    except pool_status.NotRunning as error:
        _fail(f"cacheaware top: {error}")
    raise typer.Exit(code)


@app.command()
def explain(
    pool: Annotated[
        str | None, typer.Argument(help="Name of the pool; may be left out when only one runs.", show_default=False)
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the pool.")] = "default",
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many requests.")] = 20,
    lines: Annotated[
        bool, typer.Option("--lines", help="A JSON object for each request instead: what `cacheaware replay` reads.")
    ] = False,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Instead of the last requests: what would happen to this one now, a body as clients send it; "
            "[bold]-[/bold] reads standard input.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="With --request: the API key that it would come with.", envvar="CACHEAWARE_KEY", show_default=False
        ),
    ] = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(help="Instead of a running pool: a pool's file on this trace.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="With --trace: the pool's file.", show_default=False)
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(help="With --trace: tokens that the KV cache holds: 500k, 3M.", show_default=False),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACE=TIER", help="With --trace: as replay takes it.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option(help="With --trace: what a step costs, as replay takes it.")] = "h200-8b",
    until: Annotated[
        float | None, typer.Option(help="With --trace: only its first so many seconds.", show_default=False)
    ] = None,
) -> None:
    """Show how a running pool treated its last requests, why, and which line of its file decides that.

    With [bold]--request[/bold] it shows what would happen to a request that came now: nothing is sent to the engine,
    and asking changes nothing.

    With [bold]--trace[/bold] it shows which promises a pool's file would break on a trace, and which of its lines is
    why: the same code in virtual time, as [bold]cacheaware replay[/bold] runs it.

    Exit code 1 if the pool does not run here, no sidecar answers, or a file cannot be read.

    [bold]cacheaware explain[/bold]

    [bold]cacheaware explain --last 1000 --lines > log.jsonl[/bold]

    [bold]cacheaware explain --request body.json --key $KEY[/bold]

    [bold]cacheaware explain --trace log.jsonl -f pool.yaml --capacity 1M[/bold]
    """
    _require("cli", "operator", "sidecar")
    import asyncio

    from rich.console import Console

    from cacheaware import explain as explaining
    from cacheaware import pool_status, state_file

    if trace:
        if file is None or capacity is None:
            _fail("cacheaware explain: --trace needs the pool's file and its cache: -f pool.yaml --capacity 1M", code=2)
        from cacheaware.replay import explanation
        from cacheaware.replay.command import Options

        options = Options(trace, file, capacity, tiers=tier or (), engine=engine, until=until)
        raise typer.Exit(explanation.main(options, Console(), Console(stderr=True)))
    if request is not None:
        _explain_request(pool, namespace, request, key, as_lines=lines)
        return
    try:
        state = pool_status.find(state_file.state_folder(), namespace, pool)
        decisions = asyncio.run(explaining.last_decisions(state, last))
    except pool_status.NotRunning as error:
        _fail(f"cacheaware explain: {error}")
    if lines:
        typer.echo(explaining.to_lines(decisions))
    elif decisions:
        Console(highlight=False).print(explaining.table(decisions, explaining.PoolLines(Path(state.file))))
    else:
        typer.echo("There was no request yet.")


def _explain_request(pool: str | None, namespace: str, file: str, key: str | None, *, as_lines: bool) -> None:
    import asyncio

    from rich.console import Console

    from cacheaware import foresee, pool_status, state_file
    from cacheaware.explain import PoolLines

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        path, body = foresee.request_of(text)
        state = pool_status.find(state_file.state_folder(), namespace, pool)
        answers = asyncio.run(foresee.ask_all(state, path, body, key))
    except (OSError, UnicodeDecodeError, foresee.BadRequestFile) as error:
        _fail(f"cacheaware explain: --request: {error}", code=2)
    except pool_status.NotRunning as error:
        _fail(f"cacheaware explain: {error}")
    if as_lines:
        typer.echo(foresee.to_lines(answers))
    else:
        Console(highlight=False).print(foresee.table(answers, PoolLines(Path(state.file))))


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition of a pool, for the release that is installed here.

    [bold]cacheaware crd | kubectl apply -f -[/bold]
    """
    from cacheaware_api import crdgen

    typer.echo(crdgen.render(), nl=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Ask a real model one question, then drive the same mixed load with KV quotas off and on (about 4 minutes).

    [bold]cacheaware demo[/bold]

    [bold]cacheaware demo --help[/bold] lists its options.
    """
    _require("cli", "operator", "sidecar", "engine")
    from cacheaware.demo import demo_command

    command = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    command.command()(demo_command)
    command(context.args, prog_name="cacheaware demo")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def replay(context: typer.Context) -> None:
    """Run request traces through a pool's own code in virtual time, beside other policies: no GPU, no cluster.

    [bold]cacheaware replay chat.jsonl agents.jsonl -f pool.yaml --tier chat=gold --capacity 3M[/bold]

    [bold]cacheaware replay --help[/bold] lists its options.
    """
    _require("cli", "operator", "sidecar")
    from cacheaware.replay.arguments import replay_command

    command = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    command.command(no_args_is_help=True)(replay_command)
    command(context.args, prog_name="cacheaware replay")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
