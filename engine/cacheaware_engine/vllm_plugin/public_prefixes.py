"""Public prefixes as tokens, by the tokenizer of the model that vLLM serves.

It is loaded at the first prefix, on the thread of the KV side. Messages go through the model's own chat template; one
that was given to vLLM by a flag is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheaware_api import wire


class Tokenizer:
    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def of(self, prefix: wire.PublicPrefix) -> Sequence[int]:
        from vllm.tokenizers.registry import cached_tokenizer_from_config  # only where there are public prefixes

        tokenizer = cached_tokenizer_from_config(self._model_config)
        if prefix.text is not None:
            return list(tokenizer.encode(prefix.text))
        text = tokenizer.apply_chat_template(
            [dict(message) for message in prefix.messages or ()], tokenize=False, add_generation_prompt=False
        )
        return list(tokenizer.encode(text, add_special_tokens=False))
