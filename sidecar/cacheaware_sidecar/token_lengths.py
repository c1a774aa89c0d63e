"""How many tokens a prompt probably has, before the engine has counted: by the length of its text. Pure."""

from __future__ import annotations

from cacheaware_sidecar.prefix_key import CHUNK_BYTES, ID_BYTES, TEXT_BYTES_PER_TOKEN, PrefixKey

_LEARNING_RATE = 0.05  # in the long run; the first prompts count equally,
_FIRST_GUESS = 3  # and what was assumed before as much as so many of them


class TokenLengths:
    def __init__(self) -> None:
        self._bytes_per_token = TEXT_BYTES_PER_TOKEN
        self._prompts = _FIRST_GUESS

    def tokens(self, key: PrefixKey) -> int:
        """About how many tokens the prompt has."""
        return round(key.length / self._size_of_token(key))

    def chunk_tokens(self, key: PrefixKey) -> float:
        """About how many tokens a chunk of the key has."""
        return CHUNK_BYTES / self._size_of_token(key)

    def learn(self, key: PrefixKey, prompt_tokens: int) -> None:
        """The engine counted the prompt's tokens: correct how long a token of text is."""
        if key.of_ids or prompt_tokens <= 0 or key.length < CHUNK_BYTES:
            return
        size = min(16.0, max(1.0, key.length / prompt_tokens))  # one odd prompt must not spoil the estimate
        self._prompts += 1
        self._bytes_per_token += max(_LEARNING_RATE, 1 / self._prompts) * (size - self._bytes_per_token)

    def _size_of_token(self, key: PrefixKey) -> float:
        return ID_BYTES if key.of_ids else self._bytes_per_token
