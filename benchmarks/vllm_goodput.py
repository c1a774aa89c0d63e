"""The demo's load behind two sidecars: one in front of a vLLM with the plugin, one in front of a vLLM without.

Goodput is requests a second whose first token came within what their tier is promised. In front of the vLLM without
the plugin the sidecar does what it can alone: it bounds what it lets in by estimate.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from benchmarks.report import Row
from e2e.vllm_servers import Server, Unavailable

from cacheaware.demo.drive import Client, Served, drive
from cacheaware.demo.load import Load
from cacheaware.demo.run import KEYS, pool_file
from cacheaware_api import durations
from cacheaware_api.engine_flags import EngineType
from cacheaware_operator import commands
from cacheaware_operator.commands import ReplicaPlace
from cacheaware_operator.fleet import Snapshot
from cacheaware_operator.local_folder import LocalFolder
from cacheaware_operator.plan import Wanted, plan_pool
from cacheaware_operator.ports import free_ports
from cacheaware_operator.sidecar_client import SidecarClient

STARTING_S = 60
WANTED = Wanted.from_file(pool_file(quotas=True, engine=EngineType.VLLM), uid="bench", generation=1)


@dataclass(slots=True)
class Front:
    """A sidecar in front of a server, and what its clients got in each run of the load."""

    server: Server
    place: ReplicaPlace
    process: subprocess.Popen[bytes]
    log: Path
    goodputs: list[float] = field(default_factory=list)  # requests a second within their tier's promise
    served: list[Served] = field(default_factory=list)  # without openings, of all runs
    seconds: float = 0.0

    @classmethod
    def start(cls, server: Server, folder: LocalFolder, number: int, log: Path) -> Front:
        port, control_port = free_ports(2)
        place = ReplicaPlace(
            name=f"{server.name}-sidecar", port=port, control_port=control_port, engine_port=server.port,
            kv_socket=server.kv_socket or Path("none"), view_file=folder.view_file(number), secrets_dir=folder.secrets,
        )  # fmt: skip
        folder.write_view(number, plan_pool(WANTED, Snapshot()).view)
        flags = commands.sidecar_arguments(place, estimate_only=server.kv_socket is None)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cacheaware_sidecar", *flags], stdout=output, stderr=subprocess.STDOUT
            )
        return cls(server, place, process, log)

    async def ready(self, client: SidecarClient) -> None:
        deadline = time.monotonic() + STARTING_S
        while not await client.ready():
            if time.monotonic() > deadline or self.process.poll() is not None:
                said = self.log.read_text(errors="replace")[-1000:]
                raise Unavailable(f"the sidecar of the {self.server.name} server did not become ready:\n{said}")
            await asyncio.sleep(0.2)

    async def run(self, session: aiohttp.ClientSession, load: Load, number: int) -> None:
        client = Client(session, self.place.url, KEYS, WANTED.spec.model.name)
        seconds = await drive(client, load, number, with_crowd=True, done=lambda: None)
        served = [each for each in client.served if not each.opening]
        if failed := [each.error for each in served if each.error is not None]:
            raise Unavailable(f"{len(failed)} requests failed behind the {self.server.name} sidecar: {failed[0]}")
        self.goodputs.append(sum(map(kept, served)) / seconds)
        self.served += served
        self.seconds += seconds

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def kept(served: Served) -> bool:
    """Whether the first token came within what its tier is promised."""
    (promised,) = (tier.sla.time_to_first_token for tier in WANTED.spec.tiers if tier.name == served.tier)
    took = served.time_to_first_token
    return took is not None and (promised is None or took <= durations.seconds(promised))


async def measure(
    session: aiohttp.ClientSession, servers: Sequence[Server], logs: Path, rounds: int, turns: int
) -> list[Front]:  # fmt: skip
    """The load goes to one and then to the other, `rounds` times; the sidecars set the quotas themselves."""
    committed = Load.committed()
    load = dataclasses.replace(committed, gold=dataclasses.replace(committed.gold, turns=turns))
    folder, fronts = LocalFolder.create(), list[Front]()
    folder.write_api_keys(WANTED.api_keys)
    try:
        for number, server in enumerate(servers):
            fronts.append(Front.start(server, folder, number, logs / f"{server.name}-sidecar.log"))
        for front in fronts:
            await front.ready(SidecarClient(session, front.place.control_url, folder.control_token))
        for number in range(rounds):
            for front in fronts if number % 2 == 0 else fronts[::-1]:
                await front.run(session, load, number)
                kept_now = f"{front.goodputs[-1]:.2f} promises/s kept"
                print(f"demo's load {number + 1} of {rounds}: {front.server.name}, {kept_now}", file=sys.stderr)
        return fronts
    finally:
        for front in fronts:
            front.stop()
        folder.remove()


def rows(stock: Front, plugin: Front) -> list[Row]:
    def part(front: Front, tier: str) -> float:
        mine = [kept(each) for each in front.served if each.tier == tier]
        return 100 * sum(mine) / len(mine)

    def hit(front: Front) -> float:
        mine = [each for each in front.served if each.tier == "gold"]
        return 100 * sum(each.cached_tokens for each in mine) / sum(each.prompt_tokens for each in mine)

    def output(front: Front) -> float:
        return sum(each.output_tokens for each in front.served) / front.seconds

    ratio = statistics.median(ours / theirs for ours, theirs in zip(plugin.goodputs, stock.goodputs, strict=True))
    goodputs = [statistics.median(front.goodputs) for front in (plugin, stock)]
    what = "demo's load behind the sidecar"
    return [
        Row(f"{what}: goodput against the sidecar on stock", ratio, "×", at_least=1.2),
        Row(f"{what}: goodput", goodputs[0], "requests/s", rival=goodputs[1]),
        *(
            Row(f"{what}: {tier.name} within its promise", part(plugin, tier.name), "%", rival=part(stock, tier.name))
            for tier in WANTED.spec.tiers
        ),
        Row(f"{what}: gold's hit tokens", hit(plugin), "%", rival=hit(stock)),
        Row(f"{what}: output tokens/s, all tiers", output(plugin), "/s", rival=output(stock)),
    ]
