"""Measured costs are kept on disk for what they were measured of, and for nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cacheaware_engine.attention_costs import AttentionCosts
from cacheaware_engine.cost_cache import KEPT_S, CostCache, Measured, device_name

COSTS = AttentionCosts(own_token=4e-7, call=5e-5, token=1e-7, row=2e-8)
OTHER = AttentionCosts(own_token=3e-7, call=0.0, token=0.0, row=0.0)
OF = Measured(
    "a processor", threads=2, layers=30, heads=9, kv_heads=3, head_dim=64, compute="fp32", storage="int8", native=True
)


class Calendar:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class Meter:
    """Measures `costs`, and counts how often."""

    def __init__(self, costs: AttentionCosts = COSTS) -> None:
        self.costs, self.measured = costs, 0

    def __call__(self) -> AttentionCosts:
        self.measured += 1
        return self.costs


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    assert CostCache(tmp_path / "not" / "there").costs(OF, Meter()) == COSTS
    again = Meter(OTHER)
    assert CostCache(tmp_path / "not" / "there").costs(OF, again) == COSTS
    assert again.measured == 0
    assert [path.suffix for path in (tmp_path / "not" / "there").iterdir()] == [".json"], "nothing half written is left"


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(replace(OF, device="another processor"), id="another device"),
        pytest.param(replace(OF, threads=1), id="another number of threads"),
        pytest.param(replace(OF, head_dim=128), id="another model"),
        pytest.param(replace(OF, storage="fp32"), id="another form of keys and values"),
        pytest.param(replace(OF, native=False), id="read by something else"),
        pytest.param(replace(OF, torch="9.9"), id="another torch"),
        pytest.param(replace(OF, version=0), id="another way of reading"),
    ],
)
def test_costs_of_something_else_are_measured(tmp_path: Path, of: Measured) -> None:
    cache = CostCache(tmp_path)
    cache.costs(OF, Meter())
    assert cache.costs(of, Meter(OTHER)) == OTHER
    assert cache.costs(OF, Meter(OTHER)) == COSTS


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param('{"of": {', id="cut short"),
        pytest.param("[]", id="not an object"),
        pytest.param('{"of": 1, "at": "x", "costs": {}}', id="of the wrong types"),
        pytest.param("NaN", id="of numbers that are none"),
        pytest.param("costs", id="with a cost below zero"),
        pytest.param("missing", id="without one of the costs"),
    ],
)
def test_a_file_that_cannot_be_used_is_measured_again(tmp_path: Path, text: str) -> None:
    cache = CostCache(tmp_path)
    cache.costs(OF, Meter())
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    if text == "NaN":
        text = json.dumps({**kept, "costs": {**kept["costs"], "call": float("nan")}})
    elif text == "costs":
        text = json.dumps({**kept, "costs": {**kept["costs"], "call": -1.0}})
    elif text == "missing":
        text = json.dumps({**kept, "costs": {"call": 1.0}})
    path.write_text(text)
    assert cache.costs(OF, Meter(OTHER)) == OTHER
    assert cache.costs(OF, Meter()) == OTHER, "and the file is whole again"


def test_old_costs_and_those_of_a_time_to_come_are_measured_again(tmp_path: Path) -> None:
    calendar = Calendar()
    cache = CostCache(tmp_path, calendar)
    cache.costs(OF, Meter())
    calendar.now += KEPT_S
    assert cache.costs(OF, Meter(OTHER)) == COSTS
    calendar.now += 1
    assert cache.costs(OF, Meter(OTHER)) == OTHER
    calendar.now -= 100
    assert cache.costs(OF, Meter()) == COSTS


def test_a_folder_that_cannot_be_written_only_costs_measuring(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, where a folder would have to be")
    meter = Meter()
    for _ in range(2):
        assert CostCache(tmp_path / "taken").costs(OF, meter) == COSTS
    assert meter.measured == 2


def test_a_device_has_a_name() -> None:
    assert device_name(torch.device("cpu"))
