"""Fixtures: a stub engine, and a sidecar in front of it. Folders are short: a Unix socket's path has 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cacheaware_sidecar.testing import StubEngine
from cacheaware_sidecar.testing_sidecar import Running, running_sidecar


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ca-") as name:
        yield Path(name)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[StubEngine]:
    async with StubEngine(folder / "kv.sock") as engine:
        yield engine


@pytest.fixture
async def sidecar(engine: StubEngine, folder: Path) -> AsyncIterator[Running]:
    async with running_sidecar(engine, folder) as running:
        yield running
