"""Works out every account from the blocks and requests alone, and asserts that the books say the same.

For tests, and for an engine that is idle. O(blocks + what requests hold).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .requests import Request, Stage
from .residents import Block

if TYPE_CHECKING:
    from .books import Books


def check(books: Books) -> None:
    blocks = list(books.residents.blocks())
    _check_blocks(books, blocks)
    _check_holders(books, blocks)
    _check_accounts(books, blocks)
    _check_heaps(books, blocks)
    _check_requests(books)


def _check_blocks(books: Books, blocks: list[Block]) -> None:
    residents = books.residents
    assert residents._undo is None, "an admission was left half done"
    ids = sorted([block.id for block in blocks] + residents.free_blocks.ids())
    assert ids == list(range(books.capacity)), "every block is in use once or free once"
    named = {block.key: block for block in blocks if block.key is not None}
    assert named == residents.index, "the index holds exactly the full blocks, one for each key"
    children: dict[Block, set[Block]] = {block: set() for block in blocks}
    for block in blocks:
        assert block.holders or block.key is not None, "a partial block is freed on release"
        if block.parent is None:
            assert block.key is None or block.depth == 0, "a full block's parent is known"
            continue
        assert block.parent in children, "a block's parent stays as long as it does"
        assert block.depth == block.parent.depth + 1
        children[block.parent].add(block)
        assert block.holders.keys() <= block.parent.holders.keys(), "holders hold their whole path"
    for block in blocks:
        assert set(block.children) == children[block]


def _check_holders(books: Books, blocks: list[Block]) -> None:
    held: dict[int, Counter[Request]] = {}
    for request in books.running:
        for sequence, table in enumerate(request.tables):
            assert len(set(table)) == len(table), "a block stands once in a table"
            assert len(table) <= request.max_blocks
            assert not table or sequence not in request.finished
            for depth, block_id in enumerate(table):
                held.setdefault(block_id, Counter())[request] += 1
                block = books.residents.at(block_id)
                assert block.depth == depth
                if block.key is not None and depth:
                    assert block.parent is books.residents.at(table[depth - 1]), "tables follow the key tree"
        for copies in request.copies:
            for block_id in copies:
                held.setdefault(block_id, Counter())[request] += 1
                assert books.residents.at(block_id).key is None, "what is equal to another block cannot be hit"
    for block in blocks:
        assert block.holders == held.get(block.id, Counter()), "holders are what the tables say"
        owners = sum(books.tier(request) is block.owner for request in block.holders)
        assert block.owner_holders == owners


def _check_accounts(books: Books, blocks: list[Block]) -> None:
    used = Counter(block.owner for block in blocks)
    held = Counter(block.owner for block in blocks if block.holders)
    lapsed = Counter(block.owner for block in blocks if block.lapsed and not block.holders)
    assert set(used) <= set(books.accounts), "every owner is known"
    assert {account.name: account for account in books.accounts} == books.by_name
    for account in books.accounts:
        assert (account.used, account.held, account.lapsed) == (used[account], held[account], lapsed[account])
        assert account.used <= account.limit or not account.cached, "beyond its limit an owner has nothing cached"
        assert account.lending <= account.nominal
        assert account.effective <= books.capacity
    assert sum(account.used for account in books.accounts) + books.residents.free == books.capacity
    assert sum(account.nominal for account in books.accounts) <= books.capacity
    for block in blocks:
        if block.owner is books.public and not block.holders:
            assert block.key in books.public_keys, "what is public no more goes when nobody holds it"


def _check_heaps(books: Books, blocks: list[Block]) -> None:
    residents, now = books.residents, books.residents.now
    expiries, lapsed_leaves = residents.expiries.orders(), residents.lapsed_leaves.orders()
    leaves, idle = (
        {block: order for account in books.accounts for block, order in getattr(account, name).orders().items()}
        for name in ("leaves", "idle")
    )
    for block in blocks:
        retention = block.owner.retention
        expiry = None if block.owner_holders or retention is None else block.kept + retention
        assert block.lapsed == (expiry is not None and expiry <= now)
        assert expiries.pop(block, None) == ((expiry, 0, block.serial) if expiry is not None and expiry > now else None)
        is_idle = not block.holders
        is_leaf = is_idle and not block.children
        assert idle.pop(block, None) == (block.order if is_idle else None)
        assert leaves.pop(block, None) == (block.order if is_leaf and not block.lapsed else None)
        assert lapsed_leaves.pop(block, None) == (block.order if is_leaf and block.lapsed else None)
        if is_idle:
            assert block in block.owner.idle
        if is_leaf and not block.lapsed:
            assert block in block.owner.leaves
    assert not expiries, "no heap keeps a block that left"
    assert not idle
    assert not leaves
    assert not lapsed_leaves


def _check_requests(books: Books) -> None:
    for requests, stage in ((books.waiting, Stage.WAITING), (books.running, Stage.RUNNING)):
        numbers = [request.number or 0 for request in requests]
        assert numbers == sorted(set(numbers)), "in arrival order"
        assert all(request.stage is stage for request in requests)
    for account in books.accounts:
        assert account.waiting == [request for request in books.waiting if books.tier(request) is account]
        running = sum(len(request.live) for request in books.running if books.tier(request) is account)
        assert account.running == running
    assert sum(account.running for account in books.accounts) <= books.max_sequences
    for request in books.waiting:
        assert not any(request.tables), "what waits holds nothing"
        assert not any(request.copies)
    for request in books.running:
        assert all(request.tables[index] for index in request.live)
