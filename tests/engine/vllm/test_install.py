"""What is copied into vLLM's container is all that it needs, and how vLLM is started with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cacheaware_engine.vllm_plugin.install import install, main
from cacheaware_engine.vllm_plugin.launch import prepare

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
