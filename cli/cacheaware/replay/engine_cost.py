"""What a step costs a virtual engine. Known engines by name, others from a YAML file.

A step that computes N tokens takes

    overhead + max(weights, N · token) + Σ q·ctx · attention + Σ ctx · kv_read      seconds

with Σ q·ctx over prompt chunks (query tokens times the context each one attends to) and Σ ctx over the sequences that
decode, whose stored keys and values are read once each. Shared reads are not modelled: no policy gains by them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from cacheaware.replay.errors import ReplayError


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds; the last two are limits of the engine."""

    overhead: float  # of every step: launching kernels, scheduling, sampling
    weights: float  # reading the weights once: no step is faster
    token: float  # computing one token, when there are many
    attention: float  # one query token attending to one token of context, in a prompt chunk
    kv_read: float  # reading one stored token of context, in a decode
    max_batched_tokens: int = 8192  # tokens a step
    max_sequences: int = 256  # that run at once

    def step(self, tokens: int, query_context: float, context_read: float) -> float:
        return (
            self.overhead
            + max(self.weights, tokens * self.token)
            + query_context * self.attention
            + context_read * self.kv_read
        )


# The rates follow from parameters, bytes of KV a token and the machine's FLOP/s and bytes/s (50 % of peak for matrix
# products, 30 % for attention, 80 % of bandwidth); the CPU's were measured with the packaged chat model on two cores.
ENGINES: Mapping[str, EngineCost] = MappingProxyType(
    {
        "h200-8b": EngineCost(2e-3, 4.2e-3, 3.24e-5, 1.8e-9, 3.4e-8),
        "h200-0.5b": EngineCost(1e-3, 2.6e-4, 2.0e-6, 2.9e-10, 3.2e-9),
        "cpu-135m": EngineCost(2e-2, 2.5e-2, 1.5e-3, 2e-7, 1.5e-5, max_batched_tokens=256, max_sequences=32),
    }
)
DEFAULT_ENGINE = "h200-8b"


def engine_cost(name_or_file: str) -> EngineCost:
    """A known engine, or one described in a YAML file; raises `ReplayError`."""
    if known := ENGINES.get(name_or_file):
        return known
    path = Path(name_or_file)
    choices = f"choose one of {', '.join(ENGINES)}, or name a YAML file with {', '.join(_FIELDS)}"
    if not path.is_file():
        raise ReplayError(f"--engine: there is no engine and no file {name_or_file!r}: {choices}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ReplayError(f"{path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ReplayError(f"{path}: expected a mapping with {', '.join(_FIELDS)}")
    return _parsed(path, values)


_FIELDS = {field.name: field for field in dataclasses.fields(EngineCost)}


def _parsed(path: Path, values: dict[Any, Any]) -> EngineCost:
    if unknown := sorted(str(name) for name in values.keys() - _FIELDS.keys()):
        raise ReplayError(f"{path}: unknown field {unknown[0]!r}; known are {', '.join(_FIELDS)}")
    for name, field in _FIELDS.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                raise ReplayError(f"{path}: {name} is missing: give it in seconds")
            continue
        value, whole = values[name], field.default is not dataclasses.MISSING
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= whole:
            raise ReplayError(
                f"{path}: {name} must be {'a whole number above 0' if whole else 'seconds'}, got {value!r}"
            )
    return EngineCost(**values)
