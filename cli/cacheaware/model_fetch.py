"""Get a pool's model before its engines start, in a process of its own, telling how far it is.

A process, because fetching may convert a model and loads what engines load for it, which `cacheaware up` has no use for
afterwards; and because it can be ended at any moment. It is tied to us as engines are.

    python -m cacheaware.model_fetch SOURCE

prints JSON lines: `{"text": …, "fraction": …}` as it goes, at last `{"folder": …}`, or `{"error": …}` and exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cacheaware_operator import tether

OnProgress = Callable[[str, float | None], None]

_LONGEST_LINE = 1024 * 1024


class ModelUnavailable(Exception):
    """The model cannot be had; the text says why."""


async def fetch_model(
    source: str, on_progress: OnProgress, environment: Mapping[str, str] = os.environ, program: str = __name__
) -> Path:
    """The folder of the model; raises `ModelUnavailable`. Cancelled, it leaves no process and nothing half-made."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
        *(sys.executable, "-P", "-m", program, source),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
        limit=_LONGEST_LINE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    try:
        folder: Path | None = None
        async for line in process.stdout:
            message = _decoded(line)
            if "folder" in message:
                folder = Path(str(message["folder"]))
            elif "error" in message:
                raise ModelUnavailable(str(message["error"]))
            elif "text" in message:
                fraction = message.get("fraction")
                on_progress(str(message["text"]), fraction if isinstance(fraction, float) else None)
        code = await process.wait()
        if folder is None:
            said = (await errors).decode(errors="replace").strip().splitlines()
            raise ModelUnavailable(f"fetching it ended with code {code}: {said[-1] if said else 'no reason given'}")
        return folder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await errors


def _decoded(line: bytes) -> dict[str, object]:
    """A line of ours; whatever else a library prints there is passed over."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def main() -> int:
    from cacheaware_engine import errors, model_source

    def say(**message: object) -> None:
        print(json.dumps(message), flush=True)

    try:
        folder = model_source.fetch(
            sys.argv[1], on_progress=lambda text, fraction=None: say(text=text, fraction=fraction)
        )
    except (errors.ModelError, OSError) as error:
        say(error=str(error))
        return 1
    say(folder=str(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
