"""Whether moves brought what was predicted of them. Pure.

A trial opens with a move and takes in those that follow; once nothing has moved for `QUIET_EPOCHS`, what the engines
counted since is compared with what the curves of the same minutes say the old shares would have hit. So a change of the
traffic, which is what makes quota move, is not taken for what the move did. The curves are known to be off by some
constant (they know nothing of borrowed blocks): it is measured before the move and taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cacheaware_operator.hit_worth import HitWorth
from cacheaware_operator.reuse_memory import Memory

QUIET_EPOCHS = 3
LONGEST_EPOCHS = 6  # then moves pause until what they brought is known
WORTH_KEEPING = 0.25  # of the expected gain


@dataclass(frozen=True, slots=True)
class Verdict:
    """Gains in percent of all weighted references."""

    predicted_percent: float  # when it was moved
    expected_percent: float  # by the traffic since
    realised_percent: float

    @property
    def failed(self) -> bool:
        return self.realised_percent < WORTH_KEEPING * self.expected_percent


@dataclass(frozen=True, slots=True)
class Trial:
    opened: int  # epoch
    shares: Mapping[str, int]  # before the first move
    off: Mapping[str, float]  # by tier: hit ratio as counted less as the curve had it, before the first move
    predicted_percent: float
    quiet_from: Memory | None = None  # when the last move was acknowledged
    quiet_since: int | None = None  # epoch

    def pauses_moves(self, epoch: int) -> bool:
        return epoch - self.opened >= LONGEST_EPOCHS


def with_move(trial: Trial | None, epoch: int, shares: Mapping[str, int], gain_percent: float, memory: Memory) -> Trial:
    """The trial after one more move, away from `shares`."""
    if trial is not None:
        predicted = trial.predicted_percent + gain_percent
        return replace(trial, predicted_percent=predicted, quiet_from=None, quiet_since=None)
    off = {}
    for name, share in shares.items():
        counted, told = memory.hit_ratio(name), _curve_ratio(memory, name, share)
        if counted is not None and told is not None:
            off[name] = counted - told
    return Trial(epoch, dict(shares), off, gain_percent)


def watched(trial: Trial, epoch: int, memory: Memory) -> Trial:
    """To be called once an epoch while what was moved is acknowledged: the quiet time begins with the first call."""
    return trial if trial.quiet_from is not None else replace(trial, quiet_from=memory, quiet_since=epoch)


def is_over(trial: Trial, epoch: int) -> bool:
    return trial.quiet_since is not None and epoch - trial.quiet_since >= QUIET_EPOCHS


def quiet_time(trial: Trial, memory: Memory) -> Memory:
    """What was counted since the last move was acknowledged."""
    return memory if trial.quiet_from is None else memory.since(trial.quiet_from)


def verdict(trial: Trial, shares: Mapping[str, int], quiet: Memory, hits: HitWorth) -> Verdict | None:
    """`quiet` is the memory of the quiet time alone, `hits` what hits were worth in it. None where nothing can be said:
    there were no requests, or the traffic has turned and the old shares would be better by now.
    """
    expected, realised, compared = 0.0, 0.0, False
    for name, off in trial.off.items():
        counted = quiet.hit_ratio(name)
        old = _curve_ratio(quiet, name, trial.shares[name])
        new = _curve_ratio(quiet, name, shares[name]) if name in shares else None
        if counted is None or old is None or new is None:
            continue
        compared = True
        expected += hits.parts[name] * (new - old)
        realised += hits.parts[name] * (counted - old - off)
    if not compared or expected <= 0:
        return None
    return Verdict(trial.predicted_percent, 100 * expected, 100 * realised)


def _curve_ratio(memory: Memory, tier: str, share: int) -> float | None:
    references = memory.references(tier)
    return memory.hits(tier)[share] / references if references >= 1 else None
