"""`python -m cacheaware_operator`: settings, logs, signals and exit codes. The operator is `operator_process.py`.

Exit codes: 0 after SIGTERM or SIGINT, 1 when it lost its lease or a part of it failed, 2 for a bad setting, named on
stderr.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from prometheus_client import disable_created_metrics

from cacheaware_operator.errors import NoCluster
from cacheaware_operator.kubernetes_credentials import Credentials
from cacheaware_operator.operator_process import OperatorProcess
from cacheaware_operator.settings import Settings, parse


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    settings = parse(arguments, os.environ)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of every event it passes on
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it misses the signals, which are ours
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody asked for
    try:
        credentials = Credentials.load(settings.kubeconfig)
    except NoCluster as error:
        _fail(str(error))
    try:
        code = asyncio.run(_serve(settings, credentials))
    except OSError as error:
        _fail(f"--metrics-port: {error.strerror or error}")
    sys.exit(code)


async def _serve(settings: Settings, credentials: Credentials) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await OperatorProcess(settings, credentials).run(stop)


def _fail(message: str) -> NoReturn:
    print(f"cacheaware-operator: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
