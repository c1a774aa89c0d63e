"""Tokens from what people write: prompts through the tokenizer, chats through the model's own template.

Only this module knows the tokenizer's library. Its methods take milliseconds for long prompts; the servers call them
off their event loop. Text from tokens is `detokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from .errors import BadRequest
from .openai_requests import Message


class Tokenizer:
    """A loaded tokenizer, with the few calls that serving needs."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a transformers tokenizer backed by the tokenizers library (every one we load is)."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Set once and never again: the backend may not change while several threads encode with it.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt; by default with what the model expects around it, such as a first token."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Token ids of a chat, as the model was trained to read it."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise BadRequest(
                "this model has no chat template: use /v1/completions with a prompt instead", param="messages"
            )
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:  # what the template cannot say, such as two user turns in a row
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from None
        return self.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens, without special ones."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text of any tokens, special ones included: what /detokenize answers."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))
