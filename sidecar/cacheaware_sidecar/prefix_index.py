"""What the engine probably still has: a bounded record of the chunks that recent requests started with.

It predicts cached tokens, so that queue costs are honest and prediction can be compared with what came true. It knows
no quotas and no blocks; the engine's ledger does. Matching and inserting are O(chunks).
"""

from __future__ import annotations

from collections import OrderedDict

from cacheaware_sidecar.prefix_key import CHUNK_BYTES, ID_BYTES, TEXT_BYTES_PER_TOKEN, PrefixKey

DEFAULT_CAPACITY = 200_000  # chunks; about 30 MB
_LEARNING_RATE = 0.05


class PrefixIndex:
    """Least recently used chunks go first, and a chunk goes before those it continues."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._bytes_per_token = TEXT_BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self._seen)

    def tokens(self, key: PrefixKey) -> int:
        """About how many tokens the prompt has."""
        return round(key.length / self._size_of_token(key))

    def chunk_tokens(self, key: PrefixKey) -> float:
        """About how many tokens a chunk of the key has."""
        return CHUNK_BYTES / self._size_of_token(key)

    def predict(self, key: PrefixKey) -> int:
        """About how many leading tokens of the prompt are cached."""
        matched = 0
        for chunk in key.chunks:
            if chunk not in self._seen:
                break
            matched += 1
        return int(matched * CHUNK_BYTES / self._size_of_token(key))

    def insert(self, key: PrefixKey) -> None:
        """The engine has computed this prompt: its first byte came back."""
        for chunk in reversed(key.chunks):  # the tail is the oldest, so what remains is always a prefix
            self._seen[chunk] = None
            self._seen.move_to_end(chunk)
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def learn(self, key: PrefixKey, prompt_tokens: int) -> None:
        """The engine counted the prompt's tokens: correct how long a token of text is."""
        if key.of_ids or prompt_tokens <= 0 or key.length < CHUNK_BYTES:
            return
        size = min(16.0, max(1.0, key.length / prompt_tokens))  # one odd prompt must not spoil the estimate
        self._bytes_per_token += _LEARNING_RATE * (size - self._bytes_per_token)

    def clear(self) -> None:
        """The engine started anew, or the salt key changed."""
        self._seen.clear()

    def _size_of_token(self, key: PrefixKey) -> float:
        return ID_BYTES if key.of_ids else self._bytes_per_token
