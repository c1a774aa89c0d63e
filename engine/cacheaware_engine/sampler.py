"""Chooses next tokens from logits, for all sequences of a step at once.

A sequence draws one random number a token, from a source of its own, and walks the cumulative distribution in the
order of the vocabulary. So its text depends on its seed and its logits, not on what else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.errors import BrokenLogits
from cacheaware_engine.penalties import Penalties
from cacheaware_engine.sampling_params import SamplingParams
from cacheaware_engine.structured_output import Constraint

__all__ = ["SamplingParams", "SequenceSampler", "sample"]

# Likeliest tokens looked at before a whole vocabulary is sorted: they nearly always hold the mass that top_p asks for,
# and finding them takes a tenth of the time.
_CANDIDATES: Final = 1024


class SequenceSampler:
    """Sampling state of one sequence. Kept while the sequence is preempted, so that a seeded text goes on."""

    __slots__ = ("_random", "constraint", "params", "penalties")

    def __init__(
        self,
        params: SamplingParams,
        sequence: int = 0,
        entropy: random.Random | None = None,
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """`sequence` tells the sequences of one request apart; `entropy` seeds those without a seed."""
        self.params = params
        self.constraint = constraint
        self.penalties = Penalties(params, prompt) if params.penalises else None
        if params.seed is not None:
            self._random = random.Random(f"{params.seed}/{sequence}")
        else:
            self._random = random.Random(entropy.getrandbits(128) if entropy is not None else None)

    def draw(self) -> float:
        """The next random number, 0 ≤ x < 1."""
        return self._random.random()


@torch.inference_mode()
def sample(
    logits: Tensor, sequences: Sequence[SequenceSampler], banned: Mapping[int, Collection[int]] | None = None
) -> list[int]:
    """The next token of each sequence. logits: [sequences, vocab] fp32

    `banned` names tokens that may not be chosen, by row. Raises `BrokenLogits` with the rows that hold NaN or
    infinity; nothing was drawn then.
    """
    assert logits.shape[0] == len(sequences), f"{logits.shape[0]} rows of logits for {len(sequences)} sequences"
    broken = broken_rows(logits)
    if broken:
        raise BrokenLogits(broken)
    changed = [
        (row, change)
        for row, one in enumerate(sequences)
        for change in (one.penalties, one.constraint)
        if change is not None
    ]
    if banned or changed:
        logits = logits.clone()
        for row, change in changed:
            change.apply_(logits[row])
        for row, tokens in (banned or {}).items():
            logits[row, list(tokens)] = float("-inf")
    chosen: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.params.greedy]
    if drawn:
        params = [sequences[row].params for row in drawn]
        probabilities = distribution(logits[drawn], params)
        uniform = torch.tensor([sequences[row].draw() for row in drawn], dtype=torch.float64)
        for row, token in zip(drawn, _inverse(probabilities, uniform.to(logits.device)), strict=True):
            chosen[row] = token
    for row, change in changed:
        change.said(chosen[row])
    return chosen


def broken_rows(logits: Tensor) -> list[int]:
    """Rows that hold NaN or infinity."""
    # A sum is not finite if a term is not, and costs a twentieth of looking at each; so look closely only then.
    if torch.isfinite(logits.sum(-1)).all():
        return []
    rows: list[int] = torch.nonzero(~torch.isfinite(logits).all(-1)).flatten().tolist()
    return rows


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each row is drawn from, not normalised: temperature, then min_p, top_k and top_p, each on what the one
    before left. [rows, vocab]"""
    temperature = _column(logits, [row.temperature for row in params])
    probabilities = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    if any(row.min_p > 0 for row in params):
        least = probabilities.amax(-1, keepdim=True) * _column(logits, [row.min_p for row in params])
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    filtered = [row for row, wanted in enumerate(params) if wanted.filters]
    if filtered:
        probabilities[filtered] = _keep_likeliest(probabilities[filtered], [params[row] for row in filtered])
    return probabilities


def _keep_likeliest(probabilities: Tensor, params: Sequence[SamplingParams], *, thorough: bool = False) -> Tensor:
    """Zero all but the top_k likeliest tokens, and of those all beyond the sum top_p. `thorough`: sort everything."""
    vocab = probabilities.shape[-1]
    looked_at = vocab if thorough else min(vocab, max(_CANDIDATES, *(row.top_k or 0 for row in params), 0))
    values, tokens = probabilities.topk(looked_at)
    unlimited = torch.tensor([row.top_k is None for row in params], device=values.device)[:, None]
    top_k = _column(values, [vocab if row.top_k is None else row.top_k for row in params])
    values = values.masked_fill(torch.arange(looked_at, device=values.device) >= top_k, 0.0)
    sums = values.cumsum(-1, dtype=torch.float64)
    all_mass = torch.where(unlimited, probabilities.sum(-1, keepdim=True, dtype=torch.float64), sums[:, -1:])
    top_p = _column(sums, [row.top_p for row in params])
    mass = top_p * all_mass
    beyond = (sums - values >= mass) & (top_p < 1)
    beyond[:, 0] = False
    kept = torch.zeros_like(probabilities).scatter_(1, tokens, values.masked_fill(beyond, 0.0))
    flat = torch.nonzero((unlimited & (sums[:, -1:] < mass)).flatten()).flatten().tolist()
    if flat and looked_at < vocab:  # so flat a distribution that the candidates do not reach top_p
        kept[flat] = _keep_likeliest(probabilities[flat], [params[row] for row in flat], thorough=True)
    return kept


def _inverse(probabilities: Tensor, uniform: Tensor) -> list[int]:
    """The token at which the cumulative distribution passes `uniform`. [rows, vocab], [rows]"""
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # Rounding must not carry the target up to the total: behind it lie only tokens of probability 0.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(sums, target[:, None], right=True).flatten().tolist()
    return tokens


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
