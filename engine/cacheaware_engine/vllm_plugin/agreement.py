"""Asserts that the pool's accounts and vLLM's own blocks say the same. O(blocks): for tests and the check setting."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .free_queue import NULL_BLOCKS


def assert_agreement(scheduler: Any) -> None:
    """After a step was scheduled, or between two."""
    accounts, manager = scheduler.accounts, scheduler.kv_cache_manager
    pool, blocks = accounts.pool, manager.block_pool.blocks
    pool.check_integrity()
    references: Counter[int] = Counter()
    reserved = 0
    for record in accounts.records():
        theirs = [
            block.block_id - NULL_BLOCKS
            for block in manager.coordinator.single_type_managers[0].req_to_blocks.get(record.account.id, ())
        ]
        started = bool(theirs)
        ours = accounts.physical(record) if started else []
        assert theirs == ours, f"{record.account.id}: vLLM has {theirs}, its table says {ours}"
        assert sorted(record.copies.values()) == sorted(record.account.copies[0])
        references.update(theirs)
        references.update(record.equals)
        if record.running:
            reserved += len(record.table) - (record.taken if started else 0)
    for block in blocks[NULL_BLOCKS:]:
        assert block.ref_cnt == references[block.block_id - NULL_BLOCKS], block
    unreferenced = sum(block.ref_cnt == 0 for block in blocks[NULL_BLOCKS:])
    assert manager.block_pool.free_block_queue.num_free_blocks == unreferenced
    ledger = pool.ledger()
    held = ledger.public.held + sum(tier.held for tier in ledger.tiers.values())
    used = held + ledger.public.cached + sum(tier.cached for tier in ledger.tiers.values())
    assert used + ledger.free == ledger.capacity == len(blocks) - NULL_BLOCKS
    in_use = len(blocks) - NULL_BLOCKS - unreferenced
    # What is held and not in use yet stands in the tables of running requests; blocks that several wait for count once.
    assert in_use <= held <= in_use + reserved, f"vLLM uses {in_use}, {reserved} are reserved, the ledger says {held}"
    waiting = {account.id for account in pool.waiting}
    running = {request.request_id for request in scheduler.running}
    assert not waiting & running, "what waits in the accounts does not run in vLLM"
