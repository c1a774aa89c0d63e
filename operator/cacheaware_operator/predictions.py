"""Whether moves brought what was predicted of them. Pure.

A trial opens with a move and takes in those that follow; once nothing has moved for `QUIET_EPOCHS`, each tier's hits
since then are compared with those before, weighted as they were when the trial opened, so that a change of the
traffic's mix is not taken for a gain. A trial fails if it brought less than a quarter of what was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cacheaware_operator.reuse_memory import HitCount, Memory

QUIET_EPOCHS = 3
LONGEST_EPOCHS = 6  # then moves pause until what they brought is known
WORTH_KEEPING = 0.25  # of the predicted gain


@dataclass(frozen=True, slots=True)
class Verdict:
    """Gains in percent of all weighted references."""

    predicted_percent: float
    realised_percent: float

    @property
    def failed(self) -> bool:
        return self.realised_percent < WORTH_KEEPING * self.predicted_percent


@dataclass(frozen=True, slots=True)
class Trial:
    opened: int  # epoch
    moved: int  # epoch of the last move in it
    predicted_percent: float
    parts: Mapping[str, float]  # each tier's part of all weighted references
    before: Mapping[str, float]  # hit ratio of each tier that had requests
    quiet_from: Mapping[str, HitCount] | None = None  # counted when the last move was acknowledged
    quiet_since: int | None = None  # epoch

    def pauses_moves(self, epoch: int) -> bool:
        return epoch - self.opened >= LONGEST_EPOCHS


def with_move(
    trial: Trial | None, epoch: int, gain_percent: float, parts: Mapping[str, float], memory: Memory
) -> Trial:
    if trial is not None:
        return replace(
            trial,
            moved=epoch,
            predicted_percent=trial.predicted_percent + gain_percent,
            quiet_from=None,
            quiet_since=None,
        )
    before = {name: ratio for name, count in memory.recent_hits.items() if (ratio := count.ratio) is not None}
    return Trial(epoch, epoch, gain_percent, parts, before)


def judged(trial: Trial, epoch: int, memory: Memory) -> tuple[Trial | None, Verdict | None]:
    """To be asked once an epoch while what was moved is acknowledged; no trial is left once there is a verdict."""
    if trial.quiet_from is None or trial.quiet_since is None:
        return replace(trial, quiet_from=memory.all_hits, quiet_since=epoch), None
    if epoch - trial.quiet_since < QUIET_EPOCHS:
        return trial, None
    realised = {
        name: trial.parts.get(name, 0.0) * (ratio - before)
        for name, before in trial.before.items()
        if (ratio := _since(trial.quiet_from.get(name), memory.all_hits.get(name)).ratio) is not None
    }
    # Without requests before and after there is nothing to compare, and nobody to blame.
    return None, Verdict(trial.predicted_percent, 100 * sum(realised.values())) if realised else None


def _since(start: HitCount | None, now: HitCount | None) -> HitCount:
    if start is None or now is None:
        return HitCount()
    return HitCount(now.hits - start.hits, now.queries - start.queries)
