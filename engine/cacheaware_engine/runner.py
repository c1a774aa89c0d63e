"""Runs the network over paged keys and values: one step's work in, logits and what was read out.

The only way from the engine's Python bookkeeping to tensors. Which sequences run, on which blocks, is decided
elsewhere; the runner believes the tables it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheaware_engine.attention import PagedAttention, kernel_for
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.llama import Llama
from cacheaware_engine.step_plan import SequenceWork, plan_step

__all__ = ["ModelRunner", "SequenceWork", "StepOutput"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    logits: Tensor  # [sampled, vocab] fp32, in the order of the work with sample=True
    kv_bytes_read: int  # bytes of stored keys and values that attention reads, summed over sequences
    unique_kv_bytes: int  # the same, each stored token counted once


class ModelRunner:
    """One model and its KV blocks on one device. Not thread-safe: one caller at a time."""

    def __init__(self, model: Llama, num_blocks: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._device = torch.device(device)
        self._kernel = kernel_for(self._device)
        self._store = KvStore(
            num_layers=model.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.embedding.dtype,
            device=self._device,
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_token = self._store.bytes_per_token
        self.vocab_size = model.config.vocab_size

    @torch.inference_mode()
    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        """Compute one step: any mix of decodes and prefill chunks, in any order."""
        assert work, "a step needs work"
        plan = plan_step(work, self._store, self._model.embedding.dtype)
        attend = PagedAttention(plan, self._store, self._kernel)
        logits = self._model.forward(plan.tokens, plan.positions, attend, plan.sampled)
        return StepOutput(
            logits=logits,
            kv_bytes_read=plan.kv_tokens_read * self.bytes_per_token,
            unique_kv_bytes=plan.unique_kv_tokens * self.bytes_per_token,
        )

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the keys and values of `source`: the partly filled tail of sequences that part ways."""
        self._store.copy_block(source, target)
