"""In which number type the network computes: what was asked for, or what the processor is fast in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from cacheaware_engine.settings import DType

_FAST_BFLOAT16: Final = frozenset({"amx_bf16", "avx512_bf16"})


def torch_dtype(asked: DType, device: torch.device | str = "cpu", cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """The dtype to compute in. Auto takes bfloat16 only from a processor that multiplies it in hardware: without, it
    is hundreds of times slower than float32."""
    if asked is DType.AUTO:
        on_gpu = torch.device(device).type == "cuda"
        fast = torch.cuda.is_bf16_supported() if on_gpu else bool(_cpu_flags(cpuinfo) & _FAST_BFLOAT16)
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if asked is DType.BFLOAT16 else torch.float32


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Instruction sets of the first processor; empty where the system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, []))
