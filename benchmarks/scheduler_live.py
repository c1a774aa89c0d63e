"""The real run: two pools on this machine with the same Torch engine, ours and one without order, tiers or quotas.

Both are asked in turn, with the same requests at the same moments; the other one is idle meanwhile. Rates and promises
are set by what this machine can do: promises by the first token of one cold prompt, rates by the requests a second that
the slower of the two answers when it always has some waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from benchmarks.report import Row
from benchmarks.scheduler_load import TIERS, Arrival, Load
from prometheus_client.parser import text_string_to_metric_families as parsed
from rich.console import Console

from cacheaware.demo.drive import Client, Served
from cacheaware.demo.report import percentile
from cacheaware.local_pool import LocalPool, Options
from cacheaware.model_fetch import fetch_model
from cacheaware_api.objects import PoolFile, read_pool_file
from cacheaware_operator.local_fleet import Programs

HERE = Path(__file__).resolve().parent
OURS, RIVAL, HINTED = "ours", "rival", "hinted"
SIDECARS = {
    OURS: Programs().sidecar,
    RIVAL: (sys.executable, "-P", "-m", "benchmarks.first_come"),
    HINTED: (*Programs().sidecar, "--group-hints"),
}
CONSOLE = Console(stderr=True)
_PROBES = 3
_AT_ONCE = 24  # requests, while a pool's pace is measured: half as many again as its engine has slots for
_WARM_UP = 1 / 3  # of that time: caches and batches fill, and nothing is counted


@dataclass(frozen=True, slots=True)
class Size:
    templates: int  # of each tier
    rates: Sequence[float]  # in parts of the slower pool's pace
    rounds: int
    seconds: float  # of a run
    pace_seconds: float
    cache: str | None = None  # None: as the pool's file says


FULL = Size(10, (0.7, 1.0, 1.3), 2, 22.0, 18.0)
QUICK = Size(3, (0.7, 1.3), 1, 8.0, 9.0)
# Hints order free blocks, and a full cache has none: so one that is never full.
FULL_HINTS = Size(10, (0.8,), 3, 20.0, 12.0, cache="1400Mi")
QUICK_HINTS = Size(3, (0.8,), 1, 8.0, 9.0, cache="1400Mi")


def measure(quick: bool) -> list[Row]:
    size = QUICK if quick else FULL
    pace, runs = asyncio.run(_measure(size, (OURS, RIVAL)))
    return [
        row
        for part in size.rates
        for row in _rows(
            f"{part * pace:.2f} requests/s", runs[part, OURS], runs[part, RIVAL], highest=part == max(size.rates)
        )
    ]


def measure_hints(quick: bool) -> list[Row]:
    """Our own pool that tells its engine of growing groups, and as its rival the same that does not."""
    size = QUICK_HINTS if quick else FULL_HINTS
    pace, runs = asyncio.run(_measure(size, (HINTED, OURS)))
    (part,) = size.rates
    told, silent = runs[part, HINTED], runs[part, OURS]
    at = f"hints, {part * pace:.2f} requests/s"
    return [
        Row(f"{at}: time to first token, median", told.first_token(None, 50), "s", silent.first_token(None, 50)),
        Row(f"{at}: time to first token, p95", told.first_token(None, 95), "s", silent.first_token(None, 95)),
        Row(f"{at}: time per output token", told.output_token_ms(), "ms", silent.output_token_ms()),
        Row(f"{at}: stretches of blocks a sequence", told.stretches(), "stretches", silent.stretches()),
        Row(f"{at}: blocks set aside", told.set_aside(), "blocks", silent.set_aside()),
    ]


async def _measure(size: Size, names: Sequence[str]) -> tuple[float, dict[tuple[float, str], Answers]]:
    """The pace, and what was answered by rate and pool."""
    load = Load(size.templates)
    with tempfile.TemporaryDirectory() as folder:
        async with _pools(Path(folder), names, size.cache) as pools:
            unit = await _unit(pools[names[-1]], load)
            promises = {name: tier.promise * unit for name, tier in TIERS.items()}
            for name, pool in pools.items():
                pool.local.edit(pool_file(name, size.cache, promises))
                await pool.local.acknowledged()
            for pool in pools.values():
                await pool.ask(load.each_template())
            pace = min([await _pace(pool, load, size.pace_seconds) for pool in pools.values()])
            CONSOLE.print(f"a lone cold prompt takes {unit:.2f} s; the slower pool answers {pace:.2f} requests/s")
            return pace, await _runs(pools, load, size, pace, promises)


@dataclass(frozen=True, slots=True)
class Pool:
    local: LocalPool
    session: aiohttp.ClientSession

    def client(self) -> Client:
        (place,) = self.local.replicas
        return Client(self.session, place.url, dict.fromkeys(TIERS, "anybody"), self.local.wanted.spec.model.name)

    async def ask(self, arrivals: Iterable[Arrival]) -> list[Served]:
        """Each when it arrives, however many wait; all answers."""
        client = self.client()

        async def one(arrival: Arrival) -> None:
            await asyncio.sleep(arrival.at - client.now())
            await _chat(client, arrival)

        await asyncio.gather(*(one(arrival) for arrival in arrivals))
        return client.served

    async def watch(self, layouts: list[tuple[float, float]]) -> None:
        """Until cancelled: how blocks lie, once a second."""
        (place,) = self.local.replicas
        while True:
            async with self.session.get(f"{place.url}/metrics") as answer:
                page = {one.name: one.value for family in parsed(await answer.text()) for one in family.samples}
            layouts.append((page["cacheaware_kv_extents_per_sequence"], page["cacheaware_kv_set_aside_blocks"]))
            await asyncio.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Answers:
    """What one pool served at one rate, in `seconds` of arrivals; `promises` by tier."""

    promises: Mapping[str, float]
    seconds: float
    served: list[Served] = field(default_factory=list)
    layouts: list[tuple[float, float]] = field(default_factory=list)  # stretches a sequence, blocks set aside

    def good_tokens(self) -> float:
        """A second, in answers whose first token came in time."""
        return sum(one.output_tokens for one in self.served if self._in_time(one)) / self.seconds

    def first_token(self, tier: str | None, percent: float) -> float:
        times = [one.time_to_first_token for one in self.served if tier in (None, one.tier)]
        return percentile([time for time in times if time is not None], percent) or 0.0

    def attainment(self, tier: str) -> float:
        mine = [self._in_time(one) for one in self.served if one.tier == tier]
        return 100 * sum(mine) / max(1, len(mine))

    def output_token_ms(self) -> float:
        """The median of what answers needed for each token after the first."""
        paces = [
            1000 * (one.ended - one.first_token) / (one.output_tokens - 1)
            for one in self.served
            if one.first_token is not None and one.output_tokens > 1
        ]
        return percentile(paces, 50) or 0.0

    def stretches(self) -> float:
        return statistics.fmean(stretches for stretches, _ in self.layouts)

    def set_aside(self) -> float:
        return statistics.fmean(blocks for _, blocks in self.layouts)

    def hit(self) -> float:
        prompts = sum(one.prompt_tokens for one in self.served)
        return 100 * sum(one.cached_tokens for one in self.served) / max(1, prompts)

    def failed(self) -> float:
        return float(sum(one.error is not None for one in self.served))

    def _in_time(self, one: Served) -> bool:
        first = one.time_to_first_token
        return one.error is None and first is not None and first <= self.promises[one.tier]


async def _runs(
    pools: Mapping[str, Pool], load: Load, size: Size, pace: float, promises: Mapping[str, float]
) -> dict[tuple[float, str], Answers]:
    """By rate, in parts of the pace, and by pool."""
    runs: dict[tuple[float, str], Answers] = {}
    order = list(pools)
    for number in range(size.rounds):
        for part in size.rates:
            arrivals = load.arrivals(part * pace, f"{number}/{part}")
            coming = list(itertools.takewhile(lambda arrival: arrival.at < size.seconds, arrivals))
            for name in order:
                answers = runs.setdefault((part, name), Answers(promises, size.seconds * size.rounds))
                looking = asyncio.create_task(pools[name].watch(answers.layouts))
                answers.served.extend(await pools[name].ask(coming))
                looking.cancel()
                CONSOLE.print(f"round {number + 1}, {part:g} × pace, {name}: {len(coming)} requests")
            order.reverse()
    return runs


def _rows(at: str, ours: Answers, rival: Answers, *, highest: bool) -> list[Row]:
    of_rival = rival.good_tokens()
    target = 1.2 * of_rival if highest else None
    rows = [Row(f"{at}: tokens/s of answers in time", ours.good_tokens(), "tokens/s", of_rival, at_least=target)]
    gold = rival.first_token("gold", 95)
    rows.append(Row(f"{at}: gold's time to first token, p95", ours.first_token("gold", 95), "s", gold, at_most=gold))
    for tier in TIERS:
        attained = rival.attainment(tier)
        rows.append(Row(f"{at}: {tier} in time", ours.attainment(tier), "%", attained, at_least=attained))
    rows.append(Row(f"{at}: prompt tokens that were cached", ours.hit(), "%", rival.hit()))
    rows.append(Row(f"{at}: failed", ours.failed(), "requests", rival.failed(), at_most=0))
    return rows


async def _chat(client: Client, arrival: Arrival) -> None:
    await client.chat(arrival.tier, arrival.messages, arrival.answer_tokens, service_tier=arrival.tier)


async def _unit(pool: Pool, load: Load) -> float:
    """Seconds to the first token of a cold prompt, alone: the best of a few, each with another first word."""
    client = pool.client()
    for number in range(_PROBES):
        system, question = load.typical()
        cold = {**system, "content": f"{number} {system['content']}"}
        await _chat(client, Arrival(0.0, "bronze", [cold, question], 1))
    times = [one.time_to_first_token for one in client.served if one.time_to_first_token is not None]
    if not times:
        raise RuntimeError(f"the engine answered nothing: {client.served[0].error}")
    return min(times)


async def _pace(pool: Pool, load: Load, seconds: float) -> float:
    """Requests a second while there are always some waiting."""
    client, arrivals = pool.client(), load.arrivals(1.0, "pace")

    async def one_after_another() -> None:
        while client.now() < seconds:
            await _chat(client, next(arrivals))

    await asyncio.gather(*(one_after_another() for _ in range(_AT_ONCE)))
    warm = _WARM_UP * seconds
    return sum(warm <= one.ended < seconds for one in client.served) / (seconds - warm)


# -- the two pools -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _pools(folder: Path, names: Sequence[str], cache: str | None) -> AsyncIterator[dict[str, Pool]]:
    async with contextlib.AsyncExitStack() as stack:
        no_limit = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=300)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=no_limit, timeout=timeout))
        pools = {}
        for name in names:
            options = Options(
                port=0,
                logs=folder / name,
                state_folder=folder,
                programs=Programs(sidecar=SIDECARS[name]),
                environment={**os.environ, "PYTHONPATH": str(HERE.parent)},
            )
            local = await stack.enter_async_context(LocalPool.start(pool_file(name, cache), options, fetch=_fetch))
            await local.ready()
            pools[name] = Pool(local, session)
        yield pools


async def _fetch(source: str) -> Path:
    return await fetch_model(source, lambda text, fraction: None)


def pool_file(name: str, cache: str | None = None, promises: Mapping[str, float] | None = None) -> PoolFile:
    """Ours, with what was promised; or the rival's: every tier the same, and one cache for all."""
    pool: dict[str, Any] = yaml.safe_load((HERE / "scheduler_pool.yaml").read_text())
    pool["metadata"]["name"] = f"bench-scheduler-{name}"
    if cache is not None:
        pool["spec"]["engine"]["kvCache"]["memory"] = cache
    for tier in pool["spec"]["tiers"]:
        if name == RIVAL:
            tier |= {"priority": 0, "weight": 1, "quota": {"nominalPercent": 0}, "retention": "0s"}
        elif promises is not None:
            tier["sla"] = {"timeToFirstToken": f"{round(1000 * promises[tier['name']])}ms"}
    return read_pool_file(yaml.safe_dump(pool).encode())
