"""Decoders that transformers computes over our keys and values, and those that are refused by what they ask for.

That their logits are right is in `test_logits.py`, with those of every other kind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheaware_engine.attention_costs import SEPARATELY, TOGETHER
from cacheaware_engine.errors import ModelUnsupported
from cacheaware_engine.foreign import ForeignNetwork
from cacheaware_engine.llama import Llama
from cacheaware_engine.loader import load_model
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType
from cacheaware_engine.testing import TINY_MODELS, native_here, save_tiny_model

Tiny = Callable[[str], Any]
FOREIGN = {"gemma", "gemma3-windows", "phi3"}


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_the_lean_network_computes_what_it_knows(tiny: Tiny, kind: str) -> None:
    expected = ForeignNetwork if kind in FOREIGN else Llama
    assert isinstance(tiny(kind).ours.network, expected)


@pytest.mark.parametrize("kind", sorted(FOREIGN))
def test_they_share_prefixes_too(tiny: Tiny, kind: str) -> None:
    logits = []
    for costs, native in ((SEPARATELY, None), (TOGETHER, None), (TOGETHER, native_here())):
        runner = ModelRunner(tiny(kind).ours.network, num_blocks=40, block_size=4, costs=costs, native=native)
        runner.forward([SequenceWork([5] * 24, 0, range(6), sample=False)])
        output = runner.forward([SequenceWork([9 + i], 24, [*range(6), 10 + i], sample=True) for i in range(3)])
        logits.append(output.logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-3, rtol=0)


def test_windows_and_scale_are_those_of_the_model(tiny: Tiny) -> None:
    assert tiny("gemma3-windows").ours.network.shape.windows == (11, None)


def test_soft_capped_attention_is_refused_by_name(tmp_path: Path) -> None:
    kind: dict[str, Any] = {"model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    folder = save_tiny_model(tmp_path / "gemma2", "llama-gqa", **kind)
    with pytest.raises(ModelUnsupported, match="soft-capping"):
        load_model(folder, DType.FLOAT32)


def test_a_model_that_continues_no_text_is_refused_by_its_architecture(tiny: Tiny, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(ModelUnsupported, match="LlamaForSequenceClassification"):
        load_model(folder, DType.FLOAT32)
