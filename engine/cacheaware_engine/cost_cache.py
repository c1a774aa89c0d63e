"""Measured attention costs, kept on disk: an engine that starts again on the same machine does not measure again.

One small file for each device, layout, dtype and number of threads, under the cache folder, written beside its place
and renamed. Whatever cannot be read, or is not what was measured, counts as never measured; a folder that cannot be
written costs the next start its fraction of a second. Costs older than a month are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import torch

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.logs import values

log = logging.getLogger(__name__)

VERSION: Final = 3
"""Of what is measured: to be raised with every change of how keys and values are read."""

KEPT_S: Final = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What costs depend on."""

    device: str
    threads: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    compute: str
    storage: str
    native: bool  # whether the native library reads decodes
    torch: str = torch.__version__
    version: int = VERSION

    @property
    def file_name(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16] + ".json"


class CostCache:
    """The files in one folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` is that of the calendar."""
        self._folder = folder
        self._clock = clock

    def costs(self, of: Measured, measure: Callable[[], AttentionCosts]) -> AttentionCosts:
        """As they were measured last, or measured now and kept."""
        found = self._read(of)
        if found is None:
            found = measure()
            self._write(of, found)
        return found

    def _read(self, of: Measured) -> AttentionCosts | None:
        path = self._folder / of.file_name
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["of"] != asdict(of) or not 0 <= self._clock() - kept["at"] <= KEPT_S:
                return None
            return AttentionCosts(**{field.name: _cost(kept["costs"], field.name) for field in fields(AttentionCosts)})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("measured costs cannot be read: measuring again", extra=values(path=str(path), why=repr(error)))
            return None

    def _write(self, of: Measured, costs: AttentionCosts) -> None:
        text = json.dumps({"of": asdict(of), "at": self._clock(), "costs": asdict(costs)}, indent=1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
                file.write(text)
            try:
                os.replace(file.name, self._folder / of.file_name)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
        except OSError as error:
            log.warning("measured costs are not kept", extra=values(folder=str(self._folder), why=str(error)))


def device_name(device: torch.device) -> str:
    """What tells one device from another where costs are concerned: its model."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _cost(kept: Mapping[str, object], name: str) -> float:
    value = kept[name]
    if not isinstance(value, float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value
