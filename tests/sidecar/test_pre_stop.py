"""A sidecar that is told to end serves on for a moment, then refuses new requests and waits for those inside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheaware_sidecar import pre_stop
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import CONTROL_TOKEN, SOON, Running, eventually


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def answers(*inside: int | None) -> Callable[[], int | None]:
    rest = list(inside)
    return lambda: rest.pop(0) if len(rest) > 1 else rest[0]


@pytest.mark.parametrize(
    ("inside", "how", "seconds"),
    [
        pytest.param((0,), "drained", 5.0, id="nothing inside"),
        pytest.param((2, 1, 0), "drained", 6.0, id="requests that end"),
        pytest.param((3,), "3 requests are left after 10 s", 15.0, id="requests that do not end"),
        pytest.param((None,), "the sidecar does not answer", 5.0, id="no sidecar"),
        pytest.param((2, None), "the sidecar does not answer", 5.5, id="a sidecar that dies on the way"),
    ],
)
def test_it_waits_for_requests_and_not_for_a_dead_sidecar(
    inside: tuple[int | None, ...], how: str, seconds: float
) -> None:
    time = Time()
    assert pre_stop.wait(answers(*inside), delay=5, timeout=10, clock=lambda: time.now, sleep=time.sleep) == how
    assert time.now == seconds
    assert time.slept[0] == 5, "Services must have forgotten the pod before anything is refused"


async def test_the_sidecar_refuses_new_requests_and_tells_how_many_are_left(
    sidecar: Running, engine: StubEngine
) -> None:
    await sidecar.ready()
    with sidecar.sidecar.traffic.request():
        assert await sidecar.control("POST", "/pool/drain") == (200, {"inside": 1})
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        async with sidecar.client.post(f"{sidecar.url}/v1/chat/completions", json=body) as answer:
            assert (answer.status, answer.headers["x-cacheaware-reason"]) == (503, "draining")
        assert (await sidecar.control("GET", "/readyz"))[0] == 503
    assert await sidecar.control("POST", "/pool/drain") == (200, {"inside": 0})
    assert engine.requests == []


async def test_draining_needs_the_token(sidecar: Running) -> None:
    assert (await sidecar.control("POST", "/pool/drain", token="wrong"))[0] == 401
    assert not sidecar.sidecar.traffic.draining


async def test_the_hook_holds_its_mark_until_the_last_request_has_ended(sidecar: Running, folder: Path) -> None:
    mark = folder / "draining"
    arguments = [f"--control-url={sidecar.control_url}", f"--secrets-dir={sidecar.secrets_dir}", f"--mark={mark}"]
    with sidecar.sidecar.traffic.request():
        hook = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cacheaware_sidecar.pre_stop", *arguments, "--delay=0", stdout=asyncio.subprocess.PIPE
        )
        await eventually(lambda: sidecar.sidecar.traffic.draining)
        assert mark.exists()
        assert hook.returncode is None
    said, _ = await asyncio.wait_for(hook.communicate(), SOON)
    assert said == b"drained\n"
    assert await hook.wait() == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    "token", [pytest.param("wrong", id="refused"), pytest.param("", id="empty"), pytest.param(None, id="missing")]
)
async def test_without_an_answer_the_hook_ends_and_takes_its_mark_away(
    sidecar: Running, folder: Path, token: str | None
) -> None:
    secrets = folder / "other"
    secrets.mkdir()
    if token is not None:
        (secrets / "control-token").write_text(token)
    mark = folder / "draining"
    arguments = [f"--control-url={sidecar.control_url}", f"--secrets-dir={secrets}", f"--mark={mark}", "--delay=0"]
    assert await asyncio.to_thread(pre_stop.main, arguments) == 0
    assert not mark.exists()


async def test_of_a_rotated_token_the_first_line_counts(sidecar: Running, folder: Path) -> None:
    (sidecar.secrets_dir / "control-token").write_text(f"\n{CONTROL_TOKEN}\nolder\n")
    assert await asyncio.to_thread(pre_stop.ask_to_drain, sidecar.control_url, sidecar.secrets_dir) == 0
