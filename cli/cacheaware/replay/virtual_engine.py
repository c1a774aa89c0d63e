"""An engine in virtual time: what a step takes is a cost model's, what a request holds is `BlockPool`'s. No tensors.

It works as the Torch engine does: room for what decodes, then admission of what waits in arrival order, then a step of
decodes and prompt chunks within a budget of tokens; a prefix that several prompts bring at once is computed once. Where
nothing but decoding goes on, many equal steps are taken at once, up to the next one at which a sequence ends, needs a
block, or the world has something to say; that changes no result, and makes a day of traffic a matter of minutes.

An engine that `shares_reads` reads what several of its answers start with once in a step, for groups on one level, as
the Torch engine does; others read it for each.

Answers are lengths here. Their blocks are held while the request runs and cannot be hit afterwards: what was answered
is not in a trace.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cacheaware.replay.engine_cost import EngineCost
from cacheaware.replay.requests import Request
from cacheaware_engine.blocks import (
    Admitted,
    BlockPool,
    Ended,
    Grown,
    NeverFits,
    Stage,
    Waiting,
    WaitReason,
    Yielded,
)
from cacheaware_engine.blocks import Request as BlockRequest
from cacheaware_sidecar.scheduling.groups import Group, GroupTree

OFFERED_OF_A_TIER = 16  # as the Torch engine offers: of a long queue the oldest of each tier


@dataclass(eq=False, slots=True)
class Run:
    """One request inside the engine."""

    request: Request
    blocks: BlockRequest
    cached_tokens: int | None = None  # of its prompt, not computed for it; None: never admitted
    admitted_at: float | None = None  # the first time
    waited_for: WaitReason | None = None  # what it lacked before that, when it was turned away last
    computed: int = 0  # tokens whose KV is there
    reached: int = 0  # the most that it ever was: what it computed before it yielded is no hit when others have it
    generated: int = 0
    started: int = 0  # the count of decode steps when it began to decode, less what it had generated then
    version: int = 0  # grows when what is planned for it no longer holds
    decodes: bool = False

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


@dataclass(slots=True)
class StepResult:
    """What came of a step (of many equal ones): `tokens` were computed in `seconds`."""

    admitted: list[Run] = field(default_factory=list)
    first_tokens: list[Run] = field(default_factory=list)
    finished: list[Run] = field(default_factory=list)
    refused: list[Run] = field(default_factory=list)  # they can never fit
    preempted: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    decoded_tokens: int = 0
    query_context: float = 0.0
    context: float = 0.0  # tokens that decodes attended to
    context_read: float = 0.0  # of them, as often as they were read
    groups: tuple[Group, ...] = ()  # who read a start together in the last step
    seconds: float = 0.0


class VirtualEngine:
    """Between two steps: `begin`, any number of `submit`, `start`; then `finish` at `ends`. `submit` comes any time."""

    def __init__(
        self, pool: BlockPool, cost: EngineCost, clock: Callable[[], float], *, shares_reads: bool = False
    ) -> None:
        self.pool = pool
        self.cost = cost
        self.ends: float | None = None  # when the step that is being computed will be done
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._filling: list[Run] = []  # their prompts are being computed; in the order of admission
        self._due: list[tuple[int, int, int, Run]] = []  # decode step, number, version: see `_expect`
        self._short: list[tuple[int, int, Run]] = []  # number, version: it has no block for its next token
        self._decoding = 0
        self._context = 0  # tokens of all sequences that decode
        self._starts = GroupTree(checkpoint_chunks=1) if shares_reads else None  # their prompts
        self._regroup = False  # others decode than when the groups were formed
        self._groups: tuple[Group, ...] = ()
        self._saved = 0  # tokens that they need not read twice in a step
        self._decoded = 0  # decode steps so far
        self._leap = 0  # steps that the present one stands for; 0: it has prompt chunks
        self._chunks: list[tuple[Run, int]] = []
        self._ready_runs: list[Run] | None = None  # of `_filling`; None: to be found anew
        self._offered_at: int | None = None  # the state of the pool in which nobody could enter
        self._result = StepResult()

    # -- what is inside ------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        return not self._runs

    @property
    def waiting(self) -> int:
        return len(self.pool.waiting)

    @property
    def hungry(self) -> bool:
        """A step is about to start, nothing waits for it, and it has room for a prompt."""
        return self.ends is None and not self.pool.waiting and self.room > 0

    @property
    def room(self) -> int:
        """Tokens that the next step has left for prompts that are not in it yet."""
        wanted = self._decoding + sum(run.tokens - run.computed for run in self._ready())
        return self.cost.max_batched_tokens - wanted if self.pool.free_slots else 0

    def cached_blocks(self, request: Request) -> int:
        """Leading blocks of its prompt that it would hit now."""
        return self.pool.resident(request.hittable(self.pool.block_size))

    def submit(self, request: Request, tier: str) -> str | None:
        """It waits in the engine from now on, charged to `tier`; the arithmetic, if it can never fit."""
        size = self.pool.block_size
        blocks = BlockRequest(
            id=request.id,
            tier=tier,
            sequences=1,
            keys=[list(request.hittable(size))],
            blocks=[-(-request.prompt_tokens // size)],
            max_blocks=-(-(request.prompt_tokens + request.output_tokens) // size),
            prompt_tokens=request.prompt_tokens,
        )
        try:
            self.pool.submit(blocks)
        except NeverFits as error:
            return str(error)
        self._runs[request.id] = Run(request, blocks)
        if self.ends is None:
            self._admit()
        return None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step is about to start: what decodes gets its blocks first, then what waits may enter."""
        assert self.ends is None, "a step is being computed"
        self._grow()
        self._admit()

    def start(self, horizon: float) -> StepResult | None:
        """Start a step now; equal steps that follow are joined up to `horizon`.

        Where there is nothing to compute no step starts: the result is what came of it all the same.
        """
        self._admit_to_idle_engine()
        now = self._clock()
        if self._starts is not None and self._regroup:
            self._regroup = False
            self._groups = tuple(self._starts.groups())
            self._saved = self.pool.block_size * sum((group.members - 1) * group.chunks for group in self._groups)
        self._chunks = self._plan()
        if self._chunks:
            tokens = sum(count for _, count in self._chunks)
            reach = sum(count * run.computed + count * (count + 1) / 2 for run, count in self._chunks)
            self._leap = 0
            seconds = self.cost.step(tokens + self._decoding, reach, self._context - self._saved)
            self._took(1, tokens, self._decoding, reach, self._context, seconds)
        elif self._decoding:
            steps = self._steps_until(horizon - now)
            self._leap = steps
            context = steps * self._context + self._decoding * steps * (steps - 1) / 2
            read = context - steps * self._saved
            seconds = steps * self.cost.step(self._decoding, 0, 0) + read * self.cost.kv_read
            self._took(steps, 0, self._decoding * steps, 0, context, seconds)
        else:
            return self._taken()
        self.ends = now + self._result.seconds
        return None

    def finish(self) -> StepResult:
        """The step's end: what it brought."""
        assert self.ends is not None, "no step is being computed"
        self.ends = None
        self._ready_runs = None
        steps = max(1, self._leap)
        self._decoded += steps
        self._context += self._decoding * steps
        for run, count in self._chunks:
            self._compute(run, count)
        while self._due and self._due[0][0] <= self._decoded:
            _, number, version, run = heapq.heappop(self._due)
            if version != run.version:
                continue
            if self._decoded - run.started >= run.request.output_tokens:
                self._stop_decoding(run)
                self._end(run)
            else:
                self._short.append((number, version, run))
        return self._taken()

    def _taken(self) -> StepResult:
        result, self._result = self._result, StepResult()
        return result

    def _took(
        self, steps: int, prompt: int, decoded: int, query_context: float, context: float, seconds: float
    ) -> None:
        result = self._result
        result.steps, result.prompt_tokens, result.decoded_tokens = steps, prompt, decoded
        result.query_context, result.context, result.seconds = query_context, context, seconds
        result.context_read, result.groups = context - steps * self._saved, self._groups

    def _steps_until(self, seconds: float) -> int:
        """Equal decode steps up to the first that ends at or after so long, or at which a sequence is due."""
        while self._due[0][2] != self._due[0][3].version:
            heapq.heappop(self._due)
        most = max(1, self._due[0][0] - self._decoded)
        if seconds <= 0 or most == 1:
            return 1
        if math.isinf(seconds):
            return most
        # steps · a + steps² · b reaches `seconds`; the root in the form that does not cancel.
        b = self._decoding * self.cost.kv_read / 2
        a = self.cost.step(self._decoding, 0, self._context - self._saved) - b
        if a + b <= 0:
            return most  # steps that take no time
        steps = 2 * seconds / (a + math.sqrt(a * a + 4 * b * seconds))
        return max(1, min(most, math.ceil(steps - 1e-9)))

    def _plan(self) -> list[tuple[Run, int]]:
        """Prompt chunks of the next step, behind its decodes."""
        budget = self.cost.max_batched_tokens - self._decoding
        chunks = []
        for run in self._ready():
            if budget <= 0:
                break
            count = min(budget, run.tokens - run.computed)
            chunks.append((run, count))
            budget -= count
        return chunks

    def _ready(self) -> list[Run]:
        """The prompts that can be computed, in the order of admission.

        One that comes to blocks which an older one is about to compute waits for them, and blocks that others have
        filled since it was admitted are its own too: prompts with one prefix that come together compute it once.
        """
        if self._ready_runs is None:
            self._ready_runs = []
            coming: set[bytes] = set()  # what the prompts ahead will fill
            for run in self._filling:
                self._take_over(run)
                keys = run.request.keys[run.computed // self.pool.block_size :]
                if keys and keys[0] in coming and run.computed % self.pool.block_size == 0:
                    continue
                coming.update(keys)
                self._ready_runs.append(run)
        return self._ready_runs

    def _take_over(self, run: Run) -> None:
        size, before = self.pool.block_size, run.computed
        hittable = (run.tokens - 1) // size
        keys = run.request.keys[:hittable]
        while run.computed % size == 0 and (index := run.computed // size) < len(keys):
            if not self.pool.is_resident(keys[index]):
                break
            self.pool.fill(run.blocks, 0, index, keys[index])
            run.computed += size
        if not run.generated and run.cached_tokens is not None:
            run.cached_tokens += max(0, run.computed - max(before, run.reached))
        run.reached = max(run.reached, run.computed)

    def _compute(self, run: Run, count: int) -> None:
        """A chunk of its prompt is computed; with the last one it has a token, the first or the one after a yield."""
        size, before = self.pool.block_size, run.computed
        run.computed += count
        run.reached = max(run.reached, run.computed)
        keys = run.request.keys
        for index in range(before // size, min(len(keys), run.computed // size)):
            self.pool.fill(run.blocks, 0, index, keys[index])
        if run.computed < run.tokens:
            return
        self._filling.remove(run)
        run.generated += 1
        if run.generated == 1:
            self._result.first_tokens.append(run)
        if run.generated >= run.request.output_tokens:
            self._end(run)
            return
        run.decodes, run.started = True, self._decoded - run.generated
        self._decoding += 1
        self._context += run.tokens
        if self._starts is not None:
            self._starts.add(run.request.id, run.request.keys)
            self._regroup = True
        self._expect(run)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _expect(self, run: Run) -> None:
        """Note at which decode step it ends, or has no block for its next token, whichever comes first.

        Before a step it has `started` + step tokens; that step stores the newest of them.
        """
        have = len(run.blocks.tables[0]) * self.pool.block_size
        ends = run.started + run.request.output_tokens
        needs = run.started + have - run.request.prompt_tokens + 1
        heapq.heappush(self._due, (min(ends, needs), run.blocks.number or 0, run.version, run))

    def _grow(self) -> None:
        """A block for every sequence that needs one for its next token; who gets none yields, or ends."""
        short, self._short = sorted(self._short, key=lambda entry: entry[0]), []
        for _, version, run in short:
            if version != run.version:
                continue  # it has given way to one before it
            growth = self.pool.grow(run.blocks, 0)
            self._suspend(growth.preempted)
            match growth:
                case Grown():
                    self._expect(run)
                case Yielded():
                    self._suspend([run.blocks])
                case Ended():
                    self._stop_decoding(run)
                    self._end(run)

    def _admit(self) -> None:
        while self.room > 0 and self.pool.waiting and self.pool.sequence != self._offered_at:
            if not self._admit_one():
                self._offered_at = self.pool.sequence

    def _admit_one(self) -> bool:
        """Offer what waits, oldest first, until somebody enters."""
        offered: dict[str, int] = {}
        for blocks in self.pool.waiting:
            offered[blocks.tier] = offered.get(blocks.tier, 0) + 1
            if offered[blocks.tier] <= OFFERED_OF_A_TIER and self._offer(blocks, idle=False):
                return True
        return False

    def _admit_to_idle_engine(self) -> None:
        """Nothing runs, and nobody was admitted: idle cache never idles the engine."""
        if not self.pool.running:
            for blocks in self.pool.waiting:
                if self._offer(blocks, idle=True):
                    return

    def _offer(self, blocks: BlockRequest, *, idle: bool) -> bool:
        run = self._runs[blocks.id]
        answer = self.pool.admit(blocks, idle=idle)
        match answer:
            case Admitted():
                self._suspend(answer.preempted)
                run.computed = answer.hit_blocks[0] * self.pool.block_size
                run.reached = max(run.reached, run.computed)
                if run.cached_tokens is None:
                    run.cached_tokens, run.admitted_at = run.computed, self._clock()
                    self._result.admitted.append(run)
                self._filling.append(run)
                self._ready_runs = None
                return True
            case Ended():
                if run.cached_tokens is None:
                    self._result.refused.append(run)
                    self._remove(run)
                else:
                    self._end(run)
            case Waiting():
                if run.cached_tokens is None:
                    run.waited_for = answer.reason
        return False

    def _suspend(self, preempted: Sequence[BlockRequest]) -> None:
        """They wait again, to be admitted with all they had; what is still cached of their prompts is hit then."""
        for blocks in preempted:
            run = self._runs[blocks.id]
            if run.decodes:
                self._stop_decoding(run)
            else:
                self._filling.remove(run)
                self._ready_runs = None
            run.version += 1
            run.computed = 0
            size = self.pool.block_size
            blocks.blocks[0] = -(-run.tokens // size)
            blocks.keys[0] = list(run.request.keys[: (run.tokens - 1) // size])
            self._result.preempted += 1

    def _stop_decoding(self, run: Run) -> None:
        run.generated = self._decoded - run.started
        run.decodes = False
        run.version += 1
        self._decoding -= 1
        self._context -= run.tokens
        if self._starts is not None:
            self._starts.remove(run.request.id)
            self._regroup = True

    def _end(self, run: Run) -> None:
        self._result.finished.append(run)
        self._remove(run)

    def _remove(self, run: Run) -> None:
        del self._runs[run.request.id]
        if run.blocks.stage is not Stage.GONE:
            self.pool.release(run.blocks)
