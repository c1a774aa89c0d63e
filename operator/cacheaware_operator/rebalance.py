"""Moves effective quota to the tiers that gain most hits by it, a little at a time, and says why. Pure.

    decide(state, readings, terms, now) → Decision(state, effective, moves, skipped, …)

is to be called once an interval (an epoch); the next call gets the state that this one returned. It maximises the sum
over tiers of weight · prefill seconds per block · hits(share), with hit curves from every replica's reuse histogram.

What holds at every call, whatever is read:
- Shares are whole percent; those of the tiers always add up to their nominal ones. The public share never moves, and
  what the spec leaves to nobody stays with nobody.
- No share leaves [nominal - lending, nominal + borrowing], and none is taken below what the tier holds.
- At most `maxStepPercent` moves in an epoch, but for the first `LEARNING_EPOCHS`, in which the whole way may be gone.
- A tier that got does not give, and one that gave does not get, within `REVERSAL_EPOCHS` epochs.
- Nothing moves before every ready replica has acknowledged the last move and was read since; nothing moves on old
  figures.
- A move gains by its prediction; so on traffic that does not change shares settle and never swing.

If `MOST_FAILURES` predictions in a row do not come true, shares go back to nominal and stay there for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cacheaware_api.conditions import ConditionStatus, ConditionType, Reason
from cacheaware_api.defaults import RebalancingMode
from cacheaware_operator.hit_worth import HitWorth, hit_worth, urgency
from cacheaware_operator.predictions import Verdict, is_over, quiet_time, verdict, watched, with_move
from cacheaware_operator.readings import Readings
from cacheaware_operator.rebalance_terms import Terms, fitted
from cacheaware_operator.rebalance_values import Decision, Move, MoveReason, Skip, State, Turn
from cacheaware_operator.reuse_memory import remembered
from cacheaware_operator.share_search import Bounds, Transfer, best_shares, best_step, step_towards
from cacheaware_operator.status_conditions import Finding

# The split at the start is a guess, and a prompt that comes back after ten minutes is not seen before: until then calm
# costs more than it protects.
LEARNING_EPOCHS = 20
REVERSAL_EPOCHS = 2
STALE_INTERVALS = 2
LEAST_REFERENCES = 500.0  # blocks, of late: fewer make no curve
MOST_FAILURES = 3
DISTRUST_EPOCHS = 20


def decide(state: State, readings: Readings, terms: Terms, now: float) -> Decision:
    """`now` is of the clock by which the readings are stamped."""
    if terms.mode is RebalancingMode.OFF:
        return Decision(State(), terms.nominal, skipped=Skip.OFF)
    state = _under_terms(state, readings, terms)
    memory = remembered(state.memory, readings, frozenset(terms.nominal))
    state = replace(state, epoch=state.epoch + 1, memory=memory)
    if not readings.ready:
        return _skipped(state, Skip.NO_REPLICAS, "no replica is ready")
    stale = _stale(readings, terms, now)
    if stale:
        frozen = f"shares stay as they are: {stale}"
        condition = Finding(ConditionType.METRICS_FRESH, ConditionStatus.FALSE, Reason.STALE, frozen)
        return _skipped(state, Skip.STALE_METRICS, stale, condition)
    condition = Finding(ConditionType.METRICS_FRESH, ConditionStatus.TRUE, Reason.FRESH)
    state = replace(
        state,
        urgency=urgency(state.urgency, readings, terms),
        learned=state.learned + (_references(state, terms) >= LEAST_REFERENCES),
    )
    return replace(_decide_on_fresh(state, readings, terms), conditions=(condition,))


def _decide_on_fresh(state: State, readings: Readings, terms: Terms) -> Decision:
    shares = _shares(state)
    if not readings.acknowledged or readings.effective != shares:
        return _skipped(state, Skip.NOT_ACKNOWLEDGED, "not every replica has applied the last change")
    state, found = _judged(state, terms)
    bounds = _bounds(state, readings, terms, spaced=True)
    if state.distrusted_until is not None:
        return replace(_go_back(state, bounds, terms), verdict=found)
    decision = _move(state, readings, terms, bounds)
    return replace(decision, verdict=found)


def _move(state: State, readings: Readings, terms: Terms, bounds: Mapping[str, Bounds]) -> Decision:
    if _references(state, terms) < LEAST_REFERENCES:
        return _skipped(state, Skip.LEARNING, "there were too few requests so far")
    if state.trial is not None and state.trial.pauses_moves(state.epoch):
        return _skipped(state, Skip.JUDGING, "waiting to see what the last moves brought")
    shares = _shares(state)
    hits = hit_worth(state.memory, state.urgency, terms)
    target = best_shares(hits.worth, bounds, shares)
    gain = hits.gain_percent(shares, target)
    if gain <= terms.min_gain_percent:
        free = _bounds(state, readings, terms, spaced=False)
        would = hits.gain_percent(shares, best_shares(hits.worth, free, shares))
        if free != bounds and would > terms.min_gain_percent:
            return _skipped(state, Skip.REVERSAL_TOO_SOON, "what would move back has only just moved")
        least = f"the best split would gain {gain:.1f} % of hits; minGainPercent is {terms.min_gain_percent}"
        return _skipped(state, Skip.GAIN_TOO_SMALL, least)
    whole_way = state.hurries and state.learned <= LEARNING_EPOCHS
    transfers = best_step(hits.worth, shares, target, 100 if whole_way else terms.max_step_percent)
    if not transfers:
        hint = (
            f"the best split would gain {gain:.1f} % of hits, but no step of {terms.max_step_percent} % gains any: "
            "raise maxStepPercent"
        )
        return _skipped(state, Skip.STEP_TOO_SMALL, hint)
    moves = _explained(transfers, state, hits)
    if terms.mode is RebalancingMode.DRY_RUN:
        return replace(_skipped(state, Skip.DRY_RUN, "mode is DryRun: nothing moved"), moves=moves)
    predicted = sum(move.gain_percent or 0.0 for move in moves)
    trial = with_move(state.trial, state.epoch, shares, predicted, state.memory)
    return _moved(replace(state, trial=trial), moves)


def _go_back(state: State, bounds: Mapping[str, Bounds], terms: Terms) -> Decision:
    shares = _shares(state)
    target = {
        tier.name: min(bounds[tier.name].most, max(bounds[tier.name].least, tier.nominal)) for tier in terms.tiers
    }
    transfers = step_towards(shares, target, terms.max_step_percent)
    if not transfers or terms.mode is RebalancingMode.DRY_RUN:
        until = f"{MOST_FAILURES} predictions in a row did not come true: shares stay nominal for a while"
        return _skipped(state, Skip.PREDICTIONS_FAILED, until)
    why = f"{MOST_FAILURES} predictions in a row did not come true: back to nominal"
    return _moved(
        state,
        tuple(Move(each.giver, each.taker, each.percent, MoveReason.PREDICTIONS_FAILED, why) for each in transfers),
    )


# -- state -------------------------------------------------------------------------------------------------------------


def _shares(state: State) -> Mapping[str, int]:
    assert state.effective is not None, "shares are known once there are terms"
    return state.effective


def _under_terms(state: State, readings: Readings, terms: Terms) -> State:
    """An edit of the spec counts at once: shares keep their distance from nominal where the new bounds allow it."""
    nominal = terms.nominal
    if state.effective is None:  # the operator has started, or rebalancing was turned on
        handed_out = readings.effective
        taken_over = fitted(handed_out if handed_out.keys() == nominal.keys() else nominal, terms)
        return replace(state, effective=taken_over, nominal=nominal, hurries=taken_over == nominal)
    shifted = {
        name: state.effective[name] + nominal[name] - state.nominal[name]
        for name in nominal.keys() & state.effective.keys()
    }
    effective = fitted(shifted, terms)
    if effective == state.effective:
        return replace(state, nominal=nominal)
    return replace(
        state,
        effective=effective,
        nominal=nominal,
        trial=None,  # what it compared with is gone
        turns={name: turn for name, turn in state.turns.items() if name in nominal},
    )


def _judged(state: State, terms: Terms) -> tuple[State, Verdict | None]:
    """Close the trial that is over; lose trust, or regain it."""
    if state.distrusted_until is not None and state.epoch >= state.distrusted_until:
        state = replace(state, distrusted_until=None, failures=0)
    if state.trial is None:
        return state, None
    trial = watched(state.trial, state.epoch, state.memory)
    if not is_over(trial, state.epoch):
        return replace(state, trial=trial), None
    state = replace(state, trial=None)
    quiet = quiet_time(trial, state.memory)
    if sum(quiet.references(tier.name) for tier in terms.tiers) < 1:
        return state, None
    found = verdict(trial, _shares(state), quiet, hit_worth(quiet, state.urgency, terms))
    if found is None:
        return state, None
    failures = state.failures + 1 if found.failed else 0
    distrusted_until = state.epoch + DISTRUST_EPOCHS if failures >= MOST_FAILURES else None
    return replace(state, failures=failures, distrusted_until=distrusted_until), found


def _moved(state: State, moves: tuple[Move, ...]) -> Decision:
    shares = dict(_shares(state))
    turns = dict(state.turns)
    for move in moves:
        shares[move.from_] -= move.percent
        shares[move.to] += move.percent
        turns[move.from_] = Turn(state.epoch, grew=False)
        turns[move.to] = Turn(state.epoch, grew=True)
    return Decision(replace(state, effective=shares, turns=turns), shares, moves)


def _skipped(state: State, skip: Skip, message: str, *conditions: Finding) -> Decision:
    return Decision(state, _shares(state), skipped=skip, message=message, conditions=conditions)


# -- what moves are judged by ------------------------------------------------------------------------------------------


def _references(state: State, terms: Terms) -> float:
    return sum(state.memory.references(tier.name) for tier in terms.tiers)


def _stale(readings: Readings, terms: Terms, now: float) -> str:
    """Which ready replicas have no fresh figures, in words; empty where all have."""
    at = {reading.name: reading.at for reading in readings.replicas}
    oldest = now - STALE_INTERVALS * terms.interval
    words = []
    for name in readings.ready:
        if name not in at:
            words.append(f"{name} ({readings.problems.get(name, 'no figures')})")
        elif at[name] < oldest:
            words.append(f"{name} (last {now - at[name]:.0f} s ago)")
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return f"no fresh metrics from {', '.join(words[:3])}{more}: look at the sidecar's log" if words else ""


def _bounds(state: State, readings: Readings, terms: Terms, *, spaced: bool) -> dict[str, Bounds]:
    """How far each share may go now; `spaced`: none that has just turned may turn back."""
    shares = _shares(state)
    bounds = {}
    for tier in terms.tiers:
        share, turn = shares[tier.name], state.turns.get(tier.name)
        # What running requests hold cannot be had for others; but nobody is given more because it borrows.
        least = max(tier.guaranteed, min(share, _held_percent(tier.name, readings)))
        most = tier.limit
        if spaced and turn is not None and state.epoch - turn.epoch <= REVERSAL_EPOCHS:
            least, most = (share, most) if turn.grew else (least, share)
        bounds[tier.name] = Bounds(least, most)
    return bounds


def _held_percent(tier: str, readings: Readings) -> int:
    """Of the replica on which it holds most; rounded up."""
    return max(
        (
            -(-100 * reading.tiers[tier].held_blocks // reading.capacity)
            for reading in readings.replicas
            if tier in reading.tiers and reading.capacity > 0
        ),
        default=0,
    )


def _explained(transfers: list[Transfer], state: State, hits: HitWorth) -> tuple[Move, ...]:
    shares = dict(_shares(state))
    moves = []
    for each in transfers:
        gain = hits.percent(each.gain)
        why = f"{each.taker} gains more by {each.percent} % than {each.giver} loses: {gain:.1f} % of weighted hits"
        reason = MoveReason.MORE_HITS
        if _only_urgent(each, shares, state, hits):
            reason, why = MoveReason.SLA_MISSED, f"{why}; {each.taker} misses its time to first token"
        shares[each.giver] -= each.percent
        shares[each.taker] += each.percent
        moves.append(Move(each.giver, each.taker, each.percent, reason, why, gain))
    return tuple(moves)


def _only_urgent(transfer: Transfer, shares: Mapping[str, int], state: State, hits: HitWorth) -> bool:
    """Whether it pays only because the taker misses its promise."""
    urgency = state.urgency.get(transfer.taker, 1.0)
    giver, taker = hits.worth[transfer.giver], hits.worth[transfer.taker]
    has, share = shares[transfer.giver], shares[transfer.taker]
    lost = giver[has] - giver[has - transfer.percent]
    won = taker[share + transfer.percent] - taker[share]
    return urgency > 1 and won / urgency <= lost / state.urgency.get(transfer.giver, 1.0)
