"""The load of the real run: templated prompts of three tiers, as data that follows from a seed. Pure.

Every prompt is one of its tier's templates and a question of its own. Templates are drawn by Zipf's law and are the
same in the whole benchmark, so that both pools are in their stride; no question comes twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cacheaware.demo.load import Load as Words
from cacheaware.demo.load import Message

QUESTION_WORDS = 16
ANSWER_TOKENS = (6, 14)
_TOKENS_A_WORD = 1.2
_TEMPLATE_TOKENS = (128, 512)


@dataclass(frozen=True, slots=True)
class Tier:
    """`part` is that of all requests; `promise` the time to first token, in those of a lone template of mean length."""

    part: float
    promise: float


TIERS: Mapping[str, Tier] = {"gold": Tier(0.3, 2.0), "silver": Tier(0.3, 5.0), "bronze": Tier(0.4, 20.0)}


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds from the run's start
    tier: str
    messages: list[Message]
    answer_tokens: int


class Load:
    """`templates` of each tier, short and long ones alike often."""

    def __init__(self, templates: int) -> None:
        self._words = Words.committed().words
        least, most = _TEMPLATE_TOKENS
        self._texts = {
            tier: [
                self._text(random.Random(f"{tier}/{number}"), least + (most - least) * place // max(1, templates - 1))
                for number, place in enumerate(random.Random(tier).sample(range(templates), templates))
            ]
            for tier in TIERS
        }
        self._popularity = [1 / (rank + 1) for rank in range(templates)]

    def typical(self) -> list[Message]:
        """A prompt of mean length that shares nothing with any template."""
        return self._prompt(self._text(random.Random("typical"), sum(_TEMPLATE_TOKENS) // 2), random.Random("typical"))

    def each_template(self) -> Iterator[Arrival]:
        """One request for each, to fill the caches with."""
        rng = random.Random("each template")
        for tier, texts in self._texts.items():
            for text in texts:
                yield Arrival(0.0, tier, self._prompt(text, rng), 1)

    def arrivals(self, rate: float, seed: str) -> Iterator[Arrival]:
        """Without end, by Poisson's law."""
        rng = random.Random(seed)
        at = 0.0
        for _ in itertools.count():
            at += rng.expovariate(rate)
            (tier,) = rng.choices(list(TIERS), [each.part for each in TIERS.values()])
            (text,) = rng.choices(self._texts[tier], self._popularity)
            yield Arrival(at, tier, self._prompt(text, rng), rng.randint(*ANSWER_TOKENS))

    def _prompt(self, template: str, rng: random.Random) -> list[Message]:
        question = " ".join(rng.choices(self._words, k=QUESTION_WORDS))
        return [{"role": "system", "content": template}, {"role": "user", "content": question}]

    def _text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(self._words, k=round(tokens / _TOKENS_A_WORD)))
