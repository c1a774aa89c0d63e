"""How much of the KV cache a request will hold, told before the engine has counted its tokens.

A prompt's tokens come from the length of its text, or from the engine's own `/tokenize` where the estimate alone would
refuse it. The output is as long as four of five answers of the tier are, or as `max_tokens` allows.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from cacheaware_sidecar import upstream
from cacheaware_sidecar.block_budget import BlockBudget, Demand
from cacheaware_sidecar.costs import TYPICAL_OUTPUT
from cacheaware_sidecar.engine_client import EngineClient
from cacheaware_sidecar.errors import BadRequest, EngineBroke, NoEngine
from cacheaware_sidecar.estimated_ledger import HitCounts
from cacheaware_sidecar.figures import percentile
from cacheaware_sidecar.metering import Usage
from cacheaware_sidecar.prefix_key import CHUNK_BYTES, TEXT_BYTES_PER_TOKEN, PrefixKey
from cacheaware_sidecar.relay import read_whole
from cacheaware_sidecar.rewrite import Asked
from cacheaware_sidecar.token_lengths import TokenLengths

_PATIENCE = 5.0
_REMEMBERED = 64  # answers of a tier
_CHAT = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")


class Estimates:
    """For one engine that keeps no account of blocks."""

    def __init__(self, blocks: BlockBudget, hits: HitCounts, lengths: TokenLengths) -> None:
        self._blocks = blocks
        self._hits = hits
        self._lengths = lengths
        self._outputs: dict[str, deque[int]] = {}

    def demand(self, tier: str, key: PrefixKey | None, asked: Asked, prompt_tokens: int | None = None) -> Demand:
        """`prompt_tokens`, where they were counted."""
        output = self._likely_output(tier, asked.output_limit)
        if key is None:
            prompt = round(asked.size / TEXT_BYTES_PER_TOKEN) if prompt_tokens is None else prompt_tokens
            return Demand(prompt, output, asked.sequences)
        if prompt_tokens is None:
            prompt, chunk_tokens = self._lengths.tokens(key), self._lengths.chunk_tokens(key)
        else:
            prompt, chunk_tokens = prompt_tokens, CHUNK_BYTES * prompt_tokens / max(1, key.length)
        return Demand(prompt, output, asked.sequences, key.chunks, max(1, round(chunk_tokens)))

    def too_large(self, tier: str, demand: Demand) -> BadRequest | None:
        """Why the prompt could never fit, whatever others hold; None where it could."""
        cache, needed = self._blocks.cache, self._blocks.whole(demand)
        if cache is None or needed <= cache.most(tier):
            return None
        most = cache.most(tier)
        return BadRequest(
            f"the prompt of {demand.prompt} tokens needs {needed} blocks of {cache.block_size} tokens, one to grow "
            f"into included, and tier {tier} can have at most {most} of {cache.capacity}: shorten it, or use another "
            "tier",
            code="context_length_exceeded",
        )

    def learn(self, tier: str, usage: Usage, sequences: int) -> None:
        """The engine has counted."""
        self._hits.note(tier, usage)
        self._outputs.setdefault(tier, deque(maxlen=_REMEMBERED)).append(-(-usage.output_tokens // sequences))

    def _likely_output(self, tier: str, limit: int | None) -> int:
        likely = percentile(sorted(self._outputs.get(tier, ())), 80)
        output = round(TYPICAL_OUTPUT if likely is None else likely)
        return max(1, output if limit is None else min(output, limit))


async def count_prompt_tokens(
    engine: EngineClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> int | None:
    """What the engine makes of the prompt; None where it does not say."""
    if path == "/v1/chat/completions":
        asked = {name: body[name] for name in ("model", *_CHAT) if name in body}
    elif isinstance(body.get("prompt"), str):
        asked = {name: body[name] for name in ("model", "prompt") if name in body}
    else:
        return None  # ids, which are counted already, or several prompts
    try:
        async with (
            asyncio.timeout(_PATIENCE),
            upstream.call(engine, "POST", "/tokenize", headers=headers, body=json.dumps(asked).encode()) as answer,
        ):
            told = json.loads(await read_whole(answer)) if answer.status == 200 else None
    except (NoEngine, EngineBroke, TimeoutError, ValueError):
        return None
    count = told.get("count") if isinstance(told, dict) else None
    return count if type(count) is int and count >= 0 else None
