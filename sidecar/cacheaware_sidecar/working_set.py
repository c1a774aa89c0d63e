"""The working set of every tier: which blocks its prompts refer to, how soon again, and what computing one costs.

The operator's rebalancer reads it from the metrics page and turns it into hit curves. Keys are chunks of the prefix
key, counted as the part of an engine's block that they cover: references are predicted from text, never from what is
resident. Blocks of generated text are not seen before the conversation's next turn sends them back, and count as first
uses then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from cacheaware_sidecar.metering import Usage
from cacheaware_sidecar.prefill_pace import PrefillPace
from cacheaware_sidecar.prefix_key import CHUNK_BYTES, PrefixKey
from cacheaware_sidecar.reuse_histogram import BOUNDS, DEFAULT_KEYS, ReuseHistogram

_KEYS_A_STEP = 512  # about a microsecond each; the longest prompts have sixteen times as many


@dataclasses.dataclass(frozen=True, slots=True)
class TierWorkingSet:
    """What is exported of one tier; `references[i]` counts reuse times of at most `BOUNDS[i]`, the last entry all."""

    references: Sequence[float]
    reuse_sum: float
    prefill_seconds_per_block: float | None


class WorkingSets:
    """Bounded: all tiers together remember at most `most_keys` keys, each an equal part of them."""

    def __init__(self, most_keys: int = DEFAULT_KEYS) -> None:
        self._most_keys = most_keys
        self._reuse: dict[str, ReuseHistogram] = {}
        self._pace: dict[str, PrefillPace] = {}

    def keep(self, tiers: Sequence[str]) -> None:
        """Show new tiers from zero on, and forget those that are gone."""
        each = self._most_keys // max(1, len(tiers))
        self._reuse = {name: self._reuse.get(name) or ReuseHistogram(each) for name in tiers}
        self._pace = {name: self._pace.get(name) or PrefillPace() for name in tiers}
        for histogram in self._reuse.values():
            histogram.limit(each)

    def refer(self, tier: str, key: PrefixKey, *, chunk_tokens: float, block_size: int) -> None:
        """The engine computed a prompt of this tier; a chunk of its key is about `chunk_tokens` tokens long."""
        for _ in self.refer_steps(tier, key, chunk_tokens=chunk_tokens, block_size=block_size):
            pass

    def refer_steps(self, tier: str, key: PrefixKey, *, chunk_tokens: float, block_size: int) -> Iterator[None]:
        """The same in steps of half a millisecond, so that other requests can go on."""
        for start in range(0, len(key.chunks) or 1, _KEYS_A_STEP):
            if start:
                yield
            histogram = self._reuse.get(tier)  # it may be gone by the next step
            if histogram is None:
                return
            keys = key.chunks[start : start + _KEYS_A_STEP]
            last = start + _KEYS_A_STEP >= len(key.chunks)
            beyond = key.length // CHUNK_BYTES - len(key.chunks) if last else 0  # of a prompt longer than its key
            histogram.refer(keys, chunk_tokens / block_size, unknown_keys=beyond)

    def first_token(self, tier: str, usage: Usage, seconds: float, *, block_size: int) -> None:
        """The engine sent a first token so many seconds after it was given the prompt."""
        pace = self._pace.get(tier)
        if pace is not None and usage.cached_tokens is not None:
            pace.note((usage.prompt_tokens - usage.cached_tokens) / block_size, seconds)

    def tiers(self) -> dict[str, TierWorkingSet]:
        return {
            name: TierWorkingSet(histogram.cumulative(), histogram.sum, self._pace[name].seconds_per_block())
            for name, histogram in self._reuse.items()
        }


BUCKET_LABELS: tuple[str, ...] = (*(f"{bound:.6g}" for bound in BOUNDS), "+Inf")
