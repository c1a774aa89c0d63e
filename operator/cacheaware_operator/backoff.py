"""When a part that ended is started again, and when nobody tries any more. Pure: the supervisor acts on it."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_DELAY = 30.0  # seconds: long enough to spare a machine, short enough that a fixed cause is picked up at once
HEALTHY_AFTER = 60.0  # seconds of readiness after which the next exit counts as the first again
START_TRIES = 3  # starts of a part that was never ready and died without saying why, e.g. killed for memory

# An engine or sidecar ends with 2 for a setting and 1 for a model or port that it cannot use (0001, "Processes"):
# neither gets better by trying again.
FINAL_EXIT_CODES = frozenset({1, 2})


@dataclass(frozen=True, slots=True)
class Exit:
    """How a part ended: `code` as the operating system reports it, negative for a signal."""

    code: int
    was_ever_ready: bool  # at any start of this part
    healthy_seconds: float  # how long it had been ready in this run


@dataclass(frozen=True, slots=True)
class Restart:
    delay: float
    failures: int  # exits in a row, this one included


def after_exit(exit_: Exit, failures: int) -> Restart | None:
    """What follows an exit after `failures` earlier ones in a row; None: give up, starting it again cannot help."""
    failures = 1 if exit_.healthy_seconds >= HEALTHY_AFTER else failures + 1
    if not exit_.was_ever_ready and (exit_.code in FINAL_EXIT_CODES or failures >= START_TRIES):
        return None
    return Restart(delay=min(LONGEST_DELAY, 2.0 ** min(failures - 1, 10)), failures=failures)


def describe_exit(code: int, signals: dict[int, str]) -> str:
    """`exit code 2`, or `killed by SIGKILL` for a negative code; `signals` maps numbers to names."""
    if code < 0:
        return f"killed by {signals.get(-code, f'signal {-code}')}"
    return f"exit code {code}"
