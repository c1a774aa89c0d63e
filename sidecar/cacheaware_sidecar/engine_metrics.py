"""What a plain vLLM's metrics page says of its KV cache, whatever the names of its generation. Pure.

What a page does not say, or says in a way that cannot be read, is None and never 0: a reader could not tell it from an
empty cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_CONFIG = "vllm:cache_config_info"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the newer name first
_PREEMPTIONS = "vllm:num_preemptions_total"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFigures:
    """Blocks are those that requests can get: vLLM keeps one of its own as a placeholder."""

    block_size: int | None = None  # tokens
    blocks: int | None = None
    usage: float | None = None  # part of the blocks that running requests hold, 0 to 1
    preemptions: float | None = None  # since it started

    @property
    def held(self) -> int | None:
        """Blocks that running requests hold."""
        return None if self.blocks is None or self.usage is None else math.ceil(self.usage * self.blocks)


def read_figures(page: str) -> EngineFigures:
    """Figures of a metrics page; of text that is none, or not a vLLM's, nothing is known."""
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except (ValueError, IndexError, KeyError):
        return EngineFigures()
    config = next((sample.labels for sample in samples if sample.name == _CONFIG), {})
    block_size = _whole(config, "block_size")
    return EngineFigures(
        block_size=block_size,
        blocks=_blocks(config, block_size),
        usage=next((usage for name in _USAGE if (usage := _part(samples, name)) is not None), None),
        preemptions=_sum(samples, _PREEMPTIONS),
    )


def _blocks(config: Mapping[str, str], block_size: int | None) -> int | None:
    """Newer releases tell the cache's size in tokens too, which for models with several kinds of attention is not the
    number of blocks times their size.
    """
    tokens, blocks = _whole(config, "kv_cache_size_tokens"), _whole(config, "num_gpu_blocks")
    if block_size is None or (tokens is None and blocks is None):
        return None
    all_blocks = blocks if tokens is None else tokens // block_size
    return None if all_blocks is None or all_blocks < 2 else all_blocks - 1


def _whole(labels: Mapping[str, str], name: str) -> int | None:
    """A label that is a positive whole number; what is not set is written as None."""
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and 0 < len(text) <= 15 and int(text) > 0 else None


def _part(samples: list[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name and 0 <= sample.value <= 1]
    return max(values, default=None)


def _sum(samples: list[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name and math.isfinite(sample.value)]
    return sum(values) if values else None
