"""The engine's core: schedule, forward, sample, postprocess; one step at a time, on one thread.

Everything here is synchronous and called by one thread; `engine_thread.py` makes that so. The only caller of
`BlockPool`, through its scheduler. Requests come in checked; what goes wrong in a step is the engine's own fault and
ends it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from cacheaware_api import wire

from .blocks import PUBLIC, BlockKey, BlockPool, NeverFits, UnknownTier, block_keys, root_of
from .blocks import Request as BlockRequest
from .chunk_budget import ChunkBudget
from .detokenizer import Decode, StopStrings, TextStream
from .errors import BadRequest
from .logs import values
from .metrics import Metrics
from .requests import Delta, Finish, Generation, RequestId, Submission, request_ids
from .runner import SequenceWork, StepOutput
from .sampler import SamplingParams, SequenceSampler, sample
from .scheduler import Scheduler, Step
from .sequences import RequestState, SequenceState, Sink
from .step_reports import StepTotals, query_context
from .token_reports import TokenReports

log = logging.getLogger(__name__)

LEAST_CHUNK = 16  # prompt tokens of a step in which decodes should have had all the time: prompts go on
LAYOUT_EVERY_S = 1.0  # how blocks lie is for metrics, and costs a look at each table

_Delivery = tuple[RequestState, list[Delta], Exception | None]


class Runner(Protocol):
    """What the engine needs of `ModelRunner`: the one way to tensors."""

    num_blocks: int
    block_size: int
    bytes_per_token: int
    kv_form: str
    """In what form keys and values are stored: part of blocks' keys."""

    def forward(self, work: Sequence[SequenceWork]) -> StepOutput: ...
    def copy_block(self, source: int, target: int) -> None: ...


class Engine:
    """One model's requests and blocks."""

    def __init__(
        self,
        *,
        runner: Runner,
        pool: BlockPool,
        decode: Decode,
        eos_token_ids: frozenset[int],
        max_num_batched_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._decode = decode
        self._reports = TokenReports(decode)
        self._eos = eos_token_ids
        self._metrics = metrics
        self._clock = clock
        self._root = root_of(runner.kv_form)
        self._scheduler = Scheduler(pool, max_num_batched_tokens, self._root)
        self._chunks = ChunkBudget(least=LEAST_CHUNK, most=max_num_batched_tokens)
        self._promised: dict[str, float] = {}  # seconds between tokens, by tier
        self._kv_bytes = 0  # that the last step read
        self._internal_ids = request_ids()
        self._prewarming: set[RequestId] = set()
        self.totals = StepTotals()
        self.layout = pool.layout()
        self._layout_read = clock()

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.states)  # includes the engine's own requests, for public prefixes

    @property
    def live(self) -> tuple[RequestId, ...]:
        """Requests that wait or run, oldest first."""
        return tuple(state.submission.id for state in self._scheduler.states)

    def ledger(self) -> wire.Ledger:
        return self._pool.ledger()

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, outbox: Sink | None) -> None:
        """From now on it waits. Raises `BadRequest` for what can never run; then nothing changed."""
        generation = submission.generation
        sequences = [
            SequenceState(
                index,
                submission.prompt,
                TextStream(self._decode, submission.prompt),
                StopStrings(generation.stop),
                SequenceSampler(
                    generation.sampling,
                    index,
                    prompt=submission.prompt,
                    constraint=generation.constraint.copy() if generation.constraint is not None else None,
                ),
            )
            for index in range(generation.n)
        ]
        length, block_size = len(submission.prompt), self._pool.block_size
        blocks = BlockRequest(
            id=submission.id,
            tier=submission.tier,
            sequences=generation.n,
            keys=[[] for _ in sequences],
            blocks=[0 for _ in sequences],
            # The last token is never computed: nothing comes after it.
            max_blocks=-(-(length + generation.max_tokens - 1) // block_size),
            prompt_blocks=length // block_size,
            group=submission.group,
            prompt_tokens=length if generation.prompt_logprobs is None else 0,  # looks nothing up: neither hit nor miss
        )
        state = RequestState(submission, blocks, sequences, outbox, self._clock())
        try:
            self._scheduler.add(state)
        except UnknownTier as error:
            raise BadRequest(str(error), param="vllm_xargs.cacheaware_tier", code="unknown_tier") from error
        except NeverFits as error:
            raise BadRequest(str(error), code="never_fits") from error

    def abort(self, request_id: RequestId) -> None:
        """Its client is gone: release everything, at whatever stage it is. Not live any more: nothing happens."""
        if (state := self._scheduler.get(request_id)) is not None:
            _abort_sequences(state)
            self._scheduler.remove(state)
            self._deliver(state, [])

    def fail_all(self, error: Exception) -> None:
        """The process is about to end: every live request ends with `error`. Blocks are not given back any more."""
        for state in self._scheduler.states:
            _abort_sequences(state)
            self._deliver(state, [], error)

    # -- quotas and public prefixes -----------------------------------------------------------------------------------

    def set_quotas(self, quotas: wire.Quotas) -> wire.Ledger:
        self._pool.set_quotas(quotas)
        self._promised = {
            tier.name: tier.time_per_output_token_s for tier in quotas.tiers if tier.time_per_output_token_s is not None
        }
        return self._pool.ledger()

    def set_hints(self, hints: wire.Hints) -> Mapping[str, int]:
        """Blocks that are set aside now, by group."""
        return self._pool.set_hints(hints)

    def set_public(self, prefixes: Mapping[str, Sequence[int]]) -> wire.Ledger:
        """Make these token prefixes public and compute what of them is not resident yet, in the steps to come."""
        block_size = self._pool.block_size
        keys: dict[str, list[BlockKey]] = {
            name: block_keys(tokens, block_size, root=self._root) for name, tokens in prefixes.items()
        }
        self._pool.set_public(keys)
        self._scheduler.refresh_keys()
        for request_id in list(self._prewarming):
            self.abort(request_id)
        for name, tokens in prefixes.items():
            if keys[name]:
                self._prewarm(tuple(tokens[: len(keys[name]) * block_size]))
        return self._pool.ledger()

    def _prewarm(self, prompt: tuple[int, ...]) -> None:
        """A request of the public share that computes `prompt` and makes one token that nobody reads."""
        request_id = RequestId(f"public-{self._internal_ids()}")
        generation = Generation(SamplingParams(temperature=0.0), max_tokens=1)
        self.submit(Submission(request_id, PUBLIC, prompt, generation), outbox=None)
        self._prewarming.add(request_id)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self, before_delivery: Callable[[], None] = lambda: None) -> bool:
        """One step; False if there was nothing to compute.

        `before_delivery` is called when accounts and totals are those after the step and no client has heard of it yet.
        """
        started = self._clock()
        step = self._scheduler.schedule(self._prompt_tokens())
        deliveries = self._account(step)
        if step.work:
            deliveries += self._compute(step, started)
        if self._clock() - self._layout_read >= LAYOUT_EVERY_S:
            self._read_layout()
        before_delivery()
        # What scheduling ended and what was sampled may be of one request, which must hear of its end last.
        merged: dict[RequestId, _Delivery] = {}
        for state, deltas, error in deliveries:
            _, earlier, failure = merged.get(state.submission.id, (state, [], None))
            merged[state.submission.id] = (state, [*earlier, *deltas], failure or error)
        for state, deltas, error in merged.values():
            self._deliver(state, deltas, error)
        return bool(step.work)

    def _prompt_tokens(self) -> int | None:
        """How much of prompts a step may compute so that those who decode get their next token as promised."""
        if not self._promised:
            return None
        decoding = list(self._scheduler.decoding())
        promised = [self._promised[tier] for state in decoding if (tier := state.submission.tier) in self._promised]
        return self._chunks.tokens(min(promised, default=None), len(decoding), self._kv_bytes)

    def _read_layout(self) -> None:
        self._layout_read = self._clock()
        self.layout = self._pool.layout(self._scheduler.computed_tokens)

    def _compute(self, step: Step, started: float) -> list[_Delivery]:
        output = self._runner.forward(
            [
                SequenceWork(
                    tokens=work.sequence.tokens[work.start : work.end],
                    start=work.start,
                    table=work.request.blocks.tables[work.sequence.index],
                    sample=range(work.end - work.start) if work.request.reports_prompt else work.sample,
                )
                for work in step.work
            ]
        )
        for copy in self._scheduler.complete(step):
            self._runner.copy_block(copy.source, copy.target)
        deliveries = self._sample(step, output)
        self._metrics.step(read=output.kv_bytes_read, unique=output.unique_kv_bytes, in_place=output.kv_bytes_in_place)
        tokens, seconds = sum(work.end - work.start for work in step.work), self._clock() - started
        self._chunks.learn(tokens, output.kv_bytes_read, seconds)
        self._kv_bytes = output.kv_bytes_read
        self.totals = self.totals.plus(
            tokens=tokens,
            query_context=sum(query_context(work.start, work.end) for work in step.work),
            kv_bytes_read=output.kv_bytes_read,
            unique_kv_bytes=output.unique_kv_bytes,
            groups=tuple(wire.StepGroup(group.members, group.tokens, cascade=True) for group in output.groups),
            seconds=seconds,
        )
        return deliveries

    def _account(self, step: Step) -> list[_Delivery]:
        """What scheduling decided, told to clients and metrics."""
        for state in step.admitted:
            if state.outbox is not None:
                cached = state.cached_tokens or 0
                state.outbox.admitted(cached)
                self._metrics.admitted(len(state.submission.prompt), state.blocks.prompt_tokens or 0, cached)
        self._metrics.preempted(len(step.preempted))
        deliveries: list[_Delivery] = []
        for state, why in step.refused:
            _abort_sequences(state)
            error = BadRequest(f"quotas changed while the request waited: {why}", code="never_fits")
            deliveries.append((state, [], error))
        for state, sequence in step.ended:
            deliveries.append((state, [_delta(state, sequence, _rest_of_text(sequence), ())], None))
        return deliveries

    def _sample(self, step: Step, output: StepOutput) -> list[_Delivery]:
        """One token for each sequence whose newest token was computed; a prompt's logits serve all its sequences."""
        rows: list[int] = []
        chosen: list[tuple[RequestState, SequenceState]] = []
        row = 0
        for work in step.work:
            if work.request.reports_prompt:
                self._reports.add_of_prompt(work, output.logits[row : row + work.end - work.start])
                row += work.end - work.start - work.sample
            if work.sample:
                sequences = work.request.sequences if work.sequence.generated == 0 else [work.sequence]
                rows.extend(row for _ in sequences)
                chosen.extend((work.request, sequence) for sequence in sequences)
                row += 1
        if not chosen:
            return []
        in_order = rows == list(range(len(output.logits)))  # as many rows are not the same rows
        logits = output.logits if in_order else output.logits[torch.tensor(rows)]
        banned = {
            row: self._end_tokens(state.submission.generation)
            for row, (state, sequence) in enumerate(chosen)
            if sequence.generated < state.submission.generation.min_tokens
        }
        banned = {row: tokens for row, tokens in banned.items() if tokens}
        tokens = sample(logits, [sequence.sampler for _, sequence in chosen], banned)
        reports = self._reports.of_generated(logits, [sequence for _, sequence in chosen], tokens)
        now = self._clock()
        self._count_tokens(chosen, now)
        deliveries: dict[RequestId, _Delivery] = {}
        for row, ((state, sequence), token) in enumerate(zip(chosen, tokens, strict=True)):
            first = sequence.generated == 0
            delta = self._accept(state, sequence, token, now)
            if first and state.submission.generation.prompt_logprobs is not None:
                delta = replace(delta, prompt_reports=tuple(state.prompt_reports))
            if row in reports:
                delta = replace(delta, reports=(reports[row],))
            if (delivery := deliveries.get(state.submission.id)) is None:
                deliveries[state.submission.id] = (state, [delta], None)
            else:
                delivery[1].append(delta)
        return list(deliveries.values())

    def _count_tokens(self, chosen: Sequence[tuple[RequestState, SequenceState]], now: float) -> None:
        """Tokens that came now, into the metrics, but for the engine's own requests."""
        own = [(state, sequence) for state, sequence in chosen if state.outbox is not None]
        self._metrics.generated(len(own))
        for state in {id(state): state for state, _ in own if state.first_token is None}.values():
            self._metrics.first_token(now - state.arrived)
        waited = Counter(now - sequence.last_token for _, sequence in own if sequence.last_token is not None)
        for seconds, sequences in waited.items():
            self._metrics.next_tokens(seconds, sequences)

    def _accept(self, state: RequestState, sequence: SequenceState, token: int, now: float) -> Delta:
        """The sequence has one more token; it may be its last."""
        generation = state.submission.generation
        sequence.tokens.append(token)
        state.first_token = now if state.first_token is None else state.first_token
        sequence.last_token = now
        text = ""
        if token in self._end_tokens(generation) and sequence.generated > generation.min_tokens:
            sequence.finish = Finish.STOP
            sequence.stop_reason = token if token in generation.stop_token_ids else None
        else:
            text = sequence.text.push(token)
            if sequence.generated >= generation.min_tokens:
                text = sequence.stops.push(text)
            if sequence.stops.matched is not None:
                sequence.finish = Finish.STOP
                sequence.stop_reason = sequence.stops.matched
            elif sequence.generated >= generation.max_tokens:
                sequence.finish = Finish.LENGTH
        if sequence.finish is not None:
            text += _rest_of_text(sequence)
            self._scheduler.finish(state, sequence)
        return _delta(state, sequence, text, (token,))

    def _end_tokens(self, generation: Generation) -> frozenset[int]:
        return generation.stop_token_ids if generation.ignore_eos else self._eos | generation.stop_token_ids

    def _deliver(self, state: RequestState, deltas: list[Delta], error: Exception | None = None) -> None:
        """Tell the client what is new; after the last of it, the end. A request is counted before its client knows."""
        ended = all(sequence.finish is not None for sequence in state.sequences) and not state.closed
        if ended:
            state.closed = True
            self._count(state, error)
        if state.outbox is not None:
            state.outbox.post(deltas)
            if ended:
                state.outbox.close(error)

    def _count(self, state: RequestState, error: Exception | None) -> None:
        """Every sequence has ended: into the metrics with it, and one line into the log, with nothing of its text."""
        if state.outbox is None:
            self._prewarming.discard(state.submission.id)
            return
        now = self._clock()
        for sequence in state.sequences:
            self._metrics.ended(sequence.finish or Finish.ABORT)
        self._metrics.request_ended(now - state.arrived)
        log.info(
            "request",
            extra=values(
                id=state.submission.id,
                label=state.submission.label or None,
                tier=state.submission.tier or None,
                prompt_tokens=len(state.submission.prompt),
                cached_tokens=state.cached_tokens,
                output_tokens=sum(sequence.generated for sequence in state.sequences),
                finish=",".join(sequence.finish or Finish.ABORT for sequence in state.sequences),
                preemptions=state.preemptions or None,
                ttft_s=None if state.first_token is None else state.first_token - state.arrived,
                seconds=now - state.arrived,
                error=None if error is None else type(error).__name__,
            ),
        )


def _abort_sequences(state: RequestState) -> None:
    for sequence in state.sequences:
        if sequence.finish is None:
            sequence.finish = Finish.ABORT


def _rest_of_text(sequence: SequenceState) -> str:
    """What was held back for an unfinished character or a possible stop string."""
    if sequence.stops.matched is not None:
        return ""
    return sequence.stops.push(sequence.text.flush()) + sequence.stops.flush()


def _delta(state: RequestState, sequence: SequenceState, text: str, tokens: tuple[int, ...]) -> Delta:
    return Delta(state.submission.first_index + sequence.index, text, tokens, sequence.finish, sequence.stop_reason)
