"""What does not fit is refused before it is allocated, with the arithmetic; where nothing is known, nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheaware_engine.errors import NotEnoughMemory
from cacheaware_engine.memory import available_memory, require_memory

MI = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def measured(root: Path, files: dict[str, str]) -> int | None:
    write(root, files)
    return available_memory(proc=root / "proc", cgroups=root / "cgroups")


MEMINFO = "MemTotal:       4096000 kB\nMemFree:          10000 kB\nMemAvailable:   2048000 kB\n"


def test_the_machines_available_memory_counts_not_the_free(tmp_path: Path) -> None:
    assert measured(tmp_path, {"proc/meminfo": MEMINFO}) == 2_048_000 * 1024


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(
            {"a/b/memory.max": f"{900 * MI}\n", "a/b/memory.current": f"{500 * MI}\n"}, 400 * MI, id="its-own-limit"
        ),
        pytest.param(
            {
                "a/b/memory.max": "max\n",
                "a/memory.max": f"{300 * MI}\n",
                "a/memory.current": f"{100 * MI}\n",
            },
            200 * MI,
            id="the-limit-of-a-group-around-it",
        ),
        pytest.param(
            {
                "a/b/memory.max": f"{900 * MI}\n",
                "a/b/memory.current": f"{800 * MI}\n",
                "a/b/memory.stat": f"anon 1\ninactive_file {300 * MI}\n",
            },
            400 * MI,
            id="file-pages-can-be-reclaimed",
        ),
        pytest.param(
            {"a/b/memory.max": f"{100 * MI}\n", "a/b/memory.current": f"{200 * MI}\n"}, 0, id="over-its-limit"
        ),
        pytest.param({"a/b/memory.max": "max\n"}, 2_048_000 * 1024, id="no-limit"),
    ],
)
def test_a_control_group_bounds_it(tmp_path: Path, groups: dict[str, str], expected: int) -> None:
    files = {f"cgroups/{name}": content for name, content in groups.items()}
    assert measured(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "1:cpu:/x\n0::/a/b\n", **files}) == expected


def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    assert measured(tmp_path, {}) is None
    require_memory(weights=10**15, kv_cache=10**15, available=None)


def test_this_machine_has_an_answer_or_none() -> None:
    answer = available_memory()
    assert answer is None or answer > 0


def test_what_fits_exactly_is_taken() -> None:
    require_memory(weights=600 * MI, kv_cache=400 * MI, available=1000 * MI)


def test_too_large_a_cache_is_refused_with_the_arithmetic_and_what_would_fit() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        require_memory(weights=600 * MI, kv_cache=4096 * MI, available=1000 * MI)
    message = str(caught.value)
    for part in ("600 MiB", "4,096 MiB", "4,696 MiB", "1,000 MiB", "--kv-cache-memory to at most 400Mi"):
        assert part in message


def test_too_large_a_model_is_told_apart_from_too_large_a_cache() -> None:
    with pytest.raises(NotEnoughMemory, match="use a smaller model"):
        require_memory(weights=2000 * MI, kv_cache=1, available=1000 * MI)
