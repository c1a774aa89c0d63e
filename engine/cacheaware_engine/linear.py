"""Matrix products with a model's weights, in the layout that the device multiplies fastest.

On a CPU with oneDNN a large fp32 weight is packed once at load, and a small one is transposed; either form replaces the
plain one, so a model is in memory once. Elsewhere a weight is kept as it is.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_TYPICAL_ROWS: Final = 64  # a hint for the layout; any number of rows is computed
_WORTH_PACKING: Final = 2**20
"""Elements: a packed product costs some 80 µs more to call, which small weights do not earn back."""


class Linear:
    """x ↦ x · Wᵗ + b. weight: [out, in], bias: [out]"""

    __slots__ = ("_bias", "_packed", "_transposed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._weight: Tensor | None = None
        self._packed: Tensor | None = None
        self._transposed: Tensor | None = None
        on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
        if on_cpu and weight.numel() < _WORTH_PACKING:
            self._transposed = weight.t().contiguous()
        elif on_cpu and packing_works():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return product
        if self._transposed is not None:
            if self._bias is None:
                return torch.mm(x, self._transposed)
            return torch.addmm(self._bias, x, self._transposed)
        assert self._weight is not None
        return functional.linear(x, self._weight, self._bias)

    def onto(self, sum_so_far: Tensor, x: Tensor) -> Tensor:
        """sum_so_far + what x becomes, in one operation where that is one."""
        if self._transposed is not None and self._bias is None:
            return torch.addmm(sum_so_far, x, self._transposed)
        return sum_so_far + self(x)


@functools.cache
def packing_works() -> bool:
    """Whether this build of torch packs weights with oneDNN and multiplies them rightly.

    The operators are torch's own but not part of its documented interface, so they are tried instead of assumed.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return False
    weight = torch.linspace(-1.0, 1.0, 7 * 5).view(7, 5)
    x = torch.linspace(1.0, 2.0, 3 * 5).view(3, 5)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product, functional.linear(x, weight), atol=1e-5)
