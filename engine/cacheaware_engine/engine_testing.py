"""Engines for tests: one without servers and threads, driven step by step, and one served over loopback, in process."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .app import create_app
from .attention_costs import TOGETHER, AttentionCosts
from .blocks import BlockPool
from .chat import Tokenizer
from .engine import Engine, Runner
from .engine_thread import EngineThread
from .kv_app import create_kv_app
from .listening import serving
from .loader import LoadedModel, load_model
from .metrics import Metrics
from .native_attention import NativeAttention
from .openai_requests import Limits
from .process import attach
from .requests import Delta, Finish, Generation, RequestId, Submission
from .runner import ModelRunner, SequenceWork, StepOutput
from .sampling_params import SamplingParams
from .service import Service
from .settings import DType
from .startup import LoadedEngine
from .structured_output import load_grammars

GREEDY = SamplingParams(temperature=0.0)
PATIENCE_S = 60.0  # for what happens at once


@dataclass(slots=True)
class Output:
    """What a request has said so far; a plain stand-in for the outbox that a server reads."""

    deltas: list[Delta] = field(default_factory=list)
    cached_tokens: int | None = None
    closed: int = 0
    error: Exception | None = None

    def admitted(self, cached_tokens: int) -> None:
        assert self.cached_tokens is None, "a request is admitted for the first time once"
        self.cached_tokens = cached_tokens

    def post(self, deltas: Iterable[Delta]) -> None:
        assert not self.closed, "nothing comes after the end"
        self.deltas.extend(deltas)

    def close(self, error: Exception | None = None) -> None:
        self.closed += 1
        self.error = error

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.tokens]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def finish(self, index: int = 0) -> Finish | None:
        finishes = [delta.finish for delta in self.deltas if delta.index == index and delta.finish is not None]
        assert len(finishes) <= 1, "a sequence ends once"
        return finishes[0] if finishes else None


class SteppedEngine:
    """A model with a pool of its own; `step` and `run` move it on."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        wrap: Callable[[ModelRunner], Runner] = lambda runner: runner,
        costs: AttentionCosts = TOGETHER,
        native: NativeAttention | None = None,
        **engine_arguments: Any,
    ) -> None:
        """`wrap` puts something between the engine and its model, such as one that fails. `costs` share whatever can
        be shared: contexts here are too short for it to pay."""
        self.model = model
        self.metrics = Metrics("tiny")
        self.pool = BlockPool(num_blocks, block_size, max_num_seqs)
        self.runner = ModelRunner(model.network, num_blocks, block_size, costs=costs, native=native)
        self.tokenizer = Tokenizer(model.tokenizer)
        self.engine = Engine(
            runner=wrap(self.runner),
            pool=self.pool,
            decode=self.tokenizer.decode,
            eos_token_ids=model.eos_token_ids,
            max_num_batched_tokens=max_num_batched_tokens,
            metrics=self.metrics,
            **engine_arguments,
        )
        self.metrics.follow(self.engine.ledger, lambda: self.engine.layout)
        self._count = 0

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        sampling: SamplingParams = GREEDY,
        tier: str = "default",
        salt: bytes = b"",
        request_id: str | None = None,
        ignore_eos: bool = True,
        **generation: Any,
    ) -> Output:
        self._count += 1
        output = Output()
        wanted = Generation(sampling, max_tokens, ignore_eos=ignore_eos, **generation)
        name = RequestId(request_id if request_id is not None else f"r{self._count}")
        self.engine.submit(Submission(name, tier, tuple(prompt), wanted, salt), output)
        return output

    def step(self) -> bool:
        return self.engine.step()

    def run(self, limit: int = 10_000) -> int:
        """Steps until nothing is live; a run that does not end fails."""
        for steps in range(limit):
            if not self.engine.busy:
                return steps
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {self.engine.ledger()}")

    @property
    def preemptions(self) -> int:
        return sum(tier.preempted_total for tier in self.engine.ledger().tiers.values())

    def assert_empty(self) -> None:
        """Nothing runs, waits or is held, and every block is accounted for."""
        ledger = self.engine.ledger()
        held = ledger.public.held + sum(tier.held for tier in ledger.tiers.values())
        cached = ledger.public.cached + sum(tier.cached for tier in ledger.tiers.values())
        assert (ledger.running, ledger.waiting, held) == (0, 0, 0), ledger
        assert cached + ledger.free == ledger.capacity, ledger
        self.engine.check_integrity()


class HeldRunner:
    """A model that computes as many steps as it is let: between two of them a test has all the time it needs."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.bytes_per_token, self.kv_form = runner.bytes_per_token, runner.kv_form
        self._turn = threading.Condition()
        self._left: float = 0
        self._wants = False

    def let(self, steps: float = math.inf) -> None:
        """It may compute so many steps from now on."""
        with self._turn:
            self._left = steps
            self._turn.notify_all()

    async def stopped(self) -> None:
        """Until it has computed all that it was let and wants to go on."""
        await asyncio.to_thread(self._wait_until_it_wants)

    def _wait_until_it_wants(self) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self._wants and not self._left, PATIENCE_S):
                raise TimeoutError("it has no more to compute")

    def forward(self, work: Sequence[SequenceWork]) -> StepOutput:
        with self._turn:
            self._wants = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._left > 0)
            self._left -= 1
            self._wants = False
        return self._runner.forward(work)

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


def load_for_test(folder: Path) -> LoadedModel:
    """A model in fp32, so that its texts can be compared with a reference's."""
    return load_model(folder, DType.FLOAT32)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: what clients see of it, and what is behind."""

    url: str
    kv_socket: Path
    service: Service
    stepped: SteppedEngine
    engine: EngineThread
    deaths: list[BaseException]
    http: aiohttp.ClientSession
    kv: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def put(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.kv.put(f"http://engine{path}", json=body) as response:
            return response.status, await response.json()

    async def ledger(self, query: str = "") -> Any:
        async with self.kv.get(f"http://engine/kv/ledger{query}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def given(self, requests: int) -> None:
        """Until so many requests are in the engine, or wait for the end of its step."""
        async with asyncio.timeout(PATIENCE_S):
            while self._requests() < requests:  # noqa: ASYNC110  # a thread has no event for it
                await asyncio.sleep(0.002)

    def _requests(self) -> int:
        ledger = self.engine.ledger
        return ledger.running + ledger.waiting + len(self.engine._commands)

    async def idle(self) -> Any:
        """The ledger once nothing runs or waits."""
        ledger = await self.ledger()
        while ledger["running"] or ledger["waiting"]:
            ledger = await self.ledger(f"?after={ledger['sequence']}&wait=10")
        return ledger


@asynccontextmanager
async def served(
    stepped: SteppedEngine, kv_socket: Path, *, max_model_len: int = 256, max_body_bytes: int = 2**18
) -> AsyncIterator[Served]:
    """Serve an engine on a port that the system picks, as model "tiny"."""
    service = Service("tiny", "file:///tiny", stepped.metrics)
    deaths: list[BaseException] = []
    grammars = load_grammars(stepped.model.tokenizer, stepped.runner.vocab_size, stepped.model.eos_token_ids)
    limits = Limits(stepped.runner.vocab_size, stepped.pool.max_sequences, structured_output=grammars is not None)
    loaded = LoadedEngine(stepped.engine, stepped.tokenizer, limits, max_model_len, grammars)
    connector = aiohttp.UnixConnector(str(kv_socket))
    apps = create_app(service, max_body_bytes), create_kv_app(service)
    async with (
        serving(*apps, "127.0.0.1", 0, kv_socket) as port,
        aiohttp.ClientSession() as http,
        aiohttp.ClientSession(connector=connector) as kv,
    ):
        engine = attach(service, loaded, deaths.append)
        try:
            yield Served(f"http://127.0.0.1:{port}", kv_socket, service, stepped, engine, deaths, http, kv)
        finally:
            await engine.stop()
