"""Keys and gateways' secrets are exchanged while requests run: none is dropped, and what was removed lets nobody in.

The files are those of a mounted Secret: a folder that the kubelet replaces as a whole, by turning a link.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_sidecar import SOON, Running, api_keys_json, eventually, running_sidecar, view_json

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
OLD, NEW = "the-old-one-of-32-characters-000", "the-new-one-of-32-characters-000"

Headers = dict[str, str]


class MountedSecret:
    """`<folder>/..data` leads to the current files, as in a pod."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def write(self, **files: str) -> None:
        self._number += 1
        current = self._folder / f"..{self._number}"
        current.mkdir(parents=True)
        for name, text in files.items():
            (current / name).write_text(text)
        link = self._folder / "..data"
        fresh = self._folder / "..fresh"
        fresh.symlink_to(current.name)
        os.replace(fresh, link)
        for name in files:
            if not (self._folder / name).is_symlink():
                (self._folder / name).unlink(missing_ok=True)
                (self._folder / name).symlink_to(Path("..data") / name)


def with_key(secret: str) -> Headers:
    return {"Authorization": f"Bearer {secret}"}


def with_proof(secret: str) -> Headers:
    return {"x-cacheaware-gateway-secret": secret, "x-cacheaware-tenant": "acme", "x-cacheaware-tier": "gold"}


def keys_of(*secrets: str) -> dict[str, Any]:
    return api_keys_json({secret: {"tenant": "acme", "tiers": ["gold"], "defaultTier": "gold"} for secret in secrets})


def gateways_of(*secrets: str) -> dict[str, Any]:
    return api_keys_json({}, secrets)


BOTH = [
    pytest.param("APIKeys", with_key, keys_of, id="API keys"),
    pytest.param("TrustedHeaders", with_proof, gateways_of, id="gateways"),
]


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[StubEngine]:
    async with StubEngine(folder / "kv.sock") as engine:
        yield engine


async def ask(sidecar: Running, headers: Headers, **more: Any) -> int:
    async with sidecar.client.post(sidecar.url + CHAT, json=HI | more, headers=headers) as answer:
        await answer.read()
        return answer.status


async def is_let_in(sidecar: Running, headers: Headers) -> bool:
    async with sidecar.client.get(sidecar.url + MODELS, headers=headers) as answer:
        return answer.status == 200


async def until(sidecar: Running, headers: Headers, let_in: bool) -> None:
    async with asyncio.timeout(SOON):
        while await is_let_in(sidecar, headers) is not let_in:  # noqa: ASYNC110  # a file that is looked at now and then
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("identity", "headers", "file"), BOTH)
async def test_a_secret_is_exchanged_and_no_request_is_dropped(
    engine: StubEngine,
    folder: Path,
    identity: str,
    headers: Callable[[str], Headers],
    file: Callable[..., dict[str, Any]],
) -> None:
    wanted = view_json(identity={"type": identity})
    async with running_sidecar(engine, folder, wanted=wanted, keys={}) as sidecar:
        mounted = MountedSecret(sidecar.secrets_dir)

        def write(*secrets: str) -> None:
            others = {"salt-key": "salt", "control-token": "control-token-of-the-test", "hop-key": "hop"}
            mounted.write(**others, **{"api-keys.json": json.dumps(file(*secrets))})

        write(OLD)
        await until(sidecar, headers(OLD), True)

        uses, done = OLD, asyncio.Event()
        answers: list[int] = []

        async def client() -> None:
            while not done.is_set():
                answers.append(await ask(sidecar, headers(uses), stream=len(answers) % 2 == 0))

        clients = [asyncio.create_task(client()) for _ in range(3)]
        write(OLD, NEW)
        await until(sidecar, headers(NEW), True)
        uses = NEW  # the callers follow, while both are valid
        seen = len(answers)
        await eventually(lambda: len(answers) >= seen + 6)  # nothing is on its way with the old one
        write(NEW)
        await until(sidecar, headers(OLD), False)
        seen = len(answers)
        await eventually(lambda: len(answers) >= seen + 6)
        done.set()
        await asyncio.gather(*clients)
        assert set(answers) == {200}
        assert await ask(sidecar, headers(OLD)) == 401


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "no stream"])
@pytest.mark.parametrize(("identity", "headers", "file"), BOTH)
async def test_a_request_that_runs_when_its_secret_is_removed_is_finished(
    engine: StubEngine,
    folder: Path,
    identity: str,
    headers: Callable[[str], Headers],
    file: Callable[..., dict[str, Any]],
    streams: bool,
) -> None:
    let_go = asyncio.Event()
    engine.behaviour = Behaviour(hold=let_go)
    wanted = view_json(identity={"type": identity})
    async with running_sidecar(engine, folder, wanted=wanted, keys={}, engine_slots=1) as sidecar:
        keys_file = sidecar.secrets_dir / "api-keys.json"
        keys_file.write_text(json.dumps(file(OLD)))
        await until(sidecar, headers(OLD), True)
        calls = [asyncio.create_task(ask(sidecar, headers(OLD), stream=streams)) for _ in range(2)]
        await engine.count(1)
        await eventually(lambda: sidecar.sidecar.gate.queued == 1)  # one runs, one waits
        keys_file.write_text(json.dumps(file(NEW)))
        await until(sidecar, headers(OLD), False)
        let_go.set()
        assert await asyncio.gather(*calls) == [200, 200]


def told(engine: StubEngine, *fields: str) -> list[Sequence[Any]]:
    return [tuple(request.json.get(field) for field in fields) for request in engine.requests]


async def test_behind_a_gateway_tier_and_tenant_are_what_it_says(engine: StubEngine, folder: Path) -> None:
    wanted = view_json(identity={"type": "TrustedHeaders"}, sharing="Tenant")
    async with running_sidecar(engine, folder, wanted=wanted, gateways=[OLD]) as sidecar:
        for tenant, tier in (("acme", "gold"), ("zeta", "gold"), ("acme", "bronze")):
            named = {"x-cacheaware-tenant": tenant, "x-cacheaware-tier": tier}
            assert await ask(sidecar, with_proof(OLD) | named) == 200
        (acme, gold), (zeta, _), (again, bronze) = told(engine, "cache_salt", "priority")
        assert acme == again != zeta
        assert (gold, bronze) == (-100, 0)
        assert await ask(sidecar, with_proof(OLD) | {"x-cacheaware-tier": "bronze"}, service_tier="gold") == 403
        status, said = await sidecar.control("GET", "/pool/status")
        assert status == 200
        (identity,) = [each for each in said["conditions"] if each["type"] == "IdentityEnforced"]
        assert (identity["status"], identity["reason"]) == ("True", "TrustedHeaders")


@pytest.mark.parametrize("identity", ["Open", "APIKeys", "TrustedHeaders"])
async def test_headers_of_a_gateway_never_reach_the_engine(engine: StubEngine, folder: Path, identity: str) -> None:
    keys = {OLD: {"tenant": "acme", "tiers": ["bronze"], "defaultTier": "bronze"}}
    wanted = view_json(identity={"type": identity})
    async with running_sidecar(engine, folder, wanted=wanted, keys=keys, gateways=[OLD]) as sidecar:
        aliases = {"x-llm-d-inference-objective": "gold", "x-llm-d-inference-fairness-id": "acme"}
        assert await ask(sidecar, with_key(OLD) | with_proof(OLD) | aliases) == 200
        sent = {name.lower() for name in engine.requests[0].headers}
        assert not [name for name in sent if name.startswith(("x-cacheaware", "x-llm-d")) or name == "authorization"]
        # and only where they are asked for they count
        assert told(engine, "priority") == [(-100 if identity == "TrustedHeaders" else 0,)]


async def test_no_secret_is_in_the_log(engine: StubEngine, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wanted = view_json(identity={"type": "TrustedHeaders"})
    async with running_sidecar(engine, folder, wanted=wanted, gateways=[OLD]) as sidecar:
        await ask(sidecar, with_proof(OLD))
        await ask(sidecar, with_proof(NEW))
        record = next(each for each in caplog.records if each.getMessage() == "request")
        assert "gateway-0" in str(vars(record))
    for secret in (OLD, NEW):
        assert secret not in caplog.text
        assert not any(secret in str(vars(each)) for each in caplog.records)
