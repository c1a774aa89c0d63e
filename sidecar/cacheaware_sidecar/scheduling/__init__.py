"""Which requests go to the engine now, together with whom, and why: a pure object that is told events and the time.

    requests.py      what a request is to the scheduler, and what it decides about it
    fair_queue.py    the order: weighted shares of tiers and tenants, deadlines, quick prompts first
    prefix_index.py  what the engine probably still has
    active_groups.py what groups have in the cache, and will want of it
    scheduler.py     all of it put together: `Scheduler`

Standard library only: the sidecar acts on its decisions (`dispatch.py`, `gate.py`), and a replay drives the same object
in virtual time. It does no I/O, keeps no blocks and reads no prompt.
"""

from cacheaware_sidecar.scheduling.requests import (
    Decision,
    Dispatch,
    EngineView,
    FlushReason,
    Foreseen,
    Slots,
    Terms,
    Used,
    Waiting,
    WaitsFor,
)
from cacheaware_sidecar.scheduling.scheduler import Scheduler

__all__ = [
    "Decision",
    "Dispatch",
    "EngineView",
    "FlushReason",
    "Foreseen",
    "Scheduler",
    "Slots",
    "Terms",
    "Used",
    "Waiting",
    "WaitsFor",
]
