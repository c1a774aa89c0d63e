"""Whether a model and its KV cache fit in memory, asked before anything is allocated.

Without this question Linux grants the memory, and kills the process later, in the middle of somebody's request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from cacheaware_engine.errors import NotEnoughMemory


def require_memory(*, weights: int, kv_cache: int, available: int | None) -> None:
    """Refuse what does not fit, with the arithmetic. All in bytes; `available` may be unknown: nothing is refused."""
    if available is None or weights + kv_cache <= available:
        return
    room = available - weights
    advice = f"lower --kv-cache-memory to at most {room // 2**20}Mi" if room >= 2**20 else "use a smaller model"
    raise NotEnoughMemory(
        f"{_mebibytes(weights)} for the model's weights + {_mebibytes(kv_cache)} for the KV cache = "
        f"{_mebibytes(weights + kv_cache)}, and {_mebibytes(available)} are available; {advice} or free memory"
    )


def available_memory(
    device: torch.device | str = "cpu", *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that can still be allocated on `device`; None where the system does not say."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    bounds = [*_machine(proc), *_cgroup_bounds(proc, cgroups)]
    return max(0, min(bounds)) if bounds else None


def _machine(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def _cgroup_bounds(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left under the limit of this process's cgroup (version 2) and of each one around it."""
    for line in _lines(proc / "self" / "cgroup"):
        hierarchy, _, path = line.partition("::")
        if hierarchy != "0":
            continue
        group = cgroups / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = next(iter(_lines(folder / "memory.max")), "max")
            used = next(iter(_lines(folder / "memory.current")), "0")
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _reclaimable(folder)
            if folder == cgroups:
                break


def _reclaimable(group: Path) -> int:
    """File pages that count as used and are given up when memory is asked for."""
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdigit():
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _mebibytes(size: int) -> str:
    return f"{-(-size // 2**20):,} MiB"
