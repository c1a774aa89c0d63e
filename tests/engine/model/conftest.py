"""Tiny random models on disk, loaded by us and by transformers, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheaware_engine.loader import LoadedModel, load_model
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.settings import DType
from cacheaware_engine.testing import load_reference, native_here, save_tiny_model


@dataclass(frozen=True, slots=True)
class TinyModel:
    folder: Path
    ours: LoadedModel
    reference: Any  # the same weights in transformers


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on two threads, and other tests share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """A tiny model by its kind."""

    @functools.cache
    def make(kind: str) -> TinyModel:
        folder = save_tiny_model(tmp_path_factory.mktemp("models") / kind, kind)
        return TinyModel(folder=folder, ours=load_model(folder, DType.FLOAT32), reference=load_reference(folder))

    return make


@pytest.fixture(scope="session")
def native() -> NativeAttention:
    """The native library, built at the first call where nobody has built it."""
    found = native_here()
    if found is None:
        pytest.skip(
            "there is no C++ compiler, or torch has other threads than GNU's OpenMP; any other fault fails here"
        )
    return found


@pytest.fixture(params=["torch", "native"])
def either(request: pytest.FixtureRequest) -> NativeAttention | None:
    """What computes attention: torch's operations (None), then the native library."""
    return None if request.param == "torch" else request.getfixturevalue("native")


@pytest.fixture
def folder(tmp_path: Path, tiny: Callable[[str], TinyModel]) -> Path:
    """A copy of a tiny Llama that a test may damage."""
    source, copy = tiny("llama-gqa").folder, tmp_path / "model"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy
