"""The log may be slow, full or unread: no request waits for it, and what was lost is counted."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cacheaware_sidecar import log_handler
from cacheaware_sidecar.log_handler import BackgroundHandler
from cacheaware_sidecar.logs import JsonLines
from cacheaware_sidecar.metrics import DroppedLinesCollector
from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_process import sidecar_process
from cacheaware_sidecar.testing_sidecar import view_json, write_files

SMALLEST_PIPE = 4096  # bytes


@dataclass
class Pipe:
    """A small one that nobody reads yet."""

    read_end: int
    write_end: int

    def fill(self) -> None:
        os.set_blocking(self.write_end, False)
        try:
            while os.write(self.write_end, b"." * SMALLEST_PIPE):
                pass
        except BlockingIOError:
            pass
        os.set_blocking(self.write_end, True)

    def read_line(self) -> str:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self.read_end, 1)
        return line.decode().lstrip(".")

    def read_rest(self) -> list[str]:
        """Everything up to the end, which the write end's closing makes."""
        os.close(self.write_end)
        self.write_end = -1
        rest = b""
        while some := os.read(self.read_end, SMALLEST_PIPE):
            rest += some
        return rest.decode().lstrip(".").splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe(*os.pipe())
    fcntl.fcntl(pipe.write_end, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
    yield pipe
    for end in (pipe.read_end, pipe.write_end):
        if end >= 0:
            os.close(end)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the thread that writes, which a busy machine may keep waiting longer than a process would."""
    monkeypatch.setattr(log_handler, "CLOSING_SECONDS", 60.0)


def handler_of(descriptor: int, most_bytes: int = 10_000) -> BackgroundHandler:
    handler = BackgroundHandler(descriptor, most_bytes=most_bytes)
    handler.setFormatter(JsonLines())
    return handler


def say(handler: logging.Handler, message: str) -> None:
    handler.handle(logging.makeLogRecord({"msg": message, "levelname": "INFO"}))


def until_written(handler: BackgroundHandler) -> None:
    """Until nothing waits: what was read by somebody else may be counted as waiting for a moment longer."""
    while handler._bytes:
        time.sleep(0.001)


@pytest.mark.usefixtures("patient")
def test_lines_are_written_whole_and_in_order(pipe: Pipe) -> None:
    handler = handler_of(pipe.write_end)
    for number in range(20):
        say(handler, f"line {number}")
    handler.close()
    assert [json.loads(line)["message"] for line in pipe.read_rest()] == [f"line {number}" for number in range(20)]
    assert handler.dropped == 0


@pytest.mark.usefixtures("patient")
def test_a_full_pipe_holds_nobody_up_and_what_found_no_room_is_counted_and_told(pipe: Pipe) -> None:
    pipe.fill()
    handler = handler_of(pipe.write_end, most_bytes=1_000)
    size = len(JsonLines().format(logging.makeLogRecord({"msg": "x" * 100, "levelname": "INFO"}))) + 1
    for _ in range(30):
        say(handler, "x" * 100)
    assert handler.dropped == 30 - 1_000 // size
    for _ in range(1_000 // size):  # somebody reads again
        while "x" not in pipe.read_line():
            pass
    until_written(handler)
    say(handler, "after")
    handler.close()
    rest = [json.loads(line) for line in pipe.read_rest()]
    told = [line["lines"] for line in rest if line["message"] == "log lines were dropped"]
    assert sum(told) == handler.dropped
    assert "after" in {line["message"] for line in rest}


def test_the_end_of_the_process_does_not_wait_for_a_reader(pipe: Pipe) -> None:
    pipe.fill()
    handler = handler_of(pipe.write_end)
    say(handler, "unread")
    handler.close()  # would hang; and the process would, on a thread that is no daemon
    os.set_blocking(pipe.read_end, False)
    assert set(os.read(pipe.read_end, SMALLEST_PIPE)) == {ord(".")}
    os.set_blocking(pipe.read_end, True)
    while pipe.read_line() == "\n":
        pass


@pytest.mark.usefixtures("patient")
def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        handler = handler_of(full)
        for _ in range(3):
            say(handler, "lost")
        handler.close()
    finally:
        os.close(full)
    assert handler.dropped == 3


def test_lost_lines_are_a_metric() -> None:
    registry = CollectorRegistry()
    registry.register(DroppedLinesCollector(lambda: 7))
    assert b"cacheaware_log_lines_dropped_total 7.0" in generate_latest(registry)


async def test_a_sidecar_whose_log_nobody_reads_serves_on(engine: StubEngine, folder: Path, pipe: Pipe) -> None:
    pipe.fill()
    write_files(folder, view_json(), None)
    async with (
        sidecar_process(engine.url, folder / "kv.sock", folder, log=Path(f"/proc/self/fd/{pipe.write_end}")) as process,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
    ):
        for _ in range(3):
            async with client.post(f"{process.url}/v1/completions", json={"prompt": "Hi"}) as answer:
                assert answer.status == 200
        async with client.get(f"{process.control_url}/healthz") as answer:
            assert answer.status == 200
        process.terminate()
        assert await process.ended() == 0
