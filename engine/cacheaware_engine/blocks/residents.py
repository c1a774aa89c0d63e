"""The blocks in use: the key tree, who holds each block, who pays for it, and in what order idle ones may go.

Every change of a block goes through `_leave` and `_enter`, which take its share out of its owner's account and put it
back, so accounts and heaps cannot drift from the blocks. Changes made between `begin` and `commit` can be taken back.
Which block goes is decided in `victims`; what a request may do, in `admission` and `pool`.

A block's parent is resident as long as the block is, and whoever holds a block holds all above it: an idle block has
only idle blocks below.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise

from .free_blocks import FreeBlocks, FreeStack
from .heaps import BlockHeap, Order
from .keys import BlockId, BlockKey
from .owners import Account
from .requests import Request


class Block:
    """One block in use. `key` and `parent` are None until it is full and computed."""

    __slots__ = (
        "children",
        "depth",
        "holders",
        "id",
        "kept",
        "key",
        "lapsed",
        "owner",
        "owner_holders",
        "parent",
        "serial",
        "touched",
    )

    def __init__(self, block_id: BlockId, serial: int, depth: int, owner: Account, now: float) -> None:
        self.id = block_id
        self.serial = serial  # order of allocation
        self.depth = depth  # its index in the sequence
        self.key: BlockKey | None = None
        self.parent: Block | None = None
        self.children: dict[Block, None] = {}
        self.owner = owner
        self.holders: dict[Request, int] = {}  # running requests, and how many of their sequences
        self.owner_holders = 0  # of these, requests of the owner's tier
        self.touched = now  # when a request last took it up or let go of it
        self.kept = now  # when the owner's tier last did: retention counts from here
        self.lapsed = False

    @property
    def order(self) -> Order:
        """Least recent first, tail first, oldest first."""
        return (self.touched, -self.depth, self.serial)


class Residents:
    """All blocks of a cache of `capacity` blocks. Every operation is O(1) or O(log n) a block.

    `adjacent`: a sequence's blocks lie side by side where they can.
    """

    def __init__(self, capacity: int, *, adjacent: bool = True) -> None:
        self.now = 0.0
        self.index: dict[BlockKey, Block] = {}
        self.lapsed_leaves = BlockHeap()
        self.expiries = BlockHeap()  # blocks whose retention runs
        self._blocks: list[Block | None] = [None] * capacity
        self._adjacent = adjacent
        self.free_blocks: FreeBlocks | FreeStack = FreeBlocks(capacity) if adjacent else FreeStack(capacity)
        self._serial = 0
        self._undo: list[Callable[[], None]] | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self.free_blocks)

    def at(self, block_id: BlockId) -> Block:
        block = self._blocks[block_id]
        if block is None:
            raise ValueError(f"block {block_id} is not in use")
        return block

    def is_resident(self, block: Block) -> bool:
        return self._blocks[block.id] is block

    def blocks(self) -> Iterable[Block]:
        return (block for block in self._blocks if block is not None)

    def path(self, keys: Iterable[BlockKey]) -> list[Block]:
        """The resident blocks of the longest known beginning of a chain of keys."""
        found: list[Block] = []
        for key in keys:
            block = self.index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # -- time ---------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """It is `now`: blocks whose retention ended lapse. Says whether any did. A clock that steps back is ignored."""
        self.now = max(self.now, now)
        self.free_blocks.expire(self.now)
        lapsed = False
        while (order := self.expiries.first_order()) is not None and order[0] <= self.now:
            block = self.expiries.first()
            assert block is not None
            self._leave(block)
            self._enter(block)
            lapsed = True
        return lapsed

    def reschedule(self, owners: Container[Account]) -> None:
        """The quotas of `owners` changed: their blocks' retention may have. O(blocks)."""
        for block in list(self.blocks()):
            if block.owner in owners:
                self._leave(block)
                self._enter(block)

    # -- taking changes back ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        assert self._undo is None, "a change is open already"
        self._undo = []

    def commit(self) -> None:
        self._undo = None

    def roll_back(self) -> None:
        """Undo everything since `begin`, latest first."""
        undo, self._undo = self._undo or [], None
        for step in reversed(undo):
            step()

    def log(self, undo: Callable[[], None]) -> None:
        """Have `undo` run in its turn if what is open now is rolled back."""
        if self._undo is not None:
            self._undo.append(undo)

    # -- changes ------------------------------------------------------------------------------------------------------

    def allocate(
        self,
        owner: Account,
        depth: int,
        request: Request,
        sequences: int,
        tier: Account,
        after: BlockId | None = None,
        more: int = 1,
    ) -> Block:
        """A fresh block, charged to `owner` and held by `sequences` of the request, which is of `tier`.

        It is the one behind `after` if that is free; so many `more` will follow it.
        """
        block_id = self.free_blocks.take(after, more, request.group)
        self._serial += 1
        block = Block(block_id, self._serial, depth, owner, self.now)
        block.holders[request] = sequences
        block.owner_holders = int(tier is owner)
        self._blocks[block_id] = block
        self._enter(block)

        def undo() -> None:
            self._leave(block)
            self._blocks[block_id] = None
            self.free_blocks.give(block_id)
            self._serial -= 1

        self.log(undo)
        return block

    def lay_out(self, blocks: Sequence[Block], after: BlockId | None, group: str | None) -> None:
        """Fresh blocks, whose numbers nobody knows yet, get numbers side by side as far as free ones allow: each of
        them was given what had been evicted for it, which is where an old sequence ended.
        """
        if not self._adjacent or all(one.id + 1 == next_one.id for one, next_one in pairwise(blocks)):
            return
        for block in blocks:
            self._blocks[block.id] = None
            self.free_blocks.give(block.id)
        for place, block in enumerate(blocks):
            block.id = after = self.free_blocks.take(after, len(blocks) - place, group)
            self._blocks[block.id] = block

    def hold(self, block: Block, request: Request, sequences: int, tier: Account) -> None:
        """`sequences` more of the request hold the block."""
        touched, kept = block.touched, block.kept
        before = block.holders.get(request, 0)
        self._set_holder(block, request, before + sequences, tier, self.now, self.now if tier is block.owner else kept)
        self.log(lambda: self._set_holder(block, request, before, tier, touched, kept))

    def let_go(self, block: Block, request: Request, sequences: int, tier: Account) -> None:
        """`sequences` of the request hold it no more. A partial block that nobody holds is freed."""
        touched, kept = block.touched, block.kept
        before = block.holders[request]
        if before > sequences:
            self._set_holder(block, request, before - sequences, tier, touched, kept)
        else:
            self._set_holder(block, request, 0, tier, self.now, self.now if tier is block.owner else kept)
        self.log(lambda: self._set_holder(block, request, before, tier, touched, kept))
        if block.key is None and not block.holders:
            self.remove(block)

    def charge(self, block: Block, owner: Account, tiers: Callable[[Request], Account]) -> None:
        """The block is `owner`'s now, and its retention starts anew."""
        old, kept = block.owner, block.kept
        self._set_owner(block, owner, self.now, tiers)
        self.log(lambda: self._set_owner(block, old, kept, tiers))

    def name(self, block: Block, key: BlockKey, parent: Block | None) -> None:
        """The block is full and computed: from now on it can be hit. Never taken back."""
        block.key, block.parent = key, parent
        if parent is not None:
            parent.children[block] = None
        self.index[key] = block

    def remove(self, block: Block) -> None:
        """The block is free again; it has no holders and no children."""
        assert not block.holders
        assert not block.children
        self._leave(block)
        self._blocks[block.id] = None
        self.free_blocks.give(block.id)
        if block.key is not None:
            del self.index[block.key]
        if block.parent is not None:
            self._set_child(block.parent, block, present=False)

        def undo() -> None:
            self.free_blocks.take_back(block.id)
            self._blocks[block.id] = block
            if block.key is not None:
                self.index[block.key] = block
            if block.parent is not None:
                self._set_child(block.parent, block, present=True)
            self._enter(block)

        self.log(undo)

    def idle_tree(self, block: Block) -> list[Block]:
        """An idle block and all below it, which are idle too; children first."""
        found = [block]
        for member in found:
            found.extend(member.children)
        return found[::-1]

    # -- accounts and heaps -------------------------------------------------------------------------------------------

    def _set_holder(
        self, block: Block, request: Request, sequences: int, tier: Account, touched: float, kept: float
    ) -> None:
        self._leave(block)
        held = request in block.holders
        if sequences:
            block.holders[request] = sequences
        else:
            del block.holders[request]
        if tier is block.owner:
            block.owner_holders += bool(sequences) - held
        block.touched, block.kept = touched, kept
        self._enter(block)

    def _set_owner(self, block: Block, owner: Account, kept: float, tiers: Callable[[Request], Account]) -> None:
        self._leave(block)
        block.owner = owner
        block.owner_holders = sum(tiers(holder) is owner for holder in block.holders)
        block.kept = kept
        self._enter(block)

    def _set_child(self, parent: Block, child: Block, *, present: bool) -> None:
        if present:
            parent.children[child] = None
        else:
            del parent.children[child]
        if not parent.holders:
            self._place_leaf(parent)

    def _enter(self, block: Block) -> None:
        owner = block.owner
        expiry = self._expiry(block)
        block.lapsed = expiry is not None and expiry <= self.now
        owner.used += 1
        if block.holders:
            owner.held += 1
        else:
            owner.lapsed += block.lapsed
            owner.idle.put(block, block.order)
            self._place_leaf(block)
        if expiry is not None and not block.lapsed:
            self.expiries.put(block, (expiry, 0, block.serial))

    def _leave(self, block: Block) -> None:
        owner = block.owner
        owner.used -= 1
        if block.holders:
            owner.held -= 1
        else:
            owner.lapsed -= block.lapsed
            owner.idle.discard(block)
            owner.leaves.discard(block)
            self.lapsed_leaves.discard(block)
        self.expiries.discard(block)

    def _place_leaf(self, block: Block) -> None:
        heap = self.lapsed_leaves if block.lapsed else block.owner.leaves
        if block.children:
            heap.discard(block)
        else:
            heap.put(block, block.order)

    def _expiry(self, block: Block) -> float | None:
        """When its retention ends; None while its owner's tier holds it, and where there is none."""
        if block.owner_holders or block.owner.retention is None:
            return None
        return block.kept + block.owner.retention
