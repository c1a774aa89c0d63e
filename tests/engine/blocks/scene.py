"""A small stage for examples: blocks of one token, texts as strings, time that only moves when it is told to.

`Scene(10, gold={"nominal": 4}, bronze={})` is a cache of ten blocks with two tiers. A text of three letters needs three
blocks and one to grow into; all but its last letter can be hit.
"""

from __future__ import annotations

from typing import Any

from cacheaware_api import wire
from cacheaware_engine.blocks import (
    Admission,
    Admitted,
    BlockKey,
    BlockPool,
    Growth,
    Request,
    block_keys,
    next_key,
)


class Scene:
    def __init__(self, capacity: int, *, slots: int = 32, public: int = 0, **tiers: dict[str, Any]) -> None:
        self.now = 0.0
        self.pool = BlockPool(capacity, 1, slots, clock=lambda: self.now)
        self.revision = 0
        self.count = 0
        self.texts: dict[Request, tuple[str, bytes]] = {}
        if tiers:
            self.quotas(public=public, **tiers)

    def quotas(self, *, public: int = 0, **tiers: dict[str, Any]) -> None:
        """New quotas. By default a tier may borrow everything and lend everything, and aims at its nominal."""
        self.revision += 1
        self.pool.set_quotas(
            wire.Quotas(
                wire.Revision("pool", self.revision),
                tuple(tier(name, self.pool.capacity, **fields) for name, fields in tiers.items()),
                public,
            )
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    def request(
        self, tier: str, text: str, *, extra: int = 8, n: int = 1, salt: bytes = b"", shared: int | None = None
    ) -> Request:
        """Not submitted yet. `extra`: tokens that it may generate."""
        self.count += 1
        keys = self.keys(text, salt)[: len(text) - 1]
        request = Request(
            id=f"{tier}-{self.count}",
            tier=tier,
            sequences=n,
            keys=[list(keys) for _ in range(n)],
            blocks=[len(text)] * n,
            max_blocks=len(text) + extra,
            prompt_blocks=len(text) if shared is None else shared,
            prompt_tokens=len(text),
        )
        self.texts[request] = (text, salt)
        return request

    def wait(self, tier: str, text: str, **options: Any) -> Request:
        request = self.request(tier, text, **options)
        self.pool.submit(request)
        return request

    def offer(self, request: Request, *, idle: bool = False) -> Admission:
        answer = self.pool.admit(request, idle=idle)
        self.pool.check_integrity()
        return answer

    def run(self, tier: str, text: str, **options: Any) -> Request:
        """Admitted and computed."""
        request = self.wait(tier, text, **options)
        self.admitted(request)
        self.compute(request)
        return request

    def admitted(self, request: Request, *, idle: bool = False) -> Admitted:
        answer = self.offer(request, idle=idle)
        assert isinstance(answer, Admitted), answer
        return answer

    def compute(self, request: Request) -> None:
        text, salt = self.texts[request]
        for index, key in enumerate(self.keys(text, salt)):
            for sequence in request.live:
                self.pool.fill(request, sequence, index, key)
        self.pool.check_integrity()

    def write(self, request: Request, letter: str, sequence: int = 0) -> None:
        """The sequence's next token is sampled and computed, into a block that it has already."""
        text, salt = self.texts[request]
        keys = self.keys(text, salt)
        self.pool.fill(request, sequence, len(text), next_key(keys[-1], [ord(letter)], salt, self.pool.public_keys))
        self.texts[request] = (text + letter, salt)
        self.pool.check_integrity()

    def grow(self, request: Request, sequence: int = 0) -> Growth:
        answer = self.pool.grow(request, sequence)
        self.pool.check_integrity()
        return answer

    def release(self, *requests: Request) -> None:
        for request in requests:
            self.pool.release(request)
            self.pool.check_integrity()

    def cache(self, tier: str, text: str, **options: Any) -> None:
        """The text was run and is cached now, all of it."""
        options.setdefault("extra", 0)
        self.release(self.run(tier, text, **options))

    # -- looking ------------------------------------------------------------------------------------------------------

    def keys(self, text: str, salt: bytes = b"") -> list[BlockKey]:
        return block_keys([ord(letter) for letter in text], 1, salt, self.pool.public_keys)

    def cached_of(self, text: str, salt: bytes = b"") -> int:
        """How many blocks of the text are resident."""
        return len(self.pool._books.residents.path(self.keys(text, salt)))

    def owners(self, text: str, salt: bytes = b"") -> list[str]:
        """Who pays for each resident block of the text."""
        return [block.owner.name for block in self.pool._books.residents.path(self.keys(text, salt))]

    def account(self, name: str) -> wire.TierLedger:
        return self.pool.ledger().tiers[name]

    def used(self, name: str) -> int:
        account = self.account(name)
        return account.held + account.cached

    @property
    def free(self) -> int:
        return self.pool.ledger().free


def tier(name: str, capacity: int, **fields: Any) -> wire.TierQuota:
    nominal = fields.get("nominal", 0)
    return wire.TierQuota(
        name=name,
        priority=fields.get("priority", 0),
        weight=1,
        nominal=nominal,
        effective=fields.get("effective", nominal),
        limit=fields.get("limit", capacity),
        lending=fields.get("lending", nominal),
        retention_s=fields.get("retention"),
    )
