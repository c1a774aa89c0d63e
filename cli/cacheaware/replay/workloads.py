"""Generated workloads: what a policy is measured on where no trace shows it. Each is a function of its seed.

@templated        every prompt starts with one of many long templates, some far more often than others
@nothing-to-win   two families with a fixed prompt each: everything hits under any policy
@nothing-shared   no two prompts have anything in common
@flooder          nine quiet tenants in a tier, and one that sends ten times as much as all of them
@quiet            the same nine without the tenth
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cacheaware.replay.errors import ReplayError
from cacheaware.replay.trace import Trace, TraceRequest

PREFIX = "@"


@dataclass(frozen=True, slots=True)
class Scale:
    """`rate` requests a second for `seconds`, over `tiers` (the pool's; requests are spread over them evenly)."""

    rate: float
    seconds: float
    tiers: Sequence[str]
    block_size: int
    seed: int = 0


class _Blocks:
    """Numbers of blocks that nobody has used."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._fresh = itertools.count()

    def prompt(self, tokens: int) -> tuple[int, ...]:
        """Of a text that starts a prompt."""
        return tuple(itertools.islice(self._fresh, tokens // self._size))

    def behind(self, prefix: tuple[int, ...], prefix_tokens: int, own_tokens: int) -> tuple[tuple[int, ...], int]:
        """A prompt that goes on after a prefix with a text of its own; the block where they meet is its own."""
        tokens = prefix_tokens + own_tokens
        own = tuple(itertools.islice(self._fresh, tokens // self._size - len(prefix)))
        return prefix + own, tokens


def templated(scale: Scale) -> Iterator[TraceRequest]:
    """50 templates of 0.5 to 8 thousand tokens, chosen by Zipf's law; short questions, short answers."""
    rng, blocks = random.Random(f"templated/{scale.seed}"), _Blocks(scale.block_size)
    lengths = [round(512 * 2 ** (4 * place / 49)) for place in range(50)]
    rng.shuffle(lengths)
    templates = [(blocks.prompt(length), length) for length in lengths]
    weights = [1 / (place + 1) for place in range(50)]
    for at, tier in _arrivals(scale, rng):
        ((prefix, length),) = rng.choices(templates, weights)
        prompt, tokens = blocks.behind(prefix, length, rng.randint(32, 256))
        yield TraceRequest(at, tokens, rng.randint(32, 192), prompt, tier, tier)


def nothing_to_win(scale: Scale) -> Iterator[TraceRequest]:
    rng, blocks = random.Random(f"nothing-to-win/{scale.seed}"), _Blocks(scale.block_size)
    families = [(blocks.prompt(length), length) for length in (2048, 3072)]
    for at, tier in _arrivals(scale, rng):
        prefix, length = rng.choice(families)
        prompt, tokens = blocks.behind(prefix, length, rng.randint(32, 256))
        yield TraceRequest(at, tokens, rng.randint(32, 192), prompt, tier, tier)


def nothing_shared(scale: Scale) -> Iterator[TraceRequest]:
    rng, blocks = random.Random(f"nothing-shared/{scale.seed}"), _Blocks(scale.block_size)
    for at, tier in _arrivals(scale, rng):
        tokens = rng.randint(512, 4096)
        yield TraceRequest(at, tokens, rng.randint(32, 192), blocks.prompt(tokens), tier, tier)


QUIET_TENANTS = 9
FLOOD = 10  # times what all the quiet ones send


def quiet(scale: Scale) -> Iterator[TraceRequest]:
    """All in the last tier. `rate` is that of the quiet tenants together."""
    rng, blocks = random.Random(f"quiet/{scale.seed}"), _Blocks(scale.block_size)
    conversations = [(blocks.prompt(1024), 1024) for _ in range(QUIET_TENANTS)]
    for at, _ in _arrivals(scale, rng):
        number = rng.randrange(QUIET_TENANTS)
        prompt, tokens = blocks.behind(*conversations[number], rng.randint(64, 512))
        yield TraceRequest(at, tokens, rng.randint(32, 192), prompt, scale.tiers[-1], f"quiet-{number}")


def flooder(scale: Scale) -> Iterator[TraceRequest]:
    """The quiet tenants, request for request, and between them the flood: long prompts that nobody sends twice."""
    rng = random.Random(f"flooder/{scale.seed}")
    yield from quiet(scale)
    flood = Scale(scale.rate * FLOOD, scale.seconds, scale.tiers, scale.block_size, scale.seed)
    fresh = itertools.count(1 << 40)
    for at, _ in _arrivals(flood, rng):
        tokens = rng.randint(1024, 3072)
        prompt = tuple(itertools.islice(fresh, tokens // scale.block_size))
        yield TraceRequest(at, tokens, rng.randint(32, 192), prompt, scale.tiers[-1], "flooder")


WORKLOADS: Mapping[str, Callable[[Scale], Iterator[TraceRequest]]] = {
    "templated": templated,
    "nothing-to-win": nothing_to_win,
    "nothing-shared": nothing_shared,
    "flooder": flooder,
    "quiet": quiet,
}


def workload(name: str, scale: Scale) -> Trace:
    """By its name, with or without the `@`; raises `ReplayError`."""
    generate = WORKLOADS.get(name.removeprefix(PREFIX))
    if generate is None:
        raise ReplayError(
            f"{name}: there is no such workload; known are {', '.join(PREFIX + each for each in WORKLOADS)}"
        )
    if scale.rate <= 0 or scale.seconds <= 0:
        raise ReplayError(f"{name}: rate and seconds must be above 0, got {scale.rate:g} and {scale.seconds:g}")
    requests = sorted(generate(scale), key=lambda request: request.at)
    if not requests:
        raise ReplayError(
            f"{name}: nothing arrives in {scale.seconds:g} s at {scale.rate:g} a second: raise one of them"
        )
    return Trace(name.removeprefix(PREFIX), scale.block_size, requests)


def _arrivals(scale: Scale, rng: random.Random) -> Iterator[tuple[float, str]]:
    """Poisson, each with a tier."""
    at = rng.expovariate(scale.rate)
    while at < scale.seconds:
        yield at, rng.choice(scale.tiers)
        at += rng.expovariate(scale.rate)
