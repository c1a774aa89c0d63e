"""Logits are those of transformers, however a text is cut into steps and whatever else is in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheaware_engine.loader import load_model
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType
from cacheaware_engine.testing import TINY_MODELS, greedy, native_here, reference_greedy, reference_logits

TOLERANCE = 1e-4
VOCABULARY = 256

Tiny = Callable[[str], Any]


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def shuffled_blocks(seed: int, count: int) -> list[int]:
    blocks = list(range(count))
    random.Random(seed).shuffle(blocks)
    return blocks


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    # Embeddings that a model scales up give logits of tens, and rounding errors with them.
    assert (ours - reference).abs().max().item() < TOLERANCE * max(1.0, reference.abs().max().item() / 10)


@pytest.mark.parametrize("kind", TINY_MODELS)
class TestEachKindOfModel:
    def test_a_prompt_in_one_step(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prompt = text(1, 37)
        runner = ModelRunner(model.ours.network, num_blocks=10, block_size=4)
        logits = runner.forward([SequenceWork(prompt, 0, shuffled_blocks(1, 10), sample=True)]).logits
        assert_close(logits[0], reference_logits(model.reference, prompt)[-1])

    def test_token_by_token(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prompt = text(2, 21)
        expected = reference_logits(model.reference, prompt)
        runner = ModelRunner(model.ours.network, num_blocks=8, block_size=3)
        table = shuffled_blocks(2, 8)
        for position, token in enumerate(prompt):
            logits = runner.forward([SequenceWork([token], position, table, sample=True)]).logits
            assert_close(logits[0], expected[position])

    def test_chunks_cut_at_odd_places(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prompt = text(3, 50)
        expected = reference_logits(model.reference, prompt)
        runner = ModelRunner(model.ours.network, num_blocks=13, block_size=4)
        table = shuffled_blocks(3, 13)
        for start, end in [(0, 5), (5, 6), (6, 23), (23, 24), (24, 47), (47, 50)]:
            logits = runner.forward([SequenceWork(prompt[start:end], start, table, sample=True)]).logits
            assert_close(logits[0], expected[end - 1])

    def test_together_with_sequences_of_other_lengths(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prompts = [text(seed, length) for seed, length in [(4, 3), (5, 90), (6, 41), (7, 44), (8, 1)]]
        blocks = shuffled_blocks(4, 60)
        tables = [[blocks.pop() for _ in range(-(-len(prompt) // 4))] for prompt in prompts]
        runner = ModelRunner(model.ours.network, num_blocks=60, block_size=4)
        runner.forward(  # all but the last token; the first of them in the same step as whole prompts
            [
                SequenceWork(prompt[:-1], 0, table, sample=False)
                for prompt, table in zip(prompts, tables, strict=True)
                if len(prompt) > 1
            ]
        )
        step = [SequenceWork(p[-1:], len(p) - 1, t, sample=True) for p, t in zip(prompts, tables, strict=True)]
        logits = runner.forward(step).logits
        for row, prompt in enumerate(prompts):
            assert_close(logits[row], reference_logits(model.reference, prompt)[-1])

    def test_after_a_prefix_that_another_sequence_computed(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prefix, tail, other_tail = text(9, 24), text(10, 9), text(11, 1)
        blocks = shuffled_blocks(5, 12)
        shared = [blocks.pop() for _ in range(6)]
        runner = ModelRunner(model.ours.network, num_blocks=12, block_size=4)
        runner.forward([SequenceWork(prefix, 0, shared, sample=False)])
        logits = runner.forward(
            [
                SequenceWork(tail, 24, [*shared, *blocks[:3]], sample=True),
                SequenceWork(other_tail, 24, [*shared, blocks[3]], sample=True),
            ]
        ).logits
        assert_close(logits[0], reference_logits(model.reference, prefix + tail)[-1])
        assert_close(logits[1], reference_logits(model.reference, prefix + other_tail)[-1])

    def test_greedy_texts_are_those_of_generate(self, tiny: Tiny, kind: str) -> None:
        model = tiny(kind)
        prompts = [text(seed, length) for seed, length in [(12, 1), (13, 17), (14, 30), (15, 64)]]
        runner = ModelRunner(model.ours.network, num_blocks=64, block_size=4)
        ours = greedy(runner, prompts, max_new_tokens=12, chunk=7)
        for mine, reference in zip(ours, reference_greedy(model.reference, prompts, 12), strict=True):
            different = next((i for i in range(12) if mine[i] != reference.tokens[i]), None)
            assert different is None or reference.margins[different] < 1e-3


def test_logits_come_in_the_order_of_the_sampled_work(tiny: Tiny) -> None:
    model = tiny("llama-gqa")
    prompts = [text(20, 5), text(21, 1), text(22, 7), text(23, 1)]
    runner = ModelRunner(model.ours.network, num_blocks=8, block_size=4)
    wanted = [True, False, True, True]
    work = [
        SequenceWork(prompt, 0, [2 * index, 2 * index + 1], sample=sample)
        for index, (prompt, sample) in enumerate(zip(prompts, wanted, strict=True))
    ]
    logits = runner.forward(work).logits
    assert logits.shape == (3, runner.vocab_size)
    for row, prompt in zip(logits, [prompts[0], prompts[2], prompts[3]], strict=True):
        assert_close(row, reference_logits(model.reference, prompt)[-1])


def test_a_step_without_sampled_sequences_has_no_logits(tiny: Tiny) -> None:
    runner = ModelRunner(tiny("llama-gqa").ours.network, num_blocks=2, block_size=4)
    output = runner.forward([SequenceWork(text(24, 6), 0, [0, 1], sample=False)])
    assert output.logits.shape == (0, runner.vocab_size)


def test_a_copied_block_continues_as_the_original_does(tiny: Tiny) -> None:
    model = tiny("qwen3")
    prompt = text(25, 6)
    runner = ModelRunner(model.ours.network, num_blocks=4, block_size=4)
    runner.forward([SequenceWork(prompt, 0, [0, 1], sample=False)])
    runner.copy_block(1, 3)
    logits = runner.forward(
        [SequenceWork([7], 6, [0, 1], sample=True), SequenceWork([8], 6, [0, 3], sample=True)]
    ).logits
    assert_close(logits[0], reference_logits(model.reference, [*prompt, 7])[-1])
    assert_close(logits[1], reference_logits(model.reference, [*prompt, 8])[-1])


def test_what_earlier_users_left_in_a_block_does_not_matter(tiny: Tiny) -> None:
    model = tiny("qwen2")
    runner = ModelRunner(model.ours.network, num_blocks=6, block_size=4)
    runner.forward([SequenceWork(text(26, 24), 0, range(6), sample=False)])
    prompt = text(27, 10)
    logits = runner.forward([SequenceWork(prompt, 0, [5, 0, 3], sample=True)]).logits
    assert_close(logits[0], reference_logits(model.reference, prompt)[-1])


def test_bfloat16_stays_close_to_float32(tiny: Tiny) -> None:
    model = tiny("qwen3")
    prompt = text(28, 30)
    network = load_model(model.folder, DType.BFLOAT16).network
    runner = ModelRunner(network, num_blocks=8, block_size=4)
    runner.forward([SequenceWork(prompt[:20], 0, range(8), sample=False)])
    runner.forward([SequenceWork(prompt[20:29], 20, range(8), sample=False)])
    logits = runner.forward([SequenceWork(prompt[29:], 29, range(8), sample=True)]).logits[0]
    expected = reference_logits(model.reference, prompt)[-1]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max().item() < 0.05 * expected.abs().max().item()
    assert runner.bytes_per_token * 2 == ModelRunner(model.ours.network, 1, 4).bytes_per_token


@pytest.mark.parametrize(
    ("work", "read", "unique"),
    [
        pytest.param([SequenceWork([1] * 7, 0, [0, 1], False)], 0, 0, id="a-prompt-reads-nothing-stored"),
        pytest.param([SequenceWork([1] * 3, 6, [0, 1, 2], False)], 6, 6, id="a-chunk-reads-its-prefix"),
        pytest.param([SequenceWork([1], 6, [0, 1], False)], 7, 7, id="a-decode-reads-its-own-token-too"),
        pytest.param(
            [SequenceWork([1], 8, [0, 1, 2], False), SequenceWork([1], 9, [0, 1, 3], False)],
            19,
            11,
            id="a-shared-prefix-is-unique-once",
        ),
        pytest.param(
            [SequenceWork([1], 5, [0, 1], False), SequenceWork([1] * 2, 7, [0, 1, 2], False)],
            13,
            7,
            id="of-a-block-read-to-different-depths-the-deepest-counts",
        ),
        pytest.param(
            [SequenceWork([1], 90, range(23), False), SequenceWork([1], 0, [30], False)],
            92,
            92,
            id="padding-is-not-counted",
        ),
    ],
)
def test_bytes_read_are_exact(tiny: Tiny, work: list[SequenceWork], read: int, unique: int) -> None:
    runner = ModelRunner(tiny("llama-gqa").ours.network, num_blocks=32, block_size=4)
    output = runner.forward(work)
    assert output.kv_bytes_read == read * runner.bytes_per_token
    assert output.unique_kv_bytes == unique * runner.bytes_per_token


def test_bytes_per_token_are_those_of_the_configuration(tiny: Tiny) -> None:
    model = tiny("llama-gqa")
    runner = ModelRunner(model.ours.network, num_blocks=1, block_size=4)
    assert runner.bytes_per_token == 2 * 2 * 2 * 12 * 4  # layers · (key, value) · kv heads · head size · fp32
    assert runner.bytes_per_token == model.ours.config.kv_bytes_per_token(4)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(SequenceWork([], 0, [0], False), id="no-tokens"),
        pytest.param(SequenceWork([1] * 5, 0, [0], False), id="a-table-too-short"),
        pytest.param(SequenceWork([1], 4, [0], False), id="a-decode-past-its-table"),
    ],
)
def test_work_that_does_not_fit_its_table_is_a_bug_of_the_caller(tiny: Tiny, work: SequenceWork) -> None:
    runner = ModelRunner(tiny("llama-gqa").ours.network, num_blocks=2, block_size=4)
    with pytest.raises(AssertionError):
        runner.forward([work])


# -- any batch, any chunking ------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """A sequence on its way: the next part to compute is tokens[computed:ends[0]]."""

    tokens: list[int]
    ends: list[int]
    table: list[int]
    computed: int
    source: int | None  # whose blocks the first `computed` tokens are in

    def part(self) -> SequenceWork:
        return SequenceWork(self.tokens[self.computed : self.ends[0]], self.computed, self.table, sample=True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Progress]]:
    """Sequences over shuffled blocks, cut anywhere; some start on whole blocks of an earlier one."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    blocks = shuffled_blocks(draw(st.integers(0, 1000)), 400)
    sequences: list[Progress] = []
    for index in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40))
        source, shared = None, 0
        shares: bool = draw(st.booleans())
        if sequences and shares:
            source = draw(st.integers(0, index - 1))
            shared = draw(st.integers(0, len(sequences[source].tokens) // block_size))
            tokens = sequences[source].tokens[: shared * block_size] + tokens
        table = sequences[source].table[:shared] if source is not None else []
        table = table + [blocks.pop() for _ in range(-(-len(tokens) // block_size) - shared)]
        start = shared * block_size
        ends = draw(st.sets(st.integers(start + 1, len(tokens)), max_size=6)) | {len(tokens)}
        sequences.append(Progress(tokens, sorted(ends), table, start, source))
    return block_size, sequences


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), data=st.data())
def test_any_mix_of_chunks_and_decodes_is_exact(
    tiny: Tiny, batch: tuple[int, list[Progress]], data: st.DataObject
) -> None:
    model = tiny("llama-gqa")
    block_size, sequences = batch
    expected = [reference_logits(model.reference, sequence.tokens) for sequence in sequences]
    native = native_here() if data.draw(st.booleans(), "native") else None
    runner = ModelRunner(model.ours.network, num_blocks=400, block_size=block_size, native=native)
    after = [sequence.computed if sequence.source is None else 0 for sequence in sequences]  # tokens in blocks
    while any(sequence.ends for sequence in sequences):
        step: list[Progress] = []
        for index, sequence in enumerate(sequences):
            # A sequence may read what its source stored before, or stores in this very step.
            ready = sequence.source is None or after[sequence.source] >= sequence.computed or after[index]
            if sequence.ends and ready and (data.draw(st.booleans()) or not step):
                step.append(sequence)
                after[index] = sequence.ends[0]
        step = data.draw(st.permutations(step))
        logits = runner.forward([sequence.part() for sequence in step]).logits
        for row, sequence in zip(logits, step, strict=True):
            sequence.computed = sequence.ends.pop(0)
            assert_close(row, expected[sequences.index(sequence)][sequence.computed - 1])
