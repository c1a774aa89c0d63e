"""Runs the demo: one pool on this machine, one question, then the load with quotas off and on. Composition only.

Switching quotas is an edit of the running pool, as a user would make it; every run has prompts of its own, so that no
run finds what an earlier one left in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cacheaware.demo import picture
from cacheaware.demo.drive import Client, drive
from cacheaware.demo.load import Load
from cacheaware.demo.report import COLUMNS, KIND_TITLES, Report, Run, Sample, report, rows
from cacheaware.display import Display
from cacheaware.explain import ask
from cacheaware.interrupts import until_signalled
from cacheaware.local_pool import LocalPool, Options
from cacheaware.model_fetch import ModelUnavailable, fetch_model
from cacheaware.state_file import AlreadyRunning
from cacheaware_api import durations, wire
from cacheaware_api.engine_flags import EngineType
from cacheaware_api.objects import PoolFile, read_pool_file
from cacheaware_operator.errors import OperatorError, StartFailed, Unreachable
from cacheaware_operator.fleet import PartState
from cacheaware_operator.local_fleet import Programs
from cacheaware_operator.reconciler import Pass
from cacheaware_operator.sidecar_client import SidecarClient

SAMPLE_SECONDS = 0.5
SETTLE_SECONDS = 20.0
MOST_DECISIONS = 1000  # as many as a sidecar remembers; a run has fewer
KEYS = {tier: f"{tier}-demo-key" for tier in ("gold", "silver", "bronze")}


class DemoFailed(Exception):
    """The demo could not measure; the text says why."""


def main(
    folder: Path,
    display: Display,
    console: Console,
    engine: EngineType = EngineType.TORCH,
    programs: Programs | None = None,
) -> int:
    """Run the demo and leave its results in `folder`; the exit code: 0 if it could measure, 130 if interrupted."""
    demo = _Demo(folder, display, console, engine, programs or Programs())
    code = asyncio.run(until_signalled(demo.run(), demo.kill))
    return 130 if code is None else code


def pool_file(quotas: bool, engine: EngineType = EngineType.TORCH) -> PoolFile:
    """The demo's pool, or the same with every tier at nominal 0 and retention 0s: then all share one LRU cache."""
    text = resources.files(__package__).joinpath("pool.yaml").read_text(encoding="utf-8")
    pool, *others = yaml.safe_load_all(text)
    if engine is EngineType.VLLM:
        pool["spec"]["engine"]["type"] = str(engine)
        pool["spec"]["engine"]["kvCache"]["blockSize"] = 32  # the least that vLLM takes on a CPU
        # As the Torch engine computes it, and without minutes of compiling for a load of two.
        pool["spec"]["engine"]["args"] += ["--dtype=float32", "--enforce-eager"]
        pool["spec"]["engine"]["env"] = [{"name": "HF_HUB_OFFLINE", "value": "1"}]  # the model is a folder
    if not quotas:
        for tier in pool["spec"]["tiers"]:
            tier["quota"] = {"nominalPercent": 0}
            tier["retention"] = "0s"
    return read_pool_file(yaml.safe_dump_all([pool, *others]).encode())


@dataclass(slots=True)
class _Ledgers:
    """Looks at the engine's account through the sidecar's control side, as the operator does."""

    sidecar: SidecarClient
    session: aiohttp.ClientSession
    control_url: str
    token: str

    async def held_since(self, time: float) -> list[wire.Decision]:
        """Decisions about requests that came since then and were held for company."""
        decisions = await ask(self.session, self.control_url, self.token, MOST_DECISIONS)
        return [one for one in decisions if one.hold_ms and one.time >= time]

    async def now(self) -> wire.Ledger:
        ledger = (await self.sidecar.status()).ledger
        if ledger is None:
            raise DemoFailed("the engine has no ledger: see its log")
        return ledger

    async def idle(self) -> wire.Ledger:
        """The ledger once nothing runs or waits any more."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while (ledger := await self.now()).running or ledger.waiting:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)
            return ledger

    async def record(self, samples: list[Sample], clock: Callable[[], float]) -> None:
        while True:
            with contextlib.suppress(Unreachable):  # a busy moment costs one sample
                samples.append(Sample(clock(), used_blocks(await self.now())))
            await asyncio.sleep(SAMPLE_SECONDS)


def used_blocks(ledger: wire.Ledger) -> dict[str, int]:
    used = {name: tier.held + tier.cached for name, tier in ledger.tiers.items()}
    return used | {"public": ledger.public.held + ledger.public.cached}


class _Demo:
    def __init__(
        self, folder: Path, display: Display, console: Console, engine: EngineType, programs: Programs
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._programs = programs
        self._display = display
        self._console = console
        self._pool: LocalPool | None = None

    def kill(self) -> None:
        if self._pool is not None:
            self._pool.kill()

    async def run(self) -> int:
        try:
            found = await self._measure(Load.committed())
        except asyncio.CancelledError:
            self._display.progress_done()
            self._display.line("Stopped.")
            raise
        except StartFailed as error:
            self._display.problem(f"cacheaware demo: {error.part} {error.reason} (log: {error.log})")
            return 1
        except (ModelUnavailable, OperatorError, AlreadyRunning, DemoFailed, OSError, TimeoutError) as error:
            self._display.problem(f"cacheaware demo: {error or type(error).__name__}")
            return 1
        self._show(found)
        return 0 if all(figure.failed == 0 for figure in found.figures) else 1

    async def _measure(self, load: Load) -> Report:
        with_quotas = pool_file(quotas=True, engine=self._engine)
        model = with_quotas.pool.spec.model
        async with self._started(with_quotas) as pool, aiohttp.ClientSession(timeout=_no_limit()) as session:
            (place,) = pool.replicas
            control = SidecarClient(session, place.control_url, pool.control_token)
            ledgers = _Ledgers(control, session, place.control_url, pool.control_token)

            def client() -> Client:
                return Client(session, place.url, KEYS, model.name)

            answer = await client().chat("gold", [{"role": "user", "content": load.question}], 40, ignore_eos=False)
            if answer.served.error is not None:
                raise DemoFailed(f"the model gave no answer: {answer.served.error}")
            self._display.progress_done()
            self._display.line(f"Question: {load.question}\nAnswer:   {answer.text.strip()}\n")
            runs = []
            for number, kind in enumerate(load.runs):
                await self._switch(pool, quotas=kind != "off")
                runs.append(await self._run_once(load, number, kind, client(), ledgers))
        promised = {
            tier.name: durations.seconds(tier.sla.time_to_first_token) if tier.sla.time_to_first_token else None
            for tier in with_quotas.pool.spec.tiers
        }
        return report(load.question, answer.text.strip(), runs, promised)

    @contextlib.asynccontextmanager
    async def _started(self, file: PoolFile) -> AsyncIterator[LocalPool]:
        self._display.progress("Starting")
        options = Options(port=0, programs=self._programs)
        async with LocalPool.start(file, options, self._on_pass, self._get_model) as pool:
            self._pool = pool
            await pool.ready()
            yield pool
            self._display.progress("Stopping")
        self._display.progress_done()

    async def _get_model(self, source: str) -> Path:
        self._display.progress(f"Getting the model {source}")
        return await fetch_model(source, self._display.progress)

    def _on_pass(self, done: Pass) -> None:
        if self._pool is None or self._pool.last is None or not self._pool.last.settled:
            parts = [part for replica in done.snapshot.replicas for part in replica.parts]
            waiting = [f"{part.name} ({part.message})" for part in parts if part.state is not PartState.READY]
            self._display.progress(f"Starting: {', '.join(waiting)}" if waiting else "Handing out quotas")

    async def _switch(self, pool: LocalPool, *, quotas: bool) -> None:
        if pool.edit(pool_file(quotas, self._engine)).live:
            await pool.acknowledged()

    async def _run_once(self, load: Load, number: int, kind: str, client: Client, ledgers: _Ledgers) -> Run:
        title = f"Run {number + 1} of {len(load.runs)}, {KIND_TITLES[kind]}"
        total, done = load.gold.conversations * load.gold.turns, 0

        def tell() -> None:
            self._display.progress(f"{title}: gold answered", done / total)

        def one_done() -> None:
            nonlocal done
            done += 1
            tell()

        before, began = await ledgers.idle(), time.time()
        samples: list[Sample] = []
        tell()
        recording = asyncio.create_task(ledgers.record(samples, client.now))
        try:
            seconds = await drive(client, load, number, with_crowd=kind != "alone", done=one_done)
        finally:
            recording.cancel()
        self._display.progress_done()
        nominal = {name: tier.nominal for name, tier in before.tiers.items()}
        return Run(kind, seconds, client.served, samples, nominal, before.capacity, await ledgers.held_since(began))

    def _show(self, found: Report) -> None:
        capacity = found.runs[0].capacity
        title = f"The same load with KV quotas off and on, {capacity} blocks"
        table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for column in COLUMNS:
            table.add_column(column, no_wrap=True, justify="left" if column in COLUMNS[:2] else "right")
        for row in rows(found):
            table.add_row(*row, end_section=row[1] == "bronze")
        self._console.print(table)
        self._display.line(found.sentence())
        self._display.line(found.company_sentence())
        for what, met in found.checks():
            self._display.line(f"  {'yes' if met else 'NO '}  {what}")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "demo.json").write_text(json.dumps(found.to_json(), indent=1), encoding="utf-8")
        picture.draw(found, self._folder / "blocks.png")
        self._display.line(f"\nLeft for you: {self._folder / 'demo.json'} and {self._folder / 'blocks.png'}")


def _no_limit() -> Any:
    return aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=120)
