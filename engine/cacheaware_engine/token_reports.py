"""What clients are told of how likely tokens were: of those that are generated, and of those of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from .detokenizer import Decode
from .logprobs import Chosen, logprobs
from .requests import TokenLogprob, TokenReport
from .scheduler import Work
from .sequences import SequenceState


class TokenReports:
    """Made for one tokenizer."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def of_generated(
        self, logits: Tensor, sequences: Sequence[SequenceState], tokens: Sequence[int]
    ) -> dict[int, TokenReport]:
        """Of each sequence's new token, by row, where it is asked for."""
        asked = {
            row: most
            for row, sequence in enumerate(sequences)
            if (most := sequence.sampler.params.logprobs) is not None
        }
        if not asked:
            return {}
        found = logprobs(logits[list(asked)], [tokens[row] for row in asked], list(asked.values()))
        return {row: self._report(one) for row, one in zip(asked, found, strict=True)}

    def add_of_prompt(self, work: Work, logits: Tensor) -> None:
        """What the tokens of a prompt's chunk say of the tokens that come after them. One that was preempted computes
        its beginning again, and nothing is told twice."""
        state, known = work.request, len(work.request.prompt_reports)
        last = min(work.end + 1, len(state.submission.prompt))
        if last <= known:
            return
        tokens = state.submission.prompt[known:last]
        most = state.submission.generation.prompt_logprobs or 0
        rows = logits[known - work.start - 1 : last - work.start - 1]
        for one in logprobs(rows, tokens, [most] * len(tokens)):
            state.prompt_reports.append(replace(self._report(one), rank=one.rank))

    def _report(self, one: Chosen) -> TokenReport:
        def named(token: int, logprob: float) -> TokenLogprob:
            return TokenLogprob(token, self._decode((token,)), logprob)

        return TokenReport(named(one.token, one.logprob), tuple(named(*likely) for likely in one.likeliest))
