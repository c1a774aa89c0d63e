"""What the engine probably still has, and how many tokens that is: recent requests' chunks, and what came true. Pure.

Chunks are kept in `PrefixTree`: least recently used first, and a chunk goes before those that lead to it. So what is
known of a prompt is always a prefix of it, and neither matching nor inserting one depends on its length.

Chunks are text, and the engine counts tokens of a rendered template in whole blocks. That is learned, not rebuilt: what
the engine once said it had cached for a match of this length at this chunk is the best prediction for the next one; a
prompt's whole length is remembered where it ended, as the next turn of its conversation starts with it and its answer;
elsewhere an offset corrects the count by chunks.

It knows no quotas and no blocks; the engine's ledger does.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from cacheaware_sidecar.scheduling.prefix_tree import PrefixTree
from cacheaware_sidecar.scheduling.requests import Used, Waiting

DEFAULT_CAPACITY = 200_000  # chunks; about 20 MB in prompts of many, 125 MB in prompts of one
_CONVERSATIONS = 20_000
_LEARNING_RATE = 0.1
_LARGEST_STEP = 64.0  # tokens that one prediction may correct the offset by: an evicted prefix is no offset
_EVICTED = 0.5  # the engine had less than this part of what was predicted: it has dropped the prefix
_REACH_STEP = 1.01
_LEAST_REACH, _MOST_REACH = 0.25, 4.0


@dataclasses.dataclass(slots=True)  # not frozen, which would take five times as long: two for every request
class Match:
    """How much of a prompt is known: leading chunks, and the tokens that they probably are in the engine's cache."""

    chunks: int
    tokens: int


@dataclasses.dataclass(slots=True)
class _Conversation:
    tokens: int  # of its last turn, prompt and answer
    kept: bool  # whether the engine still had the turn before when the last one came


class PrefixIndex:
    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._most = capacity
        self._engine: int | None = None  # tokens that fit the engine's cache
        self._chunk_tokens: float | None = None  # of a usual prompt
        self.block_size = 1
        self._reach = 1.0  # how much longer the engine keeps chunks than a plain cache of its size would
        self.known = PrefixTree()  # its notes: tokens that the engine had cached for a match that ended there
        self._conversations: OrderedDict[str, _Conversation] = OrderedDict()
        self._offset = 0.0

    def __len__(self) -> int:
        return len(self.known)

    @property
    def capacity(self) -> int:
        """Chunks that are remembered."""
        if self._engine is None or self._chunk_tokens is None:
            return self._most
        return min(self._most, max(1, round(self._engine / self._chunk_tokens * self._reach)))

    @property
    def offset(self) -> float:
        """Tokens that a match has beyond those of its chunks: what the template adds, less what fills no block."""
        return self._offset

    def set_engine(self, tokens: int | None, block_size: int = 1) -> None:
        """How many tokens fit the engine's cache (None: not known), and in blocks of how many it shares prefixes."""
        self._engine = tokens
        self.block_size = block_size
        self.known.shrink(self.capacity)

    def predict(self, request: Waiting) -> Match:
        """What of the prompt is cached, at a guess."""
        depth, told = self.known.match(request.chunks)
        tokens = 0.0
        most = max(0.0, request.prompt_tokens - 1)
        if told is not None:
            tokens = told
            most = max(most, told)  # counted by the engine, where the length of a prompt is an estimate
        elif depth:
            tokens = depth * request.chunk_tokens + self._offset
        if request.conversation is not None:
            conversation = self._conversation(request)
            if conversation is not None and conversation.kept:
                tokens = max(tokens, conversation.tokens)
        if tokens < self.block_size:
            tokens = 0.0  # a prefix that fills no block is not kept
        return Match(depth, int(min(tokens, most)))

    def insert(self, request: Waiting) -> None:
        """The engine has computed this prompt: its first byte came back."""
        size = request.chunk_tokens
        usual = self._chunk_tokens
        self._chunk_tokens = size if usual is None else usual + _LEARNING_RATE * (size - usual)
        self.known.insert(request.chunks)
        self.known.shrink(self.capacity)

    def learn(self, request: Waiting, match: Match, used: Used) -> None:
        """The engine has counted a request of which this was predicted when it was sent."""
        if request.conversation is not None:
            known = self._conversation(request)
            kept = known is not None and (used.cached_tokens or 0) >= 0.9 * known.tokens
            whole = used.prompt_tokens + used.output_tokens // request.sequences
            self._conversations[request.conversation] = _Conversation(whole, kept)
            self._conversations.move_to_end(request.conversation)
            if len(self._conversations) > _CONVERSATIONS:
                self._conversations.popitem(last=False)
        if used.cached_tokens is None:
            return
        if match.chunks:
            self._correct(request, match, used.cached_tokens)
        end = len(request.chunks)
        if request.sequences == 1:
            # The next turn of this conversation starts with the prompt and its answer.
            self.known.leave_note(request.chunks, end, used.prompt_tokens + used.output_tokens, first=True)

    def clear(self) -> None:
        """The engine started anew, or the salt key changed."""
        self.known.clear()
        self._conversations.clear()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _correct(self, request: Waiting, match: Match, cached: int) -> None:
        by_chunks = match.chunks * request.chunk_tokens
        if cached < _EVICTED * min(by_chunks, match.tokens):
            self._reach = max(_LEAST_REACH, self._reach / _REACH_STEP)
            self.known.shrink(self.capacity)
            return  # the engine had dropped it meanwhile: nothing to learn about tokens
        self.known.leave_note(request.chunks, match.chunks, cached)
        error = cached - (by_chunks + self._offset)
        self._offset += _LEARNING_RATE * max(-_LARGEST_STEP, min(_LARGEST_STEP, error))
        if error > 2 * request.chunk_tokens and match.chunks < len(request.chunks):
            self._reach = min(_MOST_REACH, self._reach * _REACH_STEP)  # it still had what was forgotten here

    def _conversation(self, request: Waiting) -> _Conversation | None:
        return None if request.conversation is None else self._conversations.get(request.conversation)
