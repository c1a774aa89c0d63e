"""How likely the model found a chosen token, and which others it found likelier: before penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token's log-probability, and the likeliest tokens with theirs, the likeliest first."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    rank: int  # among all tokens; 1 is the likeliest


@torch.inference_mode()
def logprobs(logits: Tensor, tokens: Sequence[int], most: Sequence[int]) -> list[Chosen]:
    """For each row the chosen token's, and as many of the likeliest as it asks for. logits: [rows, vocab] fp32"""
    sums = torch.logsumexp(logits, -1)
    values, indices = logits.topk(max(1, min(logits.shape[-1], max(most, default=0))))
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    own = (chosen[:, 0] - sums).tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    likely = (values - sums[:, None]).tolist()
    names = indices.tolist()
    return [
        Chosen(token, own[row], tuple(zip(names[row][:count], likely[row][:count], strict=True)), ranks[row])
        for row, (token, count) in enumerate(zip(tokens, most, strict=True))
    ]
