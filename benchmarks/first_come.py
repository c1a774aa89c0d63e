"""The rival of the real run: the same sidecar with nothing to decide. `python -m benchmarks.first_come FLAGS`

Requests go to the engine in the order in which they came, as many as it has slots for; no tier, tenant, deadline or
prefix counts. Everything else on a request's path is the product's.
"""

from __future__ import annotations

import dataclasses
import time

from cacheaware_sidecar.__main__ import main
from cacheaware_sidecar.scheduling import Scheduler, Waiting
from cacheaware_sidecar.settings import Settings
from cacheaware_sidecar.sidecar import Sidecar


class FirstCome(Scheduler):
    """One share for all of them, without promises and prefixes: what is left is the order of arrival."""

    def add(self, request: Waiting) -> None:
        super().add(dataclasses.replace(request, tier="everybody", tenant="", deadline=None, chunks=()))


def _sidecar(settings: Settings) -> Sidecar:
    return Sidecar(settings, scheduler=FirstCome(clock=time.monotonic, limit_prefill=False))


if __name__ == "__main__":
    main(make_sidecar=_sidecar)
