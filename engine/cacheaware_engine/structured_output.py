"""Texts that follow a JSON schema: which tokens may come next, as llguidance says where it is installed.

A schema is compiled once for each request, off the step loop, and every sequence follows a copy of what came of it.
The only module that knows the library: without it there are no grammars, and requests that ask for one are refused.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from cacheaware_engine.errors import BadRequest
from cacheaware_engine.logs import values
from cacheaware_engine.response_format import SCHEMA

log = logging.getLogger(__name__)


class Grammars:
    """Compiles schemas for one model's tokens."""

    def __init__(self, library: Any, tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> None:
        """`tokenizer`: a transformers tokenizer backed by the tokenizers library."""
        self._library = library
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._known: Any = None  # the library's own view of the tokenizer: made for the first schema, in about a second

    def constraint(self, schema: str) -> Constraint:
        """What texts of this JSON schema may be. Takes milliseconds to a second; raises `BadRequest`."""
        matcher = self._library.LLMatcher
        tokens = self._tokens()
        try:
            grammar = matcher.grammar_from_json_schema(schema)
        except ValueError as error:
            raise BadRequest(f"{SCHEMA}: {error}", param=SCHEMA) from None
        failed, said = matcher.validate_grammar_with_warnings(grammar, tokens)
        if said:  # a warning is a part of the schema that would not be kept to
            raise BadRequest(f"{SCHEMA} is {'wrong' if failed else 'not supported'}: {said[0][:500]}", param=SCHEMA)
        return Constraint(matcher(tokens, grammar, log_level=0), self._end_tokens)

    def _tokens(self) -> Any:
        with self._lock:
            if self._known is None:
                adapter = importlib.import_module("llguidance.hf")
                self._known = adapter.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens
                )
            return self._known


class Constraint:
    """How far one text has come in its grammar. Kept while its sequence is preempted."""

    __slots__ = ("_end_tokens", "_matcher")

    def __init__(self, matcher: Any, end_tokens: list[int]) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens

    def copy(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._end_tokens)

    def apply_(self, logits: Tensor) -> None:
        """Only tokens with which the text can go on keep their logits. [vocab]"""
        if self._matcher.is_error():  # a limit of the library: what there is ends here
            allowed = torch.zeros(len(logits), dtype=torch.bool)
            allowed[self._end_tokens] = True
        else:
            allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        logits.masked_fill_(~allowed.to(logits.device), float("-inf"))

    def said(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            log.warning("a text leaves its schema and is ended", extra=values(why=self._matcher.get_error()[:200]))


def load_grammars(tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> Grammars | None:
    """None: the library is not installed, or there is no token with which a text could end."""
    try:
        library = importlib.import_module("llguidance")
    except ImportError:
        return None
    return Grammars(library, tokenizer, vocab_size, end_tokens) if end_tokens else None
