"""Attention by the native library: how `paged_attention.cpp` is loaded and called.

It reads blocks where they lie, with any form of keys and values that a store has, on the threads that torch computes
with. Other devices than a CPU are `attention.py`'s.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cacheaware_engine.errors import NativeAttentionUnsupported, NoNativeAttention
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.step_plan import PagedReads

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
"""Numbers that the library knows, by what it calls them."""


class _Work(ctypes.Structure):
    """`struct Work` of the library."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "out", "numbers", "scales", "pieces", "tables", "row_parts", "row_starts", "parts")
        ),
        ("q_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("piece_count", "rows", "block_size", "kv_heads", "group", "head_dim", "kind", "threads")
        ),
        ("scale", ctypes.c_float),
    )


class NativeAttention:
    """The library in one file. One caller at a time.

    Raises NoNativeAttention.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._library.lanes.restype = ctypes.c_int
            self._library.attend_paged.argtypes = [ctypes.c_void_p]
            self._library.attend_paged.restype = None
        except (OSError, AttributeError) as error:
            raise NoNativeAttention(f"{path} cannot be loaded: {error}") from error
        self._lanes: int = self._library.lanes()
        if not self._lanes:
            raise NativeAttentionUnsupported(
                "this build of torch computes with other threads than those of GNU's OpenMP"
            )
        self._scratch = torch.empty(0)

    def can_read(self, store: KvStore) -> bool:
        return store.device.type == "cpu" and store.format.storage in _KINDS

    def __call__(
        self, layer: int, reads: PagedReads, store: KvStore, q: Tensor, out: Tensor, scale: float | None = None
    ) -> None:
        """Attention of the first rows of `q` into those of `out`, both [rows or more, heads, head_dim]; `out` is fp32
        and contiguous. `scale` is 1 / √head_dim if it is not given."""
        heads, head_dim = q.shape[1:]
        if q.dtype != torch.float32 or q.stride()[1:] != (head_dim, 1):
            q = q[: reads.rows].float().contiguous()
        numbers, scales = store.stored(layer)
        needed = reads.parts * heads * (-(-head_dim // self._lanes) * self._lanes + 2)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed)
        work = _Work(
            q.data_ptr(),
            out.data_ptr(),
            numbers.data_ptr(),
            None if scales is None else scales.data_ptr(),
            reads.pieces.data_ptr(),
            reads.tables.data_ptr(),
            reads.row_parts.data_ptr(),
            reads.row_starts.data_ptr(),
            self._scratch.data_ptr(),
            q.stride(0),
            len(reads.pieces),
            reads.rows,
            store.block_size,
            store.kv_heads,
            heads // store.kv_heads,
            head_dim,
            _KINDS[store.format.storage],
            torch.get_num_threads(),
            scale if scale is not None else 1 / math.sqrt(head_dim),
        )
        self._library.attend_paged(ctypes.byref(work))
