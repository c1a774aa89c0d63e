"""Keys of full blocks: chained digests, so that equal keys mean equal tokens in equal positions for the same readers.

A key covers its parent's key, the salt and the block's tokens, so a block is found only behind the same beginning and
only by those who share the salt. Blocks of public prefixes are keyed without the salt as long as the chain is public;
the first private block behind one carries the salt again, so public text is shared by everyone and nothing else is.

A chain starts at a root. Keys and values that are stored in different forms have different roots, so that a block is
never read in another form than it was written in, whoever keeps blocks beyond one process.

The digest is BLAKE2b over fixed-width little-endian integers: every process and machine computes the same keys.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Sequence
from hashlib import blake2b
from typing import NewType

BlockKey = bytes
BlockId = NewType("BlockId", int)  # index into the KV tensors

KEY_BYTES = 16
KEY_ALGORITHM = "blake2b-128 over parent, salt and token ids as little-endian uint32"
ROOT: BlockKey = bytes(KEY_BYTES)  # the parent of a first block


def root_of(form: str) -> BlockKey:
    """The root of keys and values that are stored in this form: a dtype's name."""
    return blake2b(form.encode(), digest_size=KEY_BYTES, person=b"kv form").digest()


def next_key(
    parent: BlockKey, tokens: Sequence[int], salt: bytes, public: Container[BlockKey], root: BlockKey = ROOT
) -> BlockKey:
    """The key of a full block of `tokens` behind `parent` (`root` for the first)."""
    data = _token_bytes(tokens)
    if parent == root or parent in public:
        key = _digest(parent, b"", data)
        if key in public:
            return key
    return _digest(parent, salt, data)


def block_keys(
    tokens: Sequence[int],
    block_size: int,
    salt: bytes = b"",
    public: Container[BlockKey] = frozenset(),
    root: BlockKey = ROOT,
) -> list[BlockKey]:
    """One key for each full block of `tokens`; the rest of the tokens has none."""
    keys: list[BlockKey] = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = next_key(parent, tokens[end - block_size : end], salt, public, root)
        keys.append(parent)
    return keys


def _digest(parent: BlockKey, salt: bytes, data: bytes) -> BlockKey:
    # The salt's length parts it from the tokens, so no choice of tokens imitates another salt.
    return blake2b(b"".join((parent, len(salt).to_bytes(4, "little"), salt, data)), digest_size=KEY_BYTES).digest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    values = array("I", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
