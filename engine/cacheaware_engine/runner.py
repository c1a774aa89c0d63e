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
from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.cost_cache import CostCache, Measured, device_name
from cacheaware_engine.cost_probe import measured_costs
from cacheaware_engine.kv_format import kv_format
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.network import Network
from cacheaware_engine.settings import KvDtype
from cacheaware_engine.step_plan import SequenceWork, Shared
from cacheaware_engine.step_planner import StepPlanner
from cacheaware_engine.step_reads import Native

__all__ = ["ModelRunner", "SequenceWork", "StepOutput"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    logits: Tensor  # [sampled, vocab] fp32, in the order of the work and of the logits that each wants
    kv_bytes_read: int  # bytes of stored keys and values that attention reads, summed over sequences and groups
    unique_kv_bytes: int  # the same, each stored token counted once
    kv_bytes_in_place: int = 0  # of those read, bytes that lay in one piece and were not copied
    groups: tuple[Shared, ...] = ()  # sequences that read a prefix together


class ModelRunner:
    """One model and its KV blocks on one device. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        model: Network,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        *,
        kv_dtype: KvDtype = KvDtype.AUTO,
        costs: AttentionCosts | None = None,
        cost_cache: CostCache | None = None,
        native: NativeAttention | None = None,
    ) -> None:
        """`costs` decide which reads are shared; None: those in the cache, or else they are measured now. `native`
        reads decodes if it can read this store; else torch's operations do."""
        self._model = model
        self._device = torch.device(device)
        self._kernel = kernel_for(self._device)
        self._windows = model.shape.windows
        self._store = KvStore(
            num_layers=len(self._windows),
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=model.shape.kv_heads,
            head_dim=model.shape.head_dim,
            kv_format=kv_format(kv_dtype, model.dtype),
            device=self._device,
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_token = self._store.bytes_per_token
        self.kv_form = self._store.format.name
        self.vocab_size = model.vocab_size
        self._native = native if native is not None and native.can_read(self._store) else None
        if costs is None:
            costs = self._costs(model, cost_cache)
        self.costs = costs
        self._planner = StepPlanner(self._store, model.dtype, costs, self._windows, self._native_use)

    @torch.inference_mode()
    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        """Compute one step: any mix of decodes and prefill chunks, in any order."""
        assert work, "a step needs work"
        plan = self._planner.plan(work)
        attend = PagedAttention(plan, self._store, self._kernel, self._windows, self._tasks, self._native)
        logits = self._model.forward(plan.tokens, plan.positions, attend, plan.sampled)
        layer_bytes = self.bytes_per_token // len(self._windows)
        layers = [plan.reads[window] for window in self._windows]
        return StepOutput(
            logits=logits,
            kv_bytes_read=sum(reads.tokens for reads in layers) * layer_bytes,
            unique_kv_bytes=sum(reads.unique_tokens for reads in layers) * layer_bytes,
            kv_bytes_in_place=sum(reads.tokens_in_place for reads in layers) * layer_bytes,
            groups=plan.groups if None in plan.reads else (),
        )

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the keys and values of `source`: the partly filled tail of sequences that part ways."""
        self._store.copy_block(source, target)

    def _costs(self, model: Network, cache: CostCache | None) -> AttentionCosts:
        def measure() -> AttentionCosts:
            return measured_costs(self._store, self._kernel, model.shape.heads, self._native)

        if cache is None:
            return measure()
        form = self._store.format
        return cache.costs(
            Measured(
                device=device_name(self._device),
                threads=self._tasks,
                layers=len(self._windows),
                heads=model.shape.heads,
                kv_heads=model.shape.kv_heads,
                head_dim=model.shape.head_dim,
                compute=str(form.compute),
                storage=form.name,
                native=self.native,
            ),
            measure,
        )

    @property
    def native(self) -> bool:
        """Whether the native library computes attention: of decodes, and in float32 of prompts."""
        return self._native is not None

    @property
    def _native_use(self) -> Native | None:
        # Of prompts in bfloat16 torch's operations are faster on processors that multiply it.
        return Native(self._tasks, chunks=self._model.dtype == torch.float32) if self.native else None

    @property
    def _tasks(self) -> int:
        return torch.get_num_threads() if self._device.type == "cpu" else 1
