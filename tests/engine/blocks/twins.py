"""Requests with texts that run on a `BlockPool` and on the reference at once; both must do and say the same.

Blocks hold one token, so a text is its blocks. A text is computed, sampled and grown as an engine would: `compute`
fills every block of it, `decode` adds a token and asks for a block where the table has none left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cacheaware_api import quota, wire
from cacheaware_engine.blocks import (
    PUBLIC,
    ROOT,
    Admission,
    Admitted,
    BlockKey,
    BlockPool,
    Ended,
    Grown,
    NeverFits,
    Request,
    UnknownTier,
    Yielded,
    next_key,
)

from . import reference
from .reference import Answer, Reference


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Text:
    """What the engine would know of a request."""

    request: Request
    salt: bytes
    prompt: int  # tokens
    limit: int  # most tokens of a sequence
    tokens: list[list[int]]
    keys: list[list[BlockKey]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.id


class Twins:
    def __init__(self, capacity: int, max_sequences: int, *, private: bool, adjacent: bool = True) -> None:
        self.clock = Clock()
        self.pool = BlockPool(capacity, 1, max_sequences, clock=self.clock, adjacent=adjacent)
        self.reference = Reference(capacity, max_sequences)
        self.private = private  # no two tiers share a salt
        self.texts: dict[str, Text] = {}
        self.revision = 0
        self.prefixes: dict[str, list[int]] = {}
        self.count = 0

    # -- settings -----------------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        self.reference.now = self.clock.now
        self.pool.ledger()  # any call reads the clock
        self.compare()

    def set_quotas(self, tiers: Sequence[wire.TierQuota], public: int) -> None:
        self.revision += 1
        self.pool.set_quotas(wire.Quotas(wire.Revision("pool", self.revision), tuple(tiers), public))
        by_importance = sorted(tiers, key=lambda tier: (-tier.priority, tier.name))
        nominal = {tier.name: tier.nominal for tier in by_importance}
        slots = quota.apportion_slots(
            self.pool.max_sequences, nominal, self.pool.capacity - sum(nominal.values())
        )  # fmt: skip
        self.reference.set_quotas(
            {
                tier.name: reference.Tier(
                    nominal=tier.nominal,
                    effective=tier.effective,
                    limit=min(self.pool.capacity, tier.limit),
                    lending=tier.lending,
                    priority=tier.priority,
                    retention=tier.retention_s,
                    slots=slots[tier.name],
                )
                for tier in tiers
            },
            public,
        )
        self.compare()

    def set_public(self, prefixes: Mapping[str, list[int]]) -> None:
        """Public prefixes, cut to what the share takes."""
        room = self.reference.tiers[PUBLIC].limit
        keys: dict[str, list[BlockKey]] = {}
        for name, tokens in prefixes.items():
            chain: list[BlockKey] = []
            for token in tokens:
                parent = chain[-1] if chain else ROOT
                unsalted = next_key(parent, [token], b"", ())
                if unsalted not in {key for other in keys.values() for key in other}:
                    if not room:
                        break
                    room -= 1
                chain.append(unsalted)
            keys[name] = chain
        self.prefixes = {name: prefixes[name][: len(chain)] for name, chain in keys.items()}
        self.pool.set_public(keys)
        self.reference.set_public(list(keys.values()))
        for text in self.texts.values():
            if not any(text.request.tables):
                self._forget_keys(text)
        self.compare()

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, tier: str, salt: bytes, prompt: list[int], extra: int, n: int = 1, tail: int = 0) -> Text | None:
        """None: both refused it. `tail`: trailing tokens of the prompt that do not fill a shared block."""
        self.count += 1
        request = Request(
            id=f"r{self.count}",
            tier=tier,
            sequences=n,
            keys=[[] for _ in range(n)],
            blocks=[0] * n,
            max_blocks=len(prompt) + extra,
            prompt_blocks=max(0, len(prompt) - tail) if n > 1 else len(prompt),
        )
        text = Text(request, salt, len(prompt), len(prompt) + extra, [list(prompt) for _ in range(n)])
        self._forget_keys(text)
        try:
            self.pool.submit(request)
        except UnknownTier:
            known = self.reference.tiers.get(tier)
            assert self.reference.closed
            assert known is None or known.draining
            return None
        except NeverFits:
            assert not self.reference.submit(self._twin(text)), "the reference would take it"
            self.compare()
            return None
        assert self.reference.submit(self._twin(text)), "the reference would refuse it"
        self.texts[request.id] = text
        self.compare()
        return text

    def admit(self, text: Text, *, idle: bool = False) -> str:
        """Both try; returns what the answer was."""
        self._describe(text)
        twin = self.reference.requests[text.id]
        twin.keys, twin.blocks = [list(keys) for keys in text.request.keys], list(text.request.blocks)
        before = self.pool.sequence
        admission = self.pool.admit(text.request, idle=idle)
        answer = self.reference.admit(text.id, idle=idle)
        assert _answer(admission) == answer
        self._after(answer.preempted)
        if not isinstance(admission, Admitted):
            assert self.pool.sequence == before, "a waiter has changed nothing"
        if self.private and self.reference.held(PUBLIC) <= self.reference.tiers[PUBLIC].limit:
            assert not answer.granted, "with private prefixes granted room can be made"
        self.compare()
        if answer.what == "ended":
            self.release(text)
        return answer.what

    def compute(self, text: Text) -> None:
        """All tokens are computed: their blocks are filled, what is shared by the first sequence."""
        for sequence in text.request.live:
            keys = self._keys(text, sequence, len(text.tokens[sequence]))
            for index, key in enumerate(keys):
                block = self.pool.fill(text.request, sequence, index, key)
                assert text.request.tables[sequence][index] == block
                self.reference.fill(text.id, sequence, index, key)
        self.compare()

    def decode(self, text: Text, sequence: int, token: int) -> str:
        """One more token; returns what became of the sequence."""
        if len(text.tokens[sequence]) == text.limit:
            self.finish(text, sequence)
            return "finished"
        text.tokens[sequence].append(token)
        if len(text.tokens[sequence]) <= len(text.request.tables[sequence]):
            return "fitted"
        growth = self.pool.grow(text.request, sequence)
        answer = self.reference.grow(text.id, sequence)
        if isinstance(growth, Grown):
            assert text.request.tables[sequence][-1] == growth.block
            mine = Answer("grown", preempted=tuple(request.id for request in growth.preempted))
        else:
            what = "yielded" if isinstance(growth, Yielded) else "ended"
            mine = Answer(what, preempted=tuple(request.id for request in growth.preempted))
        assert mine == answer
        self._after(answer.preempted)
        if answer.what == "yielded":
            self._after([text.id])
        self.compare()
        if answer.what == "ended":
            self.finish(text, sequence)
        return answer.what

    def finish(self, text: Text, sequence: int) -> None:
        if len(text.request.live) == 1:
            del self.texts[text.id]
        self.pool.finish_sequence(text.request, sequence)
        self.reference.finish_sequence(text.id, sequence)
        self.compare()

    def release(self, text: Text) -> None:
        del self.texts[text.id]
        self.pool.release(text.request)
        self.pool.release(text.request)  # a second call does nothing
        self.reference.release(text.id)
        self.compare()

    # -- an engine's step ---------------------------------------------------------------------------------------------

    def offer_all(self) -> None:
        """Waiters in arrival order; if nothing runs then, the oldest that fits."""
        for request in self.pool.waiting:
            self.admit(self.texts[request.id])
        while not self.pool.running and self.pool.waiting:
            assert self.admit(self.texts[self.pool.waiting[0].id], idle=True) in ("admitted", "ended"), "a stall"

    def step(self, token: int) -> None:
        for request in self.pool.running:
            text = self.texts.get(request.id)
            if text is None or not any(request.tables):
                continue
            self.compute(text)
            for sequence in request.live:
                if text.id in self.texts and any(request.tables) and sequence in request.live:
                    self.decode(text, sequence, token)
        self.offer_all()

    def drain(self) -> int:
        """Arrivals stop: every request ends. Returns the steps that it took."""
        work = sum(text.limit * len(text.tokens) for text in self.texts.values())
        steps = 0
        self.offer_all()
        while self.texts:
            steps += 1
            assert steps < 50 + 20 * work, f"no end in sight: {self.pool.ledger()}"
            self.step(steps % 2)
        return steps

    # -- both the same ------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        pool, model = self.pool, self.reference
        pool.check_integrity()
        ledger = pool.ledger()
        assert [request.id for request in pool.waiting] == [request.id for request in model.waiting()]
        assert [request.id for request in pool.running] == [request.id for request in model.running()]
        assert [request.reclaims for request in pool.running] == [request.reclaims for request in model.running()]
        assert ledger.free == model.free()
        mine = {
            block.serial: (
                block.key,
                block.depth,
                block.owner.name,
                {request.id: count for request, count in block.holders.items()},
                block.touched,
                block.kept,
                block.lapsed,
                block.parent.serial if block.parent else None,
            )
            for block in pool._books.residents.blocks()
        }
        theirs = {
            block.serial: (
                block.key,
                block.depth,
                block.owner,
                dict(block.holders),
                block.touched,
                block.kept,
                model.lapsed(block),
                block.parent.serial if block.parent else None,
            )
            for block in model.blocks
        }
        assert mine == theirs
        assert set(ledger.tiers) == set(model.tiers) - {PUBLIC}
        for name, tier in ledger.tiers.items():
            state = model.tiers[name]
            assert (tier.nominal, tier.effective, tier.limit) == (state.nominal, state.effective, state.limit)
            assert (tier.held, tier.held + tier.cached) == (model.held(name), model.used(name))
            assert (tier.slots.nominal, tier.slots.running) == (state.slots, model.sequences(name))
            totals = (tier.evicted_total, tier.reclaimed_total, tier.preempted_total)
            assert totals == (state.evicted, state.reclaimed, state.preempted)
            assert (tier.hit_tokens_total, tier.query_tokens_total) == (state.hits, state.queries)
        used = sum(tier.held + tier.cached for tier in ledger.tiers.values())
        assert used + ledger.public.held + ledger.public.cached + ledger.free == ledger.capacity

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _after(self, preempted: Sequence[str]) -> None:
        for name in preempted:
            assert not any(self.texts[name].request.tables)

    def _twin(self, text: Text) -> reference.Request:
        self._describe(text)
        request = text.request
        return reference.Request(
            id=request.id,
            tier=request.tier,
            keys=[list(keys) for keys in request.keys],
            blocks=list(request.blocks),
            max_blocks=request.max_blocks,
            prompt_blocks=request.prompt_blocks,
            number=0,
        )

    def _describe(self, text: Text) -> None:
        for sequence, tokens in enumerate(text.tokens):
            text.request.keys[sequence] = self._keys(text, sequence, len(tokens) - 1)
            text.request.blocks[sequence] = len(tokens)

    def _forget_keys(self, text: Text) -> None:
        text.keys = [[] for _ in text.tokens]
        self._describe(text)

    def _keys(self, text: Text, sequence: int, count: int) -> list[BlockKey]:
        chain = text.keys[sequence]
        while len(chain) < count:
            parent = chain[-1] if chain else ROOT
            token = text.tokens[sequence][len(chain)]
            chain.append(next_key(parent, [token], text.salt, self.pool.public_keys))
        return chain[:count]


def _answer(admission: Admission) -> Answer:
    if isinstance(admission, Admitted):
        preempted = tuple(request.id for request in admission.preempted)
        return Answer("admitted", tuple(admission.hit_blocks), preempted)
    return Answer("ended" if isinstance(admission, Ended) else str(admission.reason))
