"""Every number a client may send, and its bounds. Pure.

The engine would check most of them too; here they are checked before a request queues, because `n` decides how many
slots it takes, and because a number that breaks an engine breaks it for everybody.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from cacheaware_sidecar.errors import BadRequest

MOST_SEQUENCES = 16  # a request's sequences run at once, and each one reserves a tail
MOST_PROMPTS = 256  # in a list of one request: the engine makes a request of each
MOST_LOGPROBS = 20
MOST_TOKENS = 10_000_000
_INT64 = 2**63


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    least: float
    most: float
    whole: bool = True
    above: bool = False  # the least value itself is out


BOUNDS: Mapping[str, Bound] = {
    "n": Bound(1, MOST_SEQUENCES),
    "best_of": Bound(1, MOST_SEQUENCES),
    "max_tokens": Bound(1, MOST_TOKENS),
    "max_completion_tokens": Bound(1, MOST_TOKENS),
    "min_tokens": Bound(0, MOST_TOKENS),
    "prompt_logprobs": Bound(0, MOST_LOGPROBS),
    "top_logprobs": Bound(0, MOST_LOGPROBS),
    "temperature": Bound(0, 2, whole=False),
    "top_p": Bound(0, 1, whole=False, above=True),
    "top_k": Bound(-1, 2**31 - 1),
    "min_p": Bound(0, 1, whole=False),
    "presence_penalty": Bound(-2, 2, whole=False),
    "frequency_penalty": Bound(-2, 2, whole=False),
    "repetition_penalty": Bound(0, 10, whole=False, above=True),
    "length_penalty": Bound(-10, 10, whole=False),
    "seed": Bound(-_INT64, _INT64 - 1),
    "truncate_prompt_tokens": Bound(-1, MOST_TOKENS),
}


def check_numbers(body: Mapping[str, Any]) -> None:
    """Raises `BadRequest` for the first number that is out of bounds, of another type, or not finite."""
    for name, value in body.items():
        if value is not None and (bound := BOUNDS.get(name)) is not None:
            check_number(name, value, bound)
    logprobs = body.get("logprobs")  # true or false for chat, a number for completions
    if logprobs is not None and not isinstance(logprobs, bool):
        check_number("logprobs", logprobs, Bound(0, MOST_LOGPROBS))
    if (body.get("best_of") or MOST_SEQUENCES) < (body.get("n") or 1):
        raise BadRequest("best_of must be at least n", param="best_of")
    if prompts(body) > MOST_PROMPTS:
        raise BadRequest(f"prompt may be a list of at most {MOST_PROMPTS} prompts", param="prompt")


def sequences(body: Mapping[str, Any]) -> int:
    """How many sequences the request runs at once; call it after `check_numbers`."""
    return prompts(body) * int(body.get("best_of") or body.get("n") or 1)


def prompts(body: Mapping[str, Any]) -> int:
    """How many prompts it has; a list of token ids is one."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1


def output_limit(body: Mapping[str, Any]) -> int | None:
    """Most tokens that one sequence may answer; None where the client set no limit."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return None if limit is None else int(limit)


def check_number(name: str, value: Any, bound: Bound) -> None:
    """Raises `BadRequest` that names the field and its bounds."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = (
        number
        and (isinstance(value, int) or math.isfinite(value))
        and bound.least <= value <= bound.most
        and not (bound.above and value == bound.least)
        and not (bound.whole and value != int(value))
    )
    if not fits:
        kind = "a whole number" if bound.whole else "a number"
        least = f"above {bound.least:g}" if bound.above else f"at least {_plain(bound.least)}"
        raise BadRequest(f"{name} must be {kind} of {least} and at most {_plain(bound.most)}", param=name)


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
