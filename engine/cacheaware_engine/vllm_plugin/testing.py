"""A real scheduler of vLLM with real block accounts and no model: steps are scheduled, tokens are made up.

`Rig` is for tests and benchmarks. Its engine is the smallest description of a model that vLLM accepts; `step` does what
an engine core does, with as many steps under way as asked for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

_TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def make_config(
    folder: Path, blocks: int, block_size: int, *, max_num_seqs: int, max_batched: int, max_model_len: int, sync: bool
) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(_TINY_LLAMA))
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len, seed=0
    )
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks + 1
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            policy="priority",
            async_scheduling=not sync,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )


class Rig:
    """`scheduler_class` on `blocks` blocks; `depth` steps may be under way at once (2: as asynchronous vLLM)."""

    def __init__(
        self,
        scheduler_class: Callable[..., Any],
        folder: Path,
        *,
        blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_batched: int = 64,
        max_model_len: int = 256,
        depth: int = 2,
    ) -> None:
        config = make_config(
            folder, blocks, block_size, max_num_seqs=max_num_seqs, max_batched=max_batched,
            max_model_len=max_model_len, sync=depth == 1,
        )  # fmt: skip
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=True,
        )
        self._depth = depth
        self._under_way: deque[Any] = deque()
        self._count = 0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}  # what each request was answered with
        self.finished: dict[str, str] = {}  # why, by request
        self.next_token: Callable[[Request, int], int] = _countdown

    def add(
        self, tier: str | None, prompt: Sequence[int], *, max_tokens: int = 8, salt: str | None = None,
        priority: int = 0, fields: Mapping[str, Any] | None = None, **sampling: Any,
    ) -> str:  # fmt: skip
        """`fields`: more of vLLM's request; `sampling`: more of its parameters."""
        self._count += 1
        request_id = f"{tier}-{self._count}"
        arguments = {} if tier is None else {"cacheaware_tier": tier}
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=arguments, **sampling)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=float(self._count),
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
            **(fields or {}),
        )
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.setdefault(request_id, "abort")

    def step(self) -> list[str]:
        """Schedule a step, and take up the results of the oldest one under way. Returns whom it computed for."""
        scheduled: list[str] = []
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            scheduled = list(output.num_scheduled_tokens)
            self._under_way.append((output, self._sample(output)))
        while self._under_way and (len(self._under_way) >= self._depth or not scheduled):
            self._take_up(*self._under_way.popleft())
        return scheduled

    def drain(self, most_steps: int = 2000) -> None:
        """Until every request has ended."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._under_way:
                return
            self.step()
        waiting = [request_id for request_id in self.requests if request_id not in self.finished]
        raise AssertionError(f"after {most_steps} steps these have not ended: {waiting}")

    def _sample(self, output: Any) -> list[list[int]]:
        """One token for each request whose context is complete, decided when the step was scheduled."""
        sampled = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            end = request.num_computed_tokens
            complete = end >= request.num_tokens + max(0, request.num_output_placeholders - 1)
            sampled.append([self.next_token(request, end)] if complete and scheduled else [])
        return sampled

    def _take_up(self, output: Any, sampled: list[list[int]]) -> None:
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        answers = self.scheduler.update_from_output(output, result)
        for client in answers.values():
            for each in client.outputs:
                if self.finished.get(each.request_id) == "abort":
                    continue  # its client is gone
                self.tokens[each.request_id].extend(each.new_token_ids)
                if each.finish_reason is not None:
                    assert each.request_id not in self.finished, f"{each.request_id} ended twice"
                    self.finished[each.request_id] = str(each.finish_reason)


def _countdown(request: Request, position: int) -> int:
    """A token that depends on where it stands only, so that an answer is the same however it was scheduled."""
    return (position * 31 + int(request.num_prompt_tokens)) % 250 + 3
