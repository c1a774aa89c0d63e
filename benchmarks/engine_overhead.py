"""What a step of the Torch engine costs beside its tensors: scheduling, block accounts, the plan of what is read.

The engine is the real one; in place of a network stands something that plans the step as the runner does and answers
at once. Contexts are long and many, so that whatever grows with blocks or sequences shows.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.blocks import BlockPool
from cacheaware_engine.engine import Engine
from cacheaware_engine.kv_format import KvFormat
from cacheaware_engine.kv_store import KvStore
from cacheaware_engine.metrics import Metrics
from cacheaware_engine.requests import Generation, RequestId, Submission
from cacheaware_engine.runner import StepOutput
from cacheaware_engine.sampling_params import SamplingParams
from cacheaware_engine.step_plan import SequenceWork
from cacheaware_engine.step_planner import StepPlanner
from cacheaware_engine.step_reads import Native

BLOCK_SIZE: Final = 16
RUNNING: Final = 64
WAITING: Final = 300  # behind them, in the layout "queue"
LAYOUTS: Final = ("side by side", "scattered", "sharing", "queue")
COSTS: Final = AttentionCosts(own_token=4e-8, call=2e-5, token=1e-8, row=1e-8)
"""About those of a laptop's CPU: stretches are read in place from 1,000 tokens, prefixes together from 300 to 600."""


class Planner:
    """A runner without a network: it plans, and every next token is the same."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.bytes_per_token = 8
        self.kv_form = "float32"
        self.seconds = 0.0
        store = KvStore(
            num_layers=1, num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_heads=1, head_dim=1,
            kv_format=KvFormat(torch.float32, torch.float32), device=torch.device("cpu"),
        )  # fmt: skip
        store.gathered_slots = 4096  # as with the keys and values of a small model
        self._planner = StepPlanner(store, torch.float32, COSTS, native=Native(torch.get_num_threads(), chunks=True))
        self._logits = torch.zeros(RUNNING, 32)

    @torch.inference_mode()
    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        started = time.perf_counter()
        self._planner.plan(work)
        self.seconds += time.perf_counter() - started
        return StepOutput(self._logits[: sum(bool(item.sample) for item in work)], 0, 0)

    def copy_block(self, source: int, target: int) -> None:
        raise AssertionError("every request here is of one sequence")


class Nobody:
    """A client that does not read."""

    def admitted(self, cached_tokens: int) -> None: ...
    def post(self, deltas: object) -> None: ...
    def close(self, error: Exception | None = None) -> None: ...


def decoding(layout: str, blocks: int = 20_316) -> tuple[Engine, Planner]:
    """An engine whose blocks are nearly all held by `RUNNING` requests that decode."""
    planner, pool = Planner(blocks), BlockPool(blocks, BLOCK_SIZE, RUNNING)
    engine = Engine(
        runner=planner, pool=pool, decode=lambda tokens: "", eos_token_ids=frozenset(), max_num_batched_tokens=1 << 20,
        metrics=Metrics("overhead"),
    )  # fmt: skip
    rng = random.Random(layout)
    if layout == "scattered":
        _scatter(engine, blocks, rng)
    own = blocks // RUNNING * BLOCK_SIZE - 300
    prefix = [rng.randrange(1000) for _ in range(own * 4 // 5)] if layout == "sharing" else []
    for number in range(RUNNING):
        prompt = (*prefix, *(rng.randrange(1000) for _ in range(own - len(prefix) - rng.randrange(16))))
        _submit(engine, f"{layout}-{number}", prompt, 1 << 20)
    while any(state.first_token is None for state in engine._scheduler.states):
        engine.step()
    if layout == "queue":
        for number in range(WAITING):
            _submit(engine, f"waits-{number}", tuple(rng.randrange(1000) for _ in range(1000)), 100)
    return engine, planner


def _scatter(engine: Engine, blocks: int, rng: random.Random) -> None:
    """Leave the free blocks in pieces: short requests that end in any order, with their cache evicted later."""
    for number in range(blocks // 32):
        _submit(engine, f"churn-{number}", tuple(rng.randrange(1000) for _ in range(16 * rng.randint(1, 40))), 1)
    while engine.busy:
        engine.step()


def _submit(engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
    generation = Generation(SamplingParams(temperature=0.0), max_tokens, ignore_eos=True)
    engine.submit(Submission(RequestId(name), "default", prompt, generation), Nobody())


def milliseconds(layout: str, steps: int = 48) -> tuple[float, float]:
    """Medians of a step's scheduling, accounts and delivery, and of its plan."""
    engine, planner = decoding(layout)
    rest, plans = [], []
    for _ in range(steps):
        planner.seconds = 0.0
        started = time.perf_counter()
        engine.step()
        rest.append((time.perf_counter() - started - planner.seconds) * 1e3)
        plans.append(planner.seconds * 1e3)
    return statistics.median(rest), statistics.median(plans)
