"""Our sidecar as it is, with a clock on its event loop: how long one turn keeps it from the next.

    python -m benchmarks.sidecar_turns TURNS_FILE <the sidecar's own flags>

What a turn took is the processor time of the loop's thread between two calls of a timer that is due in every turn: on a
machine that others use too, waiting for a core is not blocking the loop. Long turns are written when it ends, as JSON:
[[moment on the monotonic clock, seconds], …].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import uvloop

from cacheaware_sidecar.__main__ import main

INTERVAL = 0.001  # seconds between two looks, the least that the loop's timers know
LONG = 0.001  # seconds; shorter turns are not written


def watched(loop: uvloop.Loop, turns: list[tuple[float, float]]) -> uvloop.Loop:
    last = time.thread_time()

    def look() -> None:
        nonlocal last
        now = time.thread_time()
        if now - last >= LONG:
            turns.append((time.monotonic(), now - last))
        last = now
        loop.call_later(INTERVAL, look)

    loop.call_soon(look)
    return loop


if __name__ == "__main__":
    file = Path(sys.argv[1])
    seen: list[tuple[float, float]] = []
    new_loop = uvloop.new_event_loop
    uvloop.new_event_loop = lambda: watched(new_loop(), seen)
    try:
        main(sys.argv[2:])
    finally:
        file.write_text(json.dumps(seen))
