"""Turns waiting and running requests into one step's work, and what a step computed back into state. No tensors.

A step is growth of what runs, admission of what waits, then work within `max_num_batched_tokens`: decodes first, then
prompt chunks in arrival order. Whether a request may have blocks, and who yields for it, is decided by `BlockPool`;
this module only asks it, in arrival order, and follows what it answers.

A preempted request loses its blocks and nothing else. All its tokens so far are then its prompt, and what is still
cached of them is hit when it is admitted again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .blocks import ROOT, Admitted, BlockId, BlockKey, BlockPool, Ended, Grown, Stage, Yielded, next_key
from .blocks import Request as BlockRequest
from .requests import Finish, RequestId
from .sequences import RequestState, SequenceState

OFFERED_OF_A_TIER = 16
OFFERED_OTHERS = 32
REPORTED_CHUNK = 64  # tokens of a prompt in a step that are to be told of: each has logits over the whole vocabulary


class Work(NamedTuple):
    """A run of one sequence's tokens to compute; `sample` says that the run ends at its newest token."""

    request: RequestState
    sequence: SequenceState
    start: int
    end: int

    @property
    def sample(self) -> bool:
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Copy:
    """The partly filled last block of a prompt, copied for another sequence of the request."""

    source: BlockId
    target: BlockId


@dataclass(slots=True)
class Step:
    work: list[Work] = field(default_factory=list)
    ended: list[tuple[RequestState, SequenceState]] = field(default_factory=list)
    """Sequences that can get no more blocks: they end with `length`."""
    refused: list[tuple[RequestState, str]] = field(default_factory=list)
    """Requests that never started and no longer fit, after quotas changed."""
    admitted: list[RequestState] = field(default_factory=list)
    """Requests that run for the first time."""
    preempted: list[RequestState] = field(default_factory=list)


class Scheduler:
    """All live requests of an engine. One caller at a time."""

    def __init__(self, pool: BlockPool, max_num_batched_tokens: int, root: BlockKey = ROOT) -> None:
        """`root` is where keys begin: that of the form in which keys and values are stored."""
        self._pool = pool
        self._root = root
        self._block_size = pool.block_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._turn = 0  # where in a long queue the next step goes on offering
        self._states: dict[RequestId, RequestState] = {}

    @property
    def states(self) -> Sequence[RequestState]:
        """Live requests, oldest submission first."""
        return tuple(self._states.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens of running sequences that have keys and values in blocks."""
        return sum(
            sequence.computed for state in self._running() for sequence in state.sequences if sequence.finish is None
        )

    def get(self, request_id: RequestId) -> RequestState | None:
        return self._states.get(request_id)

    def add(self, state: RequestState) -> None:
        """From now on it waits. Raises what `BlockPool.submit` raises; then nothing changed."""
        self._describe(state)
        self._pool.submit(state.blocks)
        self._states[state.submission.id] = state

    def remove(self, state: RequestState) -> None:
        """It ended or was aborted, at whatever stage: its blocks are released. A second call does nothing."""
        if self._states.pop(state.submission.id, None) is not None:
            self._pool.release(state.blocks)

    def finish(self, state: RequestState, sequence: SequenceState) -> None:
        """One sequence ended (its `finish` is set); with the last one the request ends."""
        if any(other.finish is None for other in state.sequences):
            self._pool.finish_sequence(state.blocks, sequence.index)
        else:
            self.remove(state)

    def refresh_keys(self) -> None:
        """The public prefixes changed: what waits looks for blocks under its new keys."""
        for state in self._states.values():
            if not self._is_running(state):
                for sequence in state.sequences:
                    sequence.keys.clear()
                self._describe(state)

    # -- one step -----------------------------------------------------------------------------------------------------

    def decoding(self) -> Iterator[RequestState]:
        """What runs and has said something: those who wait for the next token."""
        return (state for state in self._running() if state.first_token is not None)

    def schedule(self, prompt_tokens: int | None = None) -> Step:
        """The next step's work, with at most so many tokens of prompts; None: as many as a step has room for."""
        step = Step()
        self._grow(step)
        self._admit(step)
        budget = self._max_num_batched_tokens
        ready = self._ready_work()
        # Decodes first: a prompt that arrives must not hold up the texts that people are reading.
        step.work = [item for item in ready if item.end - item.start == 1][:budget]
        budget -= len(step.work)
        if prompt_tokens is not None:
            budget = min(budget, prompt_tokens)
        for item in ready:
            if item.end - item.start > 1 and budget > 0:
                tokens = min(item.end - item.start, budget, REPORTED_CHUNK if item.request.reports_prompt else budget)
                step.work.append(item._replace(end=item.start + tokens))
                budget -= tokens
        return step

    def complete(self, step: Step) -> list[Copy]:
        """The step's work is computed: hash the blocks that are full now, and part the sequences of n > 1.

        Returns the copies to make before the next step; by then every sequence of a parted request can be sampled.
        """
        copies: list[Copy] = []
        for work in step.work:
            work.sequence.computed = work.end
            if work.end // self._block_size > work.start // self._block_size:
                self._fill(work)
            if not work.request.forked and work.sample:
                copies.extend(self._fork(work.request, work.sequence))
        return copies

    def _grow(self, step: Step) -> None:
        """Room for the next token of everything that decodes; what cannot have it yields or ends."""
        for state in self._running():
            for sequence in state.sequences:
                while sequence.finish is None and self._is_running(state) and self._lacks_block(state, sequence):
                    growth = self._pool.grow(state.blocks, sequence.index)
                    match growth:
                        case Grown():
                            self._suspend(growth.preempted, step)
                        case Yielded():
                            self._suspend([*growth.preempted, state.blocks], step)
                        case Ended():
                            self._suspend(growth.preempted, step)
                            sequence.finish = Finish.LENGTH
                            step.ended.append((state, sequence))
                            self.finish(state, sequence)

    def _admit(self, step: Step) -> None:
        """Offer what waits, oldest first, as long as the step has room to compute something of it."""
        if not (waiting := self._pool.waiting):
            return
        room = self._room()
        for request in self._offered(waiting):
            if room <= 0:
                return
            if self._offer(request, step, idle=False):
                room = self._room()
        if not self._pool.running:  # nothing else can be admitted: idle cache never idles the engine
            for request in list(self._pool.waiting):
                if self._offer(request, step, idle=True):
                    return

    def _offered(self, waiting: Sequence[BlockRequest]) -> Sequence[BlockRequest]:
        """Whom to offer admission in this step, in arrival order.

        All of a short queue. Of a long one the oldest of each tier, and some of the others in turn: one that may
        overtake its elders gets to it within a few steps, and a step's bookkeeping does not grow with the queue.
        """
        if len(waiting) <= OFFERED_OTHERS:
            return waiting
        ahead: Counter[str] = Counter()
        heads, others = set(), []
        for request in waiting:
            ahead[request.tier] += 1
            if ahead[request.tier] <= OFFERED_OF_A_TIER:
                heads.add(request.id)
            else:
                others.append(request.id)
        first = self._turn % max(1, len(others))
        self._turn = first + OFFERED_OTHERS
        chosen = heads.union(others[first : first + OFFERED_OTHERS])
        return [request for request in waiting if request.id in chosen]

    def _offer(self, request: BlockRequest, step: Step, idle: bool) -> bool:
        state = self._states[RequestId(request.id)]
        admission = self._pool.admit(request, idle=idle)
        match admission:
            case Admitted():
                self._suspend(admission.preempted, step)
                for sequence, hit_blocks in zip(state.sequences, admission.hit_blocks, strict=True):
                    sequence.computed = hit_blocks * self._block_size
                if state.cached_tokens is None:
                    state.cached_tokens = state.sequences[0].computed
                    step.admitted.append(state)
                return True
            case Ended():
                if state.cached_tokens is None:
                    step.refused.append((state, admission.why))
                else:
                    for sequence in state.sequences:
                        if sequence.finish is None:
                            sequence.finish = Finish.LENGTH
                            step.ended.append((state, sequence))
                self.remove(state)
        return False

    def _suspend(self, requests: Sequence[BlockRequest], step: Step) -> None:
        for request in requests:
            state = self._states[RequestId(request.id)]
            for sequence in state.sequences:
                sequence.computed = 0
            state.preemptions += 1
            self._describe(state)
            step.preempted.append(state)

    # -- what is ready ------------------------------------------------------------------------------------------------

    def _running(self) -> list[RequestState]:
        return [self._states[RequestId(request.id)] for request in self._pool.running]

    def _is_running(self, state: RequestState) -> bool:
        return state.blocks.stage is Stage.RUNNING

    def _lacks_block(self, state: RequestState, sequence: SequenceState) -> bool:
        length = len(sequence.tokens)
        if length % self._block_size != 1 % self._block_size or length - sequence.computed != 1:
            return False  # the newest token begins no block, or is not alone: tables cover all they were admitted with
        if not (state.forked or sequence is state.sequences[0]):
            return False
        return len(state.blocks.tables[sequence.index]) * self._block_size < length

    def _ready(self, state: RequestState) -> list[Work]:
        """The unfinished sequences that can compute something: one that leads, and others once what they share is."""
        if len(state.sequences) == 1:
            (sequence,) = state.sequences
            return [Work(state, sequence, sequence.computed, len(sequence.tokens))]
        unfinished = [sequence for sequence in state.sequences if sequence.finish is None]
        leader = unfinished[0]
        shared = state.blocks.prompt_blocks * self._block_size
        if not state.forked or leader.computed < shared:
            followers = []
        else:
            followers = unfinished[1:]
            for sequence in followers:
                sequence.computed = max(sequence.computed, shared)
        return [Work(state, sequence, sequence.computed, len(sequence.tokens)) for sequence in [leader, *followers]]

    def _ready_work(self) -> list[Work]:
        """What the running requests can compute, oldest first.

        A prompt that comes to blocks which an older one is about to compute waits for them: prompts with one prefix
        that arrive together compute it once. The older one is running, so it goes on in this step or waits in turn for
        one older still.
        """
        work: list[Work] = []
        coming: set[BlockKey] = set()  # what prompts ahead of this one will fill
        for state in self._running():
            leader = state.leader
            if leader.uncomputed > 1 and not state.reports_prompt:
                self._take_over(state, leader)
                keys = leader.keys[leader.computed // self._block_size :]
                if keys and keys[0] in coming and leader.computed % self._block_size == 0:
                    continue
                coming.update(keys)
            work.extend(self._ready(state))
        return work

    def _take_over(self, state: RequestState, sequence: SequenceState) -> None:
        """Blocks that others have filled since it was admitted are the sequence's too, without computing them."""
        hittable = (len(sequence.tokens) - 1) // self._block_size
        while (
            sequence.computed % self._block_size == 0
            and (index := sequence.computed // self._block_size) < min(hittable, len(sequence.keys))
            and self._pool.is_resident(sequence.keys[index])
        ):
            self._pool.fill(state.blocks, sequence.index, index, sequence.keys[index])
            sequence.computed += self._block_size

    def _room(self) -> int:
        """Tokens that the step has left after what runs."""
        return self._max_num_batched_tokens - sum(item.end - item.start for item in self._ready_work())

    # -- blocks of a sequence -----------------------------------------------------------------------------------------

    def _describe(self, state: RequestState) -> None:
        """Tell the pool what the request must be admitted with: all it has."""
        for sequence in state.sequences:
            if sequence.finish is not None:
                continue  # given back already; the pool leaves it out
            length = len(sequence.tokens)
            hittable = (length - 1) // self._block_size  # at least one token is computed, to have logits
            keys = self._keys(state, sequence, hittable)[:hittable]
            state.blocks.keys[sequence.index] = [] if state.reports_prompt else keys
            state.blocks.blocks[sequence.index] = -(-length // self._block_size)

    def _keys(self, state: RequestState, sequence: SequenceState, blocks: int) -> list[BlockKey]:
        """The sequence's keys, at least of its first `blocks` blocks."""
        while (done := len(sequence.keys)) < blocks:
            tokens = sequence.tokens[done * self._block_size : (done + 1) * self._block_size]
            parent = sequence.keys[-1] if sequence.keys else self._root
            sequence.keys.append(next_key(parent, tokens, state.submission.salt, self._pool.public_keys, self._root))
        return sequence.keys

    def _fill(self, work: Work) -> None:
        full = work.end // self._block_size
        keys = self._keys(work.request, work.sequence, full)
        for index in range(work.start // self._block_size, full):
            self._pool.fill(work.request.blocks, work.sequence.index, index, keys[index])

    def _fork(self, state: RequestState, leader: SequenceState) -> list[Copy]:
        """The prompt is computed: the other sequences start behind it, each with a copy of its partly filled block."""
        state.forked = True
        tables = state.blocks.tables
        tail = leader.prompt_length // self._block_size
        copies: list[Copy] = []
        for sequence in state.sequences[1:]:
            sequence.computed = leader.computed
            sequence.keys = list(leader.keys)
            if leader.prompt_length % self._block_size:
                copies.append(Copy(tables[leader.index][tail], tables[sequence.index][tail]))
        return copies
