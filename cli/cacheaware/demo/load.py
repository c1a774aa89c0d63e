"""The mixed load of the demo as data: every prompt follows from the committed file, its seed and the run's number.

Pure. Who sends what when is decided in `drive`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

import yaml

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Gold:
    conversations: int
    turns: int
    history_words: int
    message_words: int
    answer_tokens: int
    think_answers: int
    think_seconds_alone: float


@dataclass(frozen=True, slots=True)
class Silver:
    readers: int
    document_words: int
    questions: int
    message_words: int
    answer_tokens: int
    think_seconds: float


@dataclass(frozen=True, slots=True)
class Bronze:
    clients: int
    prompt_words: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """The committed load file, read once."""

    seed: int
    question: str
    runs: tuple[str, ...]
    words: tuple[str, ...]
    gold: Gold
    silver: Silver
    bronze: Bronze

    @classmethod
    def committed(cls) -> Load:
        text = resources.files(__package__).joinpath("load.yaml").read_text(encoding="utf-8")
        return cls.parse(yaml.safe_load(text))

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Load:
        """Raises ValueError naming a field that is missing or unknown."""
        parts: dict[str, Any] = {"gold": Gold, "silver": Silver, "bronze": Bronze}
        values = dict(data)
        for name, part in parts.items():
            values[name] = part(**_exactly(part, values.get(name) or {}, f"{name}."))
        values["runs"] = tuple(values.get("runs") or ())
        values["words"] = tuple(str(values.get("words") or "").split())
        return cls(**_exactly(cls, values, ""))


def _exactly(cls: Any, values: dict[str, Any], path: str) -> dict[str, Any]:
    wanted = {field.name for field in fields(cls)}
    for name in sorted(wanted ^ set(values)):
        raise ValueError(f"load file: {path}{name} is {'missing' if name in wanted else 'unknown'}")
    return values


def _text(load: Load, rng: random.Random, count: int) -> str:
    """`count` random words. What they say does not matter; that no two prompts share a start does."""
    return " ".join(rng.choices(load.words, k=count)).capitalize() + "."


def _rng(load: Load, run: int, part: str, number: int) -> random.Random:
    return random.Random(f"{load.seed}/{run}/{part}/{number}")


def history(load: Load, run: int, conversation: int) -> list[Message]:
    """What a gold conversation has said before the run: two exchanges, `history_words` in all."""
    rng, size = _rng(load, run, "history", conversation), load.gold.history_words // 4
    return [{"role": role, "content": _text(load, rng, size)} for _ in range(2) for role in ("user", "assistant")]


def turns(load: Load, run: int, conversation: int) -> list[str]:
    """What its user says: once to open it before the crowd comes, then `turns` times."""
    rng = _rng(load, run, "turns", conversation)
    return [_text(load, rng, load.gold.message_words) for _ in range(1 + load.gold.turns)]


def questions(load: Load, run: int, reader: int) -> Iterator[list[Message]]:
    """Endless questions of one silver reader, a few on each document; all readers have the same documents."""
    documents, own = _rng(load, run, "documents", 0), _rng(load, run, "questions", reader)
    while True:
        document = _text(load, documents, load.silver.document_words)
        for _ in range(load.silver.questions):
            question = _text(load, own, load.silver.message_words)
            yield [{"role": "user", "content": f"{document}\n\nQuestion: {question}"}]


def flood(load: Load, run: int, client: int) -> Iterator[list[Message]]:
    """Endless one-shot prompts of one bronze client."""
    rng = _rng(load, run, "flood", client)
    while True:
        yield [{"role": "user", "content": _text(load, rng, load.bronze.prompt_words)}]
