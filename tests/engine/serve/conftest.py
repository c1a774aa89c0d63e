"""Tiny models, made once a session, and the references that their texts are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheaware_engine.engine_testing import load_for_test
from cacheaware_engine.loader import LoadedModel
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
