"""Two choices of the engine measured by themselves: `python -m benchmarks.engine_layouts`, a minute.

How contexts of sequences that share nothing are read for attention, by what reads them and where they lie, and in which
form weights are multiplied. The shapes are SmolLM2-135M's; each figure is a median, in as many layers as the model has,
so that caches do not help. Milliseconds of 30 layers, and microseconds of one product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from cacheaware_engine.attention import cpu_flash
from cacheaware_engine.kv_format import kv_format
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.paged_reads import Stretch, paged_reads
from cacheaware_engine.settings import AttentionBy, KvDtype
from cacheaware_engine.startup import native_attention

LAYERS, BLOCKS, BLOCK, KV_HEADS, GROUP, HEAD_DIM = 30, 1024, 16, 3, 3, 64
WEIGHTS = {"q, k, v": (960, 576), "attention's output": (576, 576), "gate and up": (3072, 576), "down": (576, 1536)}


def milliseconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def contexts(sequences: int, tokens: int, native: NativeAttention) -> dict[str, float]:
    """By what attends to them and where their blocks lie: gathered for torch's operation, and read by the kernel."""
    store = KvStore(
        num_layers=LAYERS, num_blocks=BLOCKS, block_size=BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        kv_format=kv_format(KvDtype.AUTO, torch.float32), device=torch.device("cpu"),
    )  # fmt: skip
    slots = torch.arange(BLOCKS * BLOCK)
    for layer in range(LAYERS):
        store.write(layer, slots, torch.randn(len(slots), 2, KV_HEADS, HEAD_DIM))
    q = torch.randn(sequences, KV_HEADS * GROUP, HEAD_DIM)
    out = torch.empty(q.shape)
    each = -(-tokens // BLOCK)
    side_by_side = torch.arange(BLOCKS, dtype=torch.int32)
    scattered = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)

    def attended(blocks: Tensor) -> Callable[[], None]:
        tables = [blocks[each * row : each * (row + 1)] for row in range(sequences)]
        stretches = [Stretch(row, row + 1, row, 0, tokens) for row in range(sequences)]
        reads = paged_reads(stretches, tables, KV_HEADS, torch.get_num_threads())

        def attend() -> None:
            for layer in range(LAYERS):
                native(layer, reads, store, q, out)

        return attend

    def gathered() -> None:
        wanted = slots.view(BLOCKS, BLOCK)[scattered.long()].view(-1)[: sequences * each * BLOCK]
        for layer in range(LAYERS):
            pairs = store.gather(layer, wanted).view(sequences, each * BLOCK, 2, KV_HEADS, HEAD_DIM)[:, :tokens]
            keys, values = pairs[:, :, 0].transpose(1, 2), pairs[:, :, 1].transpose(1, 2)
            cpu_flash(q.view(sequences, KV_HEADS, GROUP, HEAD_DIM), keys, values)

    ways = {
        "gathered": gathered,
        "the kernel, scattered": attended(scattered),
        "the kernel, in one piece": attended(side_by_side),
    }
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
    native = native_attention(AttentionBy.NATIVE)
    assert native is not None
    for sequences, tokens in ((1, 520), (4, 520), (16, 520), (1, 3080), (4, 3080)):
        told = ", ".join(f"{name} {value:.1f} ms" for name, value in contexts(sequences, tokens, native).items())
        print(f"{sequences} contexts of {tokens}: {told}", flush=True)
    for what, shape in WEIGHTS.items():
        for rows in (1, 8, 16, 64, 512):
            told = ", ".join(f"{name} {value:.0f} µs" for name, value in products(shape, rows).items())
            print(f"{what}, {rows} rows: {told}")


if __name__ == "__main__":
    main()
