"""`python -m cacheaware_engine`: settings in, exit code out."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from .logs import configure
from .settings import parse


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse(arguments)
    configure(settings.log_level, settings.log_format)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from .process import run

    code = asyncio.run(run(settings))
    # Not sys.exit: a model that is still loading, on a daemon thread inside torch, cannot be unwound.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
