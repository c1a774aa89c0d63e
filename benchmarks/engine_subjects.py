"""The engines that the benchmark runs, each behind the same few calls, and the process that one of them runs in.

Started as `python -m benchmarks.engine_subjects NAME MODEL THREADS [SETTING=VALUE …]` with the Python of that engine's
own environment. Commands and answers are lines of JSON on stdin and stdout; everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine_workloads import WORKLOADS, Subject, measure

MAX_MODEL_LEN = 8192
KV_TOKENS = 16_384


class Ours:
    """The Torch engine: its scheduler, accounts and sampling included, without servers."""

    def __init__(self, model: Path, threads: int, settings: Mapping[str, str]) -> None:
        import torch

        from cacheaware_engine.blocks import BlockPool
        from cacheaware_engine.engine import Engine
        from cacheaware_engine.loader import load_model
        from cacheaware_engine.metrics import Metrics
        from cacheaware_engine.runner import ModelRunner
        from cacheaware_engine.settings import DType

        torch.set_num_threads(threads)
        loaded = load_model(model, DType.FLOAT32)
        runner = ModelRunner(loaded.network, KV_TOKENS // 16, 16, **_runner_options(settings))
        pool = BlockPool(KV_TOKENS // 16, 16, 32, bytes_per_token=runner.bytes_per_token)
        self._engine = Engine(
            runner=runner,
            pool=pool,
            decode=lambda tokens: "",
            eos_token_ids=loaded.eos_token_ids,
            max_num_batched_tokens=int(settings.get("max_num_batched_tokens", 512)),
            metrics=Metrics("benchmark"),
        )
        self._bytes_per_token = runner.bytes_per_token
        self._got: list[int] = []

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        from cacheaware_engine.requests import Generation, RequestId, Submission
        from cacheaware_engine.sampling_params import SamplingParams

        generation = Generation(SamplingParams(temperature=0.0), max_tokens, ignore_eos=True)
        submission = Submission(RequestId(str(request)), "default", tuple(prompt), generation)
        self._engine.submit(submission, _Tally(request, self._got))

    def step(self) -> list[int]:
        self._got.clear()
        self._engine.step()
        return list(self._got)

    def abort_all(self) -> None:
        for request in self._engine.live:
            self._engine.abort(request)

    def kv_tokens_read(self) -> tuple[int, int] | None:
        totals = self._engine.totals
        return totals.kv_bytes_read // self._bytes_per_token, totals.unique_kv_bytes // self._bytes_per_token


def _runner_options(settings: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the runner that the benchmark compares: `kv`, `share=off` and `attention`."""
    from cacheaware_engine.attention_costs import SEPARATELY
    from cacheaware_engine.settings import AttentionBy, KvDtype
    from cacheaware_engine.startup import native_attention

    shares = settings.get("share", "on") == "on"
    return {
        "kv_dtype": KvDtype(settings.get("kv", "auto")),
        "costs": None if shares else SEPARATELY,
        "native": native_attention(AttentionBy(settings.get("attention", "auto"))),
    }


class _Tally:
    """A request's outbox that only notes that a token came."""

    def __init__(self, request: int, got: list[int]) -> None:
        self._request, self._got = request, got

    def admitted(self, cached_tokens: int) -> None:
        pass

    def post(self, deltas: Iterable[Any]) -> None:
        self._got.extend(self._request for delta in deltas if delta.tokens)

    def close(self, error: Exception | None = None) -> None:
        if error is not None:
            raise error


class Vllm:
    """vLLM's engine in this process: no server, no second process, no compilation (a CPU gains nothing by it)."""

    def __init__(self, model: Path, threads: int, settings: Mapping[str, str]) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))) if threads > 1 else "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=32,
                max_num_batched_tokens=int(settings.get("max_num_batched_tokens", 512)),
                num_gpu_blocks_override=KV_TOKENS // 32,
                block_size=32,
                enforce_eager=True,
                enable_prefix_caching=True,
            )
        )
        self._lengths: dict[str, int] = {}
        self._number = 0

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        self._number += 1
        name = f"{request}-{self._number}"
        self._lengths[name] = 0
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self) -> list[int]:
        got = []
        for output in self._engine.step():
            length = len(output.outputs[0].token_ids)
            if length > self._lengths.get(output.request_id, length):
                got.append(int(output.request_id.split("-")[0]))
            self._lengths[output.request_id] = length
            if output.finished:
                del self._lengths[output.request_id]
        return got

    def abort_all(self) -> None:
        self._engine.abort_request(list(self._lengths))
        self._lengths.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def kv_tokens_read(self) -> tuple[int, int] | None:
        return None


class Transformers:
    """transformers' continuous batching, its loop driven step by step instead of on a thread."""

    def __init__(self, model: Path, threads: int, settings: Mapping[str, str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(threads)
        network = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, attn_implementation="sdpa")
        self._manager = network.eval().init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=16),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32,
                num_blocks=KV_TOKENS // 32,
                max_batch_tokens=int(settings.get("max_num_batched_tokens", 512)),
                max_requests_per_batch=32,
                use_async_batching=False,
                use_cuda_graph=False,
            ),
        )
        self._processor = self._manager.batch_processor = self._manager._create_batch_processor()
        self._manager.current_batch = 0
        self._lengths: dict[str, int] = {}
        self._number = 0

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._number += 1
        name = f"{request}-{self._number}"
        self._lengths[name] = 0
        self._manager.add_request(list(prompt), request_id=name, max_new_tokens=max_tokens, streaming=True)

    def step(self) -> list[int]:
        import torch

        with torch.inference_mode():
            if self._processor.prepare_next_batch():
                self._manager._generation_step()
                self._processor.update_batch()
        got = []
        while (output := self._manager.get_result(timeout=0.0)) is not None:
            if len(output.generated_tokens) > self._lengths.get(output.request_id, 2**30):
                self._lengths[output.request_id] = len(output.generated_tokens)
                got.append(int(output.request_id.split("-")[0]))
            if output.is_finished():
                self._lengths.pop(output.request_id, None)
        return got

    def abort_all(self) -> None:
        for name in self._lengths:
            self._manager.cancel_request(name)
        self._lengths.clear()
        self.step()

    def kv_tokens_read(self) -> tuple[int, int] | None:
        return None


class Served:
    """Ours as clients reach it: its process, a sidecar before it, and a stream for each request."""

    def __init__(self, model: Path, threads: int, settings: Mapping[str, str]) -> None:
        from benchmarks.engine_http import Servers

        self._servers = Servers(model, threads, KV_TOKENS, int(settings.get("max_num_batched_tokens", 512)))
        self._added: list[tuple[int, Sequence[int], int]] = []

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._added.append((request, prompt, max_tokens))

    def step(self) -> list[int]:
        """Everything that was added, to its end."""
        added, self._added = self._added, []
        made = self._servers.run([(prompt, max_tokens) for _, prompt, max_tokens in added])
        return [request for (request, _, _), tokens in zip(added, made, strict=True) for _ in range(tokens)]

    def abort_all(self) -> None:
        self._added.clear()

    def kv_tokens_read(self) -> tuple[int, int] | None:
        return None

    def close(self) -> None:
        self._servers.close()


SUBJECTS: Mapping[str, Callable[[Path, int, Mapping[str, str]], Subject]] = {
    "ours": Ours,
    "vllm": Vllm,
    "transformers": Transformers,
    "http": Served,
}


def main(arguments: Sequence[str]) -> None:
    name, model, threads, *settings = arguments
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not come between the answers
    subject: Subject = SUBJECTS[name](Path(model), int(threads), dict(item.split("=", 1) for item in settings))
    print(json.dumps({"ready": name}), file=answers, flush=True)
    workloads = {workload.name: workload for workload in WORKLOADS}
    try:
        for line in sys.stdin:
            command = json.loads(line)
            measured = measure(subject, workloads[command["workload"]], command["steps"], command["seed"])
            print(json.dumps(asdict(measured)), file=answers, flush=True)
    finally:
        if isinstance(subject, Served):
            subject.close()


if __name__ == "__main__":
    main(sys.argv[1:])
