"""From settings to a ready engine: fetch the model, check that it fits, load it, give it its blocks.

Runs on a thread of its own while the servers already answer. Raises an `EngineError` that says what to change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import memory, model_source, native_build
from .attention_costs import NEVER, SEPARATELY, AttentionCosts
from .blocks import BlockPool
from .chat import Tokenizer
from .compute_dtype import torch_dtype
from .cost_cache import CostCache
from .engine import Engine
from .errors import NoNativeAttention, NotEnoughMemory
from .kv_format import bytes_per_token, kv_format
from .loader import load_model, weight_bytes
from .logs import values
from .metrics import Metrics
from .model_config import DecoderConfig, read_config
from .native_attention import NativeAttention
from .openai_requests import Limits
from .runner import ModelRunner
from .settings import AttentionBy, Settings
from .structured_output import Grammars, load_grammars

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    max_model_len: int
    grammars: Grammars | None = None


def load(settings: Settings, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> LoadedEngine:
    """Load the model named by the settings. Takes seconds to minutes; nothing else may use torch meanwhile."""
    started = clock()
    torch.set_num_threads(settings.threads)
    folder = model_source.fetch(settings.model, on_progress=_LoggedProgress())
    config = read_config(folder)
    max_model_len = config.context(settings.max_model_len)
    dtype = torch_dtype(settings.dtype)
    token_bytes = kv_bytes_per_token(settings, config, dtype)
    num_blocks = blocks_in(settings, token_bytes)
    memory.require_memory(
        weights=weight_bytes(folder, config, dtype),
        kv_cache=num_blocks * settings.block_size * token_bytes,
        available=memory.available_memory(),
    )
    model = load_model(folder, settings.dtype)
    runner = ModelRunner(
        model.network,
        num_blocks,
        settings.block_size,
        kv_dtype=settings.kv_cache_dtype,
        costs=None if settings.share_prefix_reads else SEPARATELY,
        cost_cache=CostCache(model_source.default_cache_dir() / "attention-costs"),
        native=native_attention(settings.attention),
    )
    pool = BlockPool(
        num_blocks, settings.block_size, settings.max_num_seqs, bytes_per_token=runner.bytes_per_token, clock=clock
    )
    tokenizer = Tokenizer(model.tokenizer)
    engine = Engine(
        runner=runner,
        pool=pool,
        decode=tokenizer.decode,
        eos_token_ids=model.eos_token_ids,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        metrics=metrics,
        clock=clock,
    )
    log.info(
        "model ready",
        extra=values(
            model=settings.served_model_name,
            dtype=str(dtype).removeprefix("torch."),
            threads=settings.threads,
            blocks=num_blocks,
            block_size=settings.block_size,
            max_model_len=max_model_len,
            kv_cache_dtype=settings.kv_cache_dtype,
            attention=AttentionBy.NATIVE if runner.native else AttentionBy.TORCH,
            shares_from_tokens=_shares_from(runner.costs),
            seconds=clock() - started,
        ),
    )
    if num_blocks * settings.block_size < max_model_len:
        log.warning(
            "the KV cache holds fewer tokens than the context: requests that need more are refused",
            extra=values(cache_tokens=num_blocks * settings.block_size, max_model_len=max_model_len),
        )
    grammars = load_grammars(model.tokenizer, runner.vocab_size, model.eos_token_ids)
    limits = Limits(runner.vocab_size, settings.max_num_seqs, structured_output=grammars is not None)
    return LoadedEngine(engine, tokenizer, limits, max_model_len, grammars)


def native_attention(asked: AttentionBy) -> NativeAttention | None:
    """The library if it is wanted and can be had. Raises NoNativeAttention if nothing else is wanted."""
    if asked is AttentionBy.TORCH:
        return None
    try:
        path = native_build.library(
            model_source.default_cache_dir() / "native",
            on_build=lambda: log.info("building the native attention for this processor, once: some ten seconds"),
        )
        return NativeAttention(path)
    except NoNativeAttention as error:
        if asked is AttentionBy.NATIVE:
            raise
        log.warning("attention is computed by torch's operations, which is slower", extra=values(why=str(error)))
        return None


def kv_bytes_per_token(settings: Settings, config: DecoderConfig, dtype: torch.dtype) -> int:
    form = kv_format(settings.kv_cache_dtype, dtype)
    return bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, form)


def blocks_in(settings: Settings, token_bytes: int) -> int:
    """How many blocks the settings ask for."""
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    block_bytes = settings.block_size * token_bytes
    blocks = settings.kv_cache_memory // block_bytes
    if blocks < 2:
        raise NotEnoughMemory(
            f"--kv-cache-memory {settings.kv_cache_memory} holds less than two blocks of {settings.block_size} tokens "
            f"({block_bytes} bytes each): give at least {2 * block_bytes}"
        )
    return blocks


def _shares_from(costs: AttentionCosts) -> str:
    """For the log: from how many tokens a prefix is read together, by how many share it."""
    lengths = {members: costs.least_prefix(members) for members in (2, 4, 8, 16)}
    return " ".join(f"{members}:{'never' if least >= NEVER else least}" for members, least in lengths.items())


class _LoggedProgress:
    """Log lines about a download or a conversion: one for each thing that is done, and one a quarter of it."""

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None

    def __call__(self, text: str, fraction: float | None) -> None:
        now = (text, int((fraction or 0) * 4))
        if now != self._said:
            self._said = now
            log.info("%s", text, extra=values(done=None if fraction is None else f"{fraction:.0%}"))
