"""`python -m cacheaware_sidecar.pre_stop`: the hook that ends a sidecar's pod without cutting streams.

It waits until Services and gateways have forgotten the pod, tells the sidecar to refuse new requests, and returns once
those inside have ended, or time is up. The mark is a file that other containers look at: while it is there, requests
still need their engine. It always goes in the end. A sidecar that does not answer has no requests to wait for.

Standard library only: it starts in a moment. The hook never fails, because nobody could act on it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

CALL_SECONDS = 3.0
POLL_SECONDS = 0.5

Drain = Callable[[], int | None]  # asks the sidecar to drain; requests still inside, None: no answer


def wait(
    drain: Drain,
    *,
    delay: float,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Drain after `delay` seconds for at most `timeout` seconds; returns how it ended, in words."""
    sleep(delay)
    deadline = clock() + timeout
    while True:
        inside = drain()
        if inside is None:
            return "the sidecar does not answer"
        if inside == 0:
            return "drained"
        if clock() >= deadline:
            return f"{inside} requests are left after {timeout:g} s"
        sleep(POLL_SECONDS)


def ask_to_drain(control_url: str, secrets_dir: Path) -> int | None:
    """`POST /pool/drain`: every call says the same, so it is also how to ask what is left."""
    try:
        token = (secrets_dir / "control-token").read_text().split()[0]
        request = urllib.request.Request(
            f"{control_url}/pool/drain", method="POST", data=b"", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return int(json.load(answer)["inside"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cacheaware-sidecar-pre-stop", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--control-url", default="http://127.0.0.1:9400", help="default: %(default)s")
    parser.add_argument("--secrets-dir", type=Path, required=True, help="folder with control-token")
    parser.add_argument("--mark", type=Path, required=True, help="file that is there until the end")
    parser.add_argument("--delay", type=float, default=5.0, metavar="SECONDS", help="serve on for so long")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="most that requests may take")
    given = parser.parse_args(arguments)
    try:
        given.mark.touch()
        how = wait(lambda: ask_to_drain(given.control_url, given.secrets_dir), delay=given.delay, timeout=given.timeout)
        print(how)
    finally:
        given.mark.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
