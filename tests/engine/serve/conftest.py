"""Tiny models, made once a session, and the references that their texts are compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheaware_engine.engine_testing import HeldRunner, Served, SteppedEngine, load_for_test, served
from cacheaware_engine.loader import LoadedModel
from cacheaware_engine.runner import ModelRunner
from cacheaware_engine.testing import load_reference, save_tiny_model

torch.set_num_threads(1)  # tiny models gain nothing from more, and other tests share the cores


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    return load_for_test(tiny_folder)


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Any:
    return load_reference(tiny_folder)


@pytest.fixture
async def server(tiny: LoadedModel, tmp_path: Path) -> AsyncIterator[Served]:
    """A tiny model with a small cache, served on loopback."""
    async with served(SteppedEngine(tiny, num_blocks=96, block_size=4), tmp_path / "kv.sock") as running:
        yield running
        assert not running.deaths, "the step loop broke"


@pytest.fixture
async def held(tiny: LoadedModel, tmp_path: Path) -> AsyncIterator[tuple[Served, HeldRunner]]:
    """The same with a model that computes only what it is let."""
    made: list[HeldRunner] = []

    def hold(runner: ModelRunner) -> HeldRunner:
        made.append(HeldRunner(runner))
        return made[0]

    stepped = SteppedEngine(tiny, num_blocks=96, block_size=4, wrap=hold)
    async with served(stepped, tmp_path / "kv.sock") as running:
        try:
            yield running, made[0]
        finally:
            made[0].let()
        assert not running.deaths, "the step loop broke"
