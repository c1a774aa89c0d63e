"""Logits that depend on the tokens so far: penalties for what was said, and biases by token.

Repetition counts prompt and output, as it was defined; presence and frequency count the output alone, as OpenAI does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheaware_engine.sampling_params import SamplingParams


class Penalties:
    """What one sequence has said, as far as its parameters ask. Kept while it is preempted."""

    __slots__ = ("_counts", "_params", "_prompt")

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._prompt = set(prompt) if params.repetition_penalty != 1 else set[int]()
        self._counts: Counter[int] = Counter()

    def said(self, token: int) -> None:
        self._counts[token] += 1

    def apply_(self, logits: Tensor) -> None:
        """Change one row of logits in place. [vocab]"""
        params = self._params
        if params.logit_bias:
            logits[list(params.logit_bias)] += logits.new_tensor(list(params.logit_bias.values()))
        if params.repetition_penalty != 1 and (seen := list(self._prompt.union(self._counts))):
            before = logits[seen]
            divided, multiplied = before / params.repetition_penalty, before * params.repetition_penalty
            logits[seen] = torch.where(before > 0, divided, multiplied)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            times = logits.new_tensor(list(self._counts.values()))
            logits[list(self._counts)] -= params.presence_penalty + params.frequency_penalty * times
