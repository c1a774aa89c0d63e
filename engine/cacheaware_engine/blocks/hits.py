"""Whom a block belongs to once a request has hit it. Pure.

A block moves to the tier that hits it if that tier is more important, or if nobody protects the block any more; so the
tier that needs a shared prefix most pays for it, and a tier cannot make another pay for what only it still uses.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from .keys import BlockKey
from .owners import Account
from .requests import Request
from .residents import Block


def owner_after_hit(
    block: Block,
    tier: Account,
    *,
    public: Account,
    public_keys: Container[BlockKey],
    has_room: Callable[[Account], bool],
    tiers: Callable[[Request], Account],
) -> Account:
    """The account that pays from now on; the present one where the other has no room under its limit."""
    if block.owner is public:
        return public
    if block.key in public_keys and has_room(public):  # it was allocated while the public share was full
        return public
    if tier is public or block.owner is tier:
        return block.owner
    if tier.priority > block.owner.priority:
        target = tier
    elif block.lapsed:
        target = _most_important(block, tier, public, tiers)
    else:
        return block.owner
    return target if has_room(target) else block.owner


def _most_important(block: Block, tier: Account, public: Account, tiers: Callable[[Request], Account]) -> Account:
    """Of the tier that hits the block and those that hold it; the former in ties, then the oldest holder's."""
    holders = sorted(block.holders, key=lambda request: request.number or 0)
    candidates = [tier, *(account for holder in holders if (account := tiers(holder)) is not public)]
    return max(candidates, key=lambda account: account.priority)  # max takes the first of equals
