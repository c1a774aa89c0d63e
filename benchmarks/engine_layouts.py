"""Two choices of the engine measured by themselves: `python -m benchmarks.engine_layouts`, a minute.

How contexts of sequences that share nothing are read for attention, by where they lie, and in which form weights are
multiplied. The shapes are SmolLM2-135M's; each figure is a median, in as many layers as the model has, so that caches
do not help. Milliseconds of 30 layers, and microseconds of one product.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from cacheaware_engine.attention import cpu_flash

LAYERS, SLOTS, KV_HEADS, GROUP, HEAD_DIM = 30, 16_384, 3, 3, 64
WEIGHTS = {"q, k, v": (960, 576), "attention's output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)}


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def attended(q: Tensor, pairs: Tensor) -> Tensor:
    return cpu_flash(q, pairs[:, :, 0].transpose(1, 2), pairs[:, :, 1].transpose(1, 2))[0]


def contexts(sequences: int, tokens: int) -> dict[str, float]:
    """By how they are read: gathered, in place two in a call, and in place all in one call at even distances."""
    layers = [torch.randn(SLOTS, 2, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    copy = torch.empty(sequences * tokens, 2, KV_HEADS, HEAD_DIM)
    q = torch.randn(sequences, KV_HEADS, GROUP, HEAD_DIM)
    starts = sorted(tokens * cell for cell in random.Random(1).sample(range(SLOTS // tokens), sequences))
    slots = torch.cat([torch.arange(start, start + tokens) for start in starts])
    token = 2 * KV_HEADS * HEAD_DIM

    def comb(layer: Tensor, first: int, distance: int, rows: int) -> Tensor:
        shape, inner = (rows, tokens, 2, KV_HEADS, HEAD_DIM), (token, KV_HEADS * HEAD_DIM, HEAD_DIM, 1)
        return layer.as_strided(shape, (distance * token, *inner), first * token)

    def gathered() -> None:
        for layer in layers:
            attended(q, torch.index_select(layer, 0, slots, out=copy).view(sequences, tokens, *layer.shape[1:]))

    def in_pairs() -> None:
        for layer in layers:
            pairs = range(0, sequences, 2)
            torch.cat([attended(q[i : i + 2], comb(layer, starts[i], starts[i + 1] - starts[i], 2)) for i in pairs])

    def at_once() -> None:
        for layer in layers:
            attended(q, comb(layer, 0, SLOTS // sequences, sequences))

    ways = {"gathered": gathered, "in place, in pairs": in_pairs, "in place, one comb": at_once}
    return {name: milliseconds(way) for name, way in ways.items()}


def products(shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Microseconds of one product, by the form of the weight."""
    weights = [torch.randn(shape) for _ in range(LAYERS)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]
    transposed = [weight.t().contiguous() for weight in weights]
    x = torch.randn(rows, shape[1])

    def multiply_packed() -> None:
        for weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    def multiply_transposed() -> None:
        for weight in transposed:
            torch.mm(x, weight)

    ways = {"packed": multiply_packed, "transposed": multiply_transposed}
    return {name: milliseconds(way, 5) * 1e3 / LAYERS for name, way in ways.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_layouts", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    torch.set_num_threads(parser.parse_args().threads)
    for sequences in (2, 4, 8, 16):
        told = ", ".join(f"{name} {value:.1f} ms" for name, value in contexts(sequences, 520).items())
        print(f"{sequences} contexts of 520: {told}")
    for what, shape in WEIGHTS.items():
        for rows in (1, 8, 16, 64, 512):
            told = ", ".join(f"{name} {value:.0f} µs" for name, value in products(shape, rows).items())
            print(f"{what}, {rows} rows: {told}")


if __name__ == "__main__":
    main()
