"""The scheduler: events in, decisions out. See docs/designs/0003-scheduling.md for its rules and bounds.

    add → next (Dispatch) → first_byte → finished          cancel at any moment
    step: what the engine's steps cost

It has one caller at a time, which asks `next` after every event and at `wake_at`, and sends what it is told at once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from cacheaware_api import wire
from cacheaware_sidecar.scheduling.active_groups import ActiveGroups
from cacheaware_sidecar.scheduling.arrivals import Arrivals
from cacheaware_sidecar.scheduling.backlog import Backlog
from cacheaware_sidecar.scheduling.computing import Computing
from cacheaware_sidecar.scheduling.cost_model import CostModel
from cacheaware_sidecar.scheduling.fair_queue import FairQueue
from cacheaware_sidecar.scheduling.groups import CHECKPOINT_CHUNKS, Group, GroupTree
from cacheaware_sidecar.scheduling.holding import LARGEST_GROUP, Company, Held, Holds, hold, saved_by_company
from cacheaware_sidecar.scheduling.prefix_index import Match, PrefixIndex
from cacheaware_sidecar.scheduling.requests import (
    Decision,
    Dispatch,
    EngineView,
    FlushReason,
    Foreseen,
    Terms,
    Used,
    Waiting,
    WaitsFor,
)

OUTPUT_PRICE = 2.0  # of a generated token, where one of the prompt that has to be computed costs 1
STEPS_AHEAD = 0.5  # prompts for so much of a full step are sent ahead: more would be ordered by the engine, not here
BUSY_STEPS = STEPS_AHEAD / 2  # with so much ahead the engine is busy, and company may be waited for
URGENCY_STEPS = 2.0  # full steps of work, over weight, by which urgency may put a share ahead of the others
ENGINE_QUEUE = 2  # requests that wait inside the engine for blocks before others stay here
MOST_HELD = 64  # at a time; one decision takes no longer, however many share a prefix
_PACE_SMOOTHING = 0.1
_TICK = 1e-6  # seconds; less is rounding, and no reason to wait


@dataclasses.dataclass(slots=True)
class _Inside:
    """A request in the engine: what was predicted of it, and what its share was charged."""

    request: Waiting
    match: Match
    cost: float
    group: str | None = None
    decodes: bool = False  # its prompt is computed


@dataclasses.dataclass(frozen=True, slots=True)
class _Flushed:
    """It was held, so long in all. What is left of its window is all that it may still be held."""

    held: float
    reason: FlushReason


class Scheduler:
    """Every request added is dispatched or cancelled, once; every one dispatched is finished, once.

    `checkpoint_chunks`: prefixes are compared every so many chunks, and shorter ones make no group. `limit_prefill`
    False sends everything for which there is a slot.
    """

    def __init__(
        self,
        terms: Mapping[str, Terms] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        index: PrefixIndex | None = None,
        checkpoint_chunks: int = CHECKPOINT_CHUNKS,
        limit_prefill: bool = True,
    ) -> None:
        self._clock = clock
        self.index = index or PrefixIndex()
        self.costs = CostModel()
        self.active_groups = ActiveGroups()
        self._limit_prefill = limit_prefill
        self._checkpoint_chunks = checkpoint_chunks
        self._terms: Mapping[str, Terms] = {}
        self._windows = False  # whether any tier holds requests: only then it matters how often a prefix comes
        self._queue = FairQueue(effort=self._effort)
        self._holds = Holds()
        self._flushed: dict[str, _Flushed] = {}
        self._groups = GroupTree(checkpoint_chunks)
        self._arrivals = Arrivals()
        self._backlog = Backlog()
        self._computing = Computing()
        self._unseen: set[str] = set()  # in the engine, without a first token that could be seen
        self._inside: dict[str, _Inside] = {}
        self._sequences: dict[str, int] = {}  # inside the engine, by tier
        self._all_sequences = 0
        self._decoding, self._context = 0, 0.0  # sequences, and tokens of their prompts
        self._load = 0.0  # seconds that decoding adds to a step now
        self._empty_step: float | None = None  # seconds of a step that is full of prompts, where nothing decodes
        self._full_step: float | None = None  # and as it is now; None: not known
        self._cascades = False
        self._last_dispatch: float | None = None
        self._pace: float | None = None
        if terms is not None:
            self.set_terms(terms)

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._holds)

    @property
    def held(self) -> int:
        return len(self._holds)

    def waiting_of(self, tier: str) -> int:
        return self._queue.waiting(tier) + self._holds.of_tier(tier)

    def oldest(self, tier: str) -> float | None:
        """When the longest waiting request of a tier arrived."""
        return self._backlog.oldest(tier)

    @property
    def inside(self) -> int:
        """Requests in the engine."""
        return len(self._inside)

    @property
    def sequences(self) -> int:
        """All sequences in the engine."""
        return self._all_sequences

    def sequences_of(self, tier: str) -> int:
        """A tier's sequences in the engine."""
        return self._sequences.get(tier, 0)

    @property
    def pace(self) -> float | None:
        """Seconds between two dispatches while others wait."""
        return self._pace

    def predicted_tokens(self, request: Waiting) -> int:
        """About how many leading tokens of the prompt are cached now."""
        return self.index.predict(request).tokens

    def time_to_first_token(self, request: Waiting) -> float | None:
        """About how long the first token of a request would take that came now, in seconds. None: not known."""
        ahead = self._backlog.ahead(request.tier, request.tenant, {n: t.weight for n, t in self._terms.items()})
        by_pace = None if self._pace is None else ahead.requests * self._pace
        cached = self.predicted_tokens(request)
        own = self.costs.prefill_seconds(max(1.0, request.prompt_tokens - cached), cached, load=self._load)
        if own is None:
            return by_pace
        return self._computing.backlog(self._clock()) + max(ahead.seconds, by_pace or 0.0) + own

    # -- events --------------------------------------------------------------------------------------------------------

    def set_terms(self, terms: Mapping[str, Terms]) -> None:
        self._terms = dict(terms)
        self._windows = any(one.window > 0 for one in terms.values())
        self._queue.set_terms(terms)

    def set_engine(self, capacity_tokens: int | None, bytes_per_token: int | None = None, block_size: int = 1) -> None:
        """The size of the engine's KV cache, and of the blocks in which it shares prefixes; None: not known."""
        self.index.set_engine(capacity_tokens, block_size)
        self.costs.bytes_per_token = bytes_per_token or 0
        self._costs_changed()

    def engine_restarted(self) -> None:
        """Its cache is empty. Requests that were inside are finished one by one, as they are noticed."""
        self.index.clear()
        self.active_groups.clear()

    def add(self, request: Waiting) -> None:
        if request.id in self._inside or request.id in self._holds.held:
            raise ValueError(f"request {request.id} is here already")
        self._queue.push(request)
        self._groups.add(request.id, request.chunks)
        if self._windows:
            self._arrivals.note(self._groups.path_of(request.id), self._clock())
        cached = self.predicted_tokens(request)
        seconds = self.costs.prefill_seconds(max(1.0, request.prompt_tokens - cached), cached)
        self._backlog.add(request.id, request.tier, request.tenant, request.arrived, seconds or 0.0)

    def cancel(self, request_id: str) -> bool:
        """Take a waiting request out; False if it was dispatched, or was never here."""
        if not (self._queue.remove(request_id) or self._holds.release(request_id)):
            return False
        self._flushed.pop(request_id, None)
        self._backlog.remove(request_id)
        self._groups.remove(request_id)
        return True

    def next(self, engine: EngineView) -> Decision:
        now = self._clock()
        if self._unseen:
            self._assume_first_bytes(now)
        if self._holds.held:
            self._release_holds(now)
        closed: set[str] = set()
        dispatches: list[Dispatch] = []
        while (room_at := self._room_at(now)) is None:
            if not self._has_slot(engine):
                closed.update(tier for tier in self._queue.backlogged() if not self._is_owed_a_slot(tier, engine))
            request = self._queue.peek(now, closed)
            if request is None:
                break
            if self._windows and (held := self._to_hold(request, now)) is not None:
                self._queue.remove(request.id)
                self._holds.add(held)
            elif not engine.admits(request):
                closed.add(request.tier)
            else:
                dispatches.append(self._dispatch(request, now, closed))
        if dispatches:
            self._note_pace(now, len(dispatches))
        return Decision(tuple(dispatches), self._wake_at(room_at))

    def foresee(self, request: Waiting, engine: EngineView) -> Foreseen:
        """What `add` and `next` would make of a request that came now. It is tried on a copy, and nothing changes here:
        `engine.admits` must reserve nothing.
        """
        turned_away = False

        def admits(one: Waiting) -> bool:
            nonlocal turned_away
            admitted = engine.admits(one)
            turned_away = turned_away or (one is request and not admitted)
            return admitted

        copied = self._copied()
        copied.add(request)
        copied.next(dataclasses.replace(engine, admits=admits))
        if request.id in copied._inside:
            return Foreseen()
        if (held := copied._holds.held.get(request.id)) is not None:
            reason = held.at_end if held.leader is None else FlushReason.PREFIX_READY
            return Foreseen(reason, held.at_end, held.until - held.since)
        if turned_away:
            waits_for = WaitsFor.BLOCKS
        elif copied._room_at(self._clock()) is not None:
            waits_for = WaitsFor.PROMPTS
        elif not copied._has_slot(engine) and not copied._is_owed_a_slot(request.tier, engine):
            waits_for = WaitsFor.SLOTS
        else:
            waits_for = WaitsFor.TURN
        return Foreseen(waits_for=waits_for)

    def _copied(self) -> Scheduler:
        """With accounts of its own. The index is read and not written there: who waits for a first token that was not
        seen is let go by the next `next` here.
        """
        same = (self.index, self._clock)
        memo: dict[int, object] = {id(one): one for one in same}
        memo[id(self.active_groups)] = ActiveGroups()  # it decides nothing, and may be large
        copied = copy.deepcopy(self, memo)
        copied._unseen.clear()
        return copied

    def _wake_at(self, room_at: float | None) -> float | None:
        if not self._unseen and not self._holds.held:
            return room_at
        times = [] if room_at is None else [room_at]
        if (end := self._holds.next_end) is not None:
            times.append(end)
        times += [self._computing.ends(request_id) for request_id in self._unseen]
        return min((time for time in times if math.isfinite(time)), default=None)

    def first_byte(self, request_id: str) -> None:
        """The engine has computed the prompt. Unknown or repeated: nothing happens."""
        inside = self._inside.get(request_id)
        if inside is not None and not inside.decodes:
            self._computed(inside, self._clock())

    def _computed(self, inside: _Inside, now: float) -> None:
        inside.decodes = True
        request = inside.request
        self._load_changed(request.sequences, request.prompt_tokens * request.sequences)
        self._stop_computing(request.id, now)
        self.index.insert(request)
        if self._holds.held:
            self._let_go(self._holds.release_behind(request.id), now, FlushReason.PREFIX_READY)

    def finished(self, request_id: str, used: Used | None = None) -> bool:
        """A request has left the engine, with what it counted. True the first time.

        Without `used` it was cut off: what it had been expected to cost stays charged.
        """
        inside = self._inside.get(request_id)
        if inside is None:
            return False
        now = self._clock()
        if used is not None and not inside.decodes:
            self._computed(inside, now)
        del self._inside[request_id]
        request = inside.request
        self._all_sequences -= request.sequences
        left = self._sequences[request.tier] - request.sequences
        if left:
            self._sequences[request.tier] = left
        else:
            del self._sequences[request.tier]
        if inside.decodes:
            self._load_changed(-request.sequences, -request.prompt_tokens * request.sequences)
        else:
            self._stop_computing(request_id, now)
        self._groups.remove(request_id)
        if self._holds.held and self._inside:  # else the engine is idle, and `next` lets all go
            self._let_go(self._holds.release_behind(request_id), now, FlushReason.PREFIX_READY)
        if used is not None:
            self.index.learn(request, inside.match, used)
            if inside.group is not None:
                self.active_groups.ended(inside.group, request, used, now)
            more = _cost(used.prompt_tokens, used.cached_tokens or 0, used.output_tokens) - inside.cost
            if more:
                self._queue.charge(request.tier, request.tenant, more)
        return True

    def refused(self, request_id: str) -> bool:
        """The engine would not have it: it has cost nothing. True the first time."""
        inside = self._inside.get(request_id)
        if inside is None:
            return False
        self._queue.charge(inside.request.tier, inside.request.tenant, -inside.cost)
        return self.finished(request_id)

    def step(self, report: wire.StepReport) -> None:
        """The engine told what its last steps cost."""
        self.costs.observe(report)
        self._costs_changed()
        self._cascades = self._cascades or any(group.cascade for group in report.groups)

    def check_integrity(self) -> None:
        """Asserts that every account is that of the requests here."""
        self._groups.check_integrity()
        self._queue.check_integrity()
        assert len(self._groups) == self.waiting + self.inside
        assert len(self._backlog) == self.waiting
        assert all(request_id in self._queue or request_id in self._holds.held for request_id in self._flushed)
        assert len(self._computing) == sum(not inside.decodes for inside in self._inside.values())
        assert self._unseen <= self._inside.keys()
        assert (
            self.sequences
            == sum(self._sequences.values())
            == sum(inside.request.sequences for inside in self._inside.values())
        )

    # -- who goes ------------------------------------------------------------------------------------------------------

    def _dispatch(self, request: Waiting, now: float, closed: set[str]) -> Dispatch:
        request_id, tier = request.id, request.tier
        match = self.index.predict(request)
        cost = _cost(request.prompt_tokens, match.tokens, request.output_tokens)
        self._queue.take(request, cost, closed)
        self._backlog.remove(request_id)
        group = self._group_of(request)
        if group is not None:
            self.active_groups.sent(group.id, group.chunks * request.chunk_tokens, request, now)
        self._inside[request_id] = _Inside(request, match, cost, None if group is None else group.id)
        self._sequences[tier] = self._sequences.get(tier, 0) + request.sequences
        self._all_sequences += request.sequences
        prefill = self.costs.prefill(max(1.0, request.prompt_tokens - match.tokens), match.tokens, load=self._load)
        alone, packed = (0.0, 0.0) if prefill is None else prefill
        path = self._groups.path_of(request_id) if self._windows else ()  # whom others may be held behind
        self._computing.start(request_id, path, now, alone, packed)
        if not request.streams and prefill is not None:
            self._unseen.add(request_id)
        flushed = self._flushed.pop(request_id, None)
        held = 0.0 if flushed is None else flushed.held
        return Dispatch(
            request,
            queued=max(0.0, now - request.arrived - held),
            held=held,
            flush_reason=FlushReason.NOT_HELD if flushed is None else flushed.reason,
            group=None if group is None else group.id,
            group_size=1 if group is None else group.members,
            predicted_tokens=match.tokens,
        )

    def _has_slot(self, engine: EngineView) -> bool:
        """Whether anyone may send. A request of several sequences may overshoot the total: the engine queues what it
        cannot run yet.
        """
        return self._all_sequences < engine.slots.total and (engine.waiting <= ENGINE_QUEUE or not self._inside)

    def _is_owed_a_slot(self, tier: str, engine: EngineView) -> bool:
        """A tier below its nominal slots may always send: the engine takes one back from a tier that borrowed it."""
        return self.sequences_of(tier) < engine.slots.nominal.get(tier, 0)

    def _room_at(self, now: float) -> float | None:
        """When the engine will have computed enough of what it was sent to get more; None: it may have more now."""
        if self._full_step is None or not self._inside or not self._limit_prefill:
            return None
        too_much = self._computing.free_at - now - STEPS_AHEAD * self._full_step
        return now + too_much if too_much > _TICK else None

    # -- holding -------------------------------------------------------------------------------------------------------

    def _to_hold(self, request: Waiting, now: float) -> Held | None:
        """None: it goes now."""
        flushed = self._flushed.get(request.id)
        window = self._terms.get(request.tier, Terms()).window - (0.0 if flushed is None else flushed.held)
        if window <= _TICK or not self._inside or len(self._holds) >= MOST_HELD:
            return None
        path = self._groups.path_of(request.id)
        leader = self._computing.leader(path)
        gain = 0
        if leader is not None:
            gain = leader.checkpoints * self._checkpoint_chunks - self.index.known.matched(request.chunks)
        if leader is not None and gain >= self._checkpoint_chunks and self._fills_a_block(request, gain):
            group: str | None = path[leader.checkpoints - 1][:8].hex()
        else:
            leader, group = None, self._paying_group(request, window, now)
        if group is None:
            return None
        slack = self._slack_until(request, now)
        behind = None if leader is None else leader.id
        held = hold(request, now, window=window, slack_until=slack, leader=behind, group=group)
        if held is not None and behind is not None and not self._ready_within(behind, now, held.until):
            return None  # it would have waited, and computed the prefix after all
        return held

    def _ready_within(self, leader: str, now: float, until: float) -> bool:
        """Whether the prefix that a leader computes should be there by then. One that is overdue may wait for blocks;
        where nothing is known of how long it takes, the window alone decides.
        """
        return self.costs.prices is None or now < self._computing.ends(leader) <= until

    def _group_of(self, request: Waiting) -> Group | None:
        group = self._groups.group_of(request.id)
        return group if group is not None and self._fills_a_block(request, group.chunks) else None

    def _fills_a_block(self, request: Waiting, chunks: int) -> bool:
        """Shorter prefixes the engine does not share."""
        return chunks * request.chunk_tokens >= self.index.block_size

    def _paying_group(self, request: Waiting, window: float, now: float) -> str | None:
        """The group for whose next member it pays to hold this request, in an engine that is busy anyway."""
        if not self._cascades:
            return None  # the engine reads no prefix once for several requests, so there is nothing to gain
        if not self._is_busy(now):
            return None
        group = self._group_of(request)
        company = None if group is None else self._company(request, group.chunks, group.members, window)
        return group.id if group is not None and company is not None and company.pays else None

    def _is_busy(self, now: float) -> bool:
        return self._full_step is not None and self._computing.backlog(now) >= BUSY_STEPS * self._full_step

    def _company(self, request: Waiting, chunks: int, members: int, window: float) -> Company:
        tokens = chunks * request.chunk_tokens
        path = self._groups.path_of(request.id)[: chunks // self._checkpoint_chunks]
        shared = self.costs.decode_load(0, tokens)
        weights = sum(terms.weight for terms in self._terms.values())
        worth = members * self._terms.get(request.tier, Terms()).weight / max(1, weights)
        return Company(
            self._arrivals.rate(path), saved_by_company(shared, window, self._full_step or 0.0), worth, members
        )

    def _slack_until(self, request: Waiting, now: float) -> float:
        """Sent later than this, its first token would be late. It would not come sooner if it were sent now: what the
        engine computes already goes first.
        """
        cached = self.predicted_tokens(request)
        own = self.costs.prefill_seconds(max(1.0, request.prompt_tokens - cached), cached, load=self._load) or 0.0
        latest = request.due - own * (1 + 2 * self.costs.margin)
        return latest if now + self._computing.backlog(now) < latest else now

    def _release_holds(self, now: float) -> None:
        if not self._inside:
            self._let_go(self._holds.release_all(), now, FlushReason.IDLE)
            return
        self._let_go(self._holds.release_ended(now), now, None)
        for held in self._holds.for_company():
            if held.request.id in self._holds.held and (reason := self._why_go(held, now)) is not None:
                self._let_go([found for found in [self._holds.release(held.request.id)] if found], now, reason)

    def _why_go(self, held: Held, now: float) -> FlushReason | None:
        """Why a request that is held for company goes now; None: it is held on."""
        if not self._is_busy(now):
            return FlushReason.NOT_BUSY
        group = self._group_of(held.request)
        if group is None:
            return FlushReason.NO_GAIN
        if group.members >= LARGEST_GROUP:
            return FlushReason.GROUP_FULL
        window = self._terms.get(held.request.tier, Terms()).window
        if not self._company(held.request, group.chunks, group.members, window).pays:
            return FlushReason.NO_GAIN
        return None

    def _let_go(self, released: list[Held], now: float, reason: FlushReason | None) -> None:
        """Back to the queue, where its share still stands. Reason None: the time that it was held until has come."""
        for held in released:
            before = self._flushed.get(held.request.id)
            so_far = now - held.since + (0.0 if before is None else before.held)
            self._flushed[held.request.id] = _Flushed(so_far, held.at_end if reason is None else reason)
            self._queue.push(held.request, returns=True)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _assume_first_bytes(self, now: float) -> None:
        """Where no first token will be seen, the prompt counts as computed when it should be."""
        for request_id in tuple(self._unseen):
            if self._computing.ends(request_id) <= now:
                self.first_byte(request_id)

    def _stop_computing(self, request_id: str, now: float) -> None:
        self._unseen.discard(request_id)
        self._computing.done(request_id, now)

    def _load_changed(self, sequences: int, context: float) -> None:
        """So many sequences with so many tokens more decode now."""
        self._decoding += sequences
        self._context += context
        self._load = self.costs.decode_load(self._decoding, self._context)
        if self._empty_step is not None:
            self._full_step = self._empty_step + self._load

    def _costs_changed(self) -> None:
        """Steps cost something else."""
        self._empty_step = self._full_step = self.costs.full_step_seconds()
        if self._full_step is not None:
            self._queue.urgency_credit = URGENCY_STEPS * self.costs.step_tokens
        self._load_changed(0, 0.0)

    def _effort(self, request: Waiting) -> int:
        """About how much of its prompt has to be computed, as a power of two of tokens: what differs by less is as
        quick, and a long prompt that is cached is no better than a short one.
        """
        left = request.prompt_tokens - self.index.known.matched(request.chunks) * request.chunk_tokens
        return math.frexp(left)[1] if left > 1 else 1

    def _note_pace(self, now: float, dispatched: int) -> None:
        if self._last_dispatch is not None and len(self._queue):
            between = (now - self._last_dispatch) / dispatched
            self._pace = between if self._pace is None else self._pace + _PACE_SMOOTHING * (between - self._pace)
        self._last_dispatch = now


def _cost(prompt_tokens: float, cached_tokens: float, output_tokens: float) -> float:
    """Engine work, in tokens of a prompt to compute."""
    return max(1.0, prompt_tokens - cached_tokens) + OUTPUT_PRICE * output_tokens
