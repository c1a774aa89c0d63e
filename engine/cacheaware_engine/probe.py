"""`python -m cacheaware_engine.probe`: what an engine says of its health, as an exit code. Standard library only.

The engine listens on loopback, where a cluster's own probes do not reach; this runs beside it. Exit codes:

    0  ready; with --alive also while it loads or drains
    1  broken, or no answer
    2  a bad setting
    3  loading or draining (not with --alive)
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from enum import Enum, auto


class Health(Enum):
    READY = auto()
    BUSY = auto()  # it answers, and is loading or draining
    BROKEN = auto()


def ask(url: str, timeout: float) -> tuple[Health, str]:
    """The engine's health and its own words for it."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return Health.READY, _text(answer)
    except urllib.error.HTTPError as error:
        with error:
            return (Health.BUSY if error.code == 503 else Health.BROKEN), _text(error)
    except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, or not HTTP
        return Health.BROKEN, str(error)


def exit_code(health: Health, alive: bool) -> int:
    match health:
        case Health.READY:
            return 0
        case Health.BUSY:
            return 0 if alive else 3
        case Health.BROKEN:
            return 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cacheaware-engine-probe", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", default="http://127.0.0.1:8001/health", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--alive", action="store_true", help="an engine that loads or drains counts as well")
    given = parser.parse_args(arguments)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"argument --url: {given.url!r} is not a URL like http://127.0.0.1:8001/health")
    health, words = ask(given.url, given.timeout)
    print(words)  # it becomes part of the pod's events
    return exit_code(health, given.alive)


def _text(answer: http.client.HTTPResponse | urllib.error.HTTPError) -> str:
    return answer.read(1000).decode(errors="replace").strip()


if __name__ == "__main__":
    sys.exit(main())
