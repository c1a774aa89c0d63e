"""The model is fetched by a process of its own, which tells how far it is and can be ended at any moment."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from cacheaware.model_fetch import ModelUnavailable, fetch_model

# Modules that behave as `python -m cacheaware.model_fetch` might.
FETCHERS = {
    "fetches": """
import json, sys
print("noise of a library")
print(json.dumps({"text": "Fetching " + sys.argv[1], "fraction": None}))
print(json.dumps({"text": "Converting", "fraction": 0.5}))
print(json.dumps({"folder": "/models/tiny"}))
""",
    "refuses": """
import json, sys
print(json.dumps({"error": "there is no model at " + sys.argv[1]}))
sys.exit(1)
""",
    "crashes": "raise SystemError('out of cheese')",
    "hangs": """
import json, os, signal
print(json.dumps({"text": str(os.getpid())}), flush=True)
signal.pause()
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, code in FETCHERS.items():
        (tmp_path / f"fetcher_{name}.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def unheard(text: str, fraction: float | None) -> None:
    pass


async def test_it_tells_how_far_it_is_and_where_the_model_is(environment: dict[str, str]) -> None:
    told: list[tuple[str, float | None]] = []
    folder = await fetch_model(
        "pypi://tiny", lambda text, fraction: told.append((text, fraction)), environment, "fetcher_fetches"
    )
    assert folder == Path("/models/tiny")
    assert told == [("Fetching pypi://tiny", None), ("Converting", 0.5)]


@pytest.mark.parametrize(
    ("fetcher", "words"),
    [
        pytest.param("refuses", "there is no model at file:///nowhere", id="refused"),
        pytest.param("crashes", "ended with code 1: SystemError: out of cheese", id="crashed"),
    ],
)
async def test_a_model_that_cannot_be_had_comes_with_the_reason(
    environment: dict[str, str], fetcher: str, words: str
) -> None:
    with pytest.raises(ModelUnavailable, match=words):
        await fetch_model("file:///nowhere", unheard, environment, f"fetcher_{fetcher}")


async def test_cancelled_it_leaves_no_process(environment: dict[str, str]) -> None:
    began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    fetching = asyncio.create_task(
        fetch_model("pypi://tiny", lambda text, fraction: began.set_result(int(text)), environment, "fetcher_hangs")
    )
    pid = await began
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert not psutil.pid_exists(pid)


async def test_the_real_one_finds_a_folder_and_names_a_missing_one(tmp_path: Path) -> None:
    pytest.importorskip("filelock", reason="needs the engine extra")
    (tmp_path / "config.json").write_text("{}")
    assert await fetch_model(f"file://{tmp_path}", unheard) == tmp_path
    with pytest.raises(ModelUnavailable, match="no such file or folder"):
        await fetch_model(f"file://{tmp_path}/nowhere", unheard)
