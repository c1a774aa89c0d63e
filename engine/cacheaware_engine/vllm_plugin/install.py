"""Copy what runs inside vLLM into a folder for its PYTHONPATH.

    python -m cacheaware_engine.vllm_plugin.install FOLDER

Only that: the folder is searched before vLLM's own packages, so nothing else of ours, and nothing that ours depends on,
may lie in it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cacheaware_api
import cacheaware_engine

# By package: modules and folders of it. A test imports the copy alone.
PARTS = {
    "cacheaware_api": ("__init__.py", "durations.py", "quota.py", "wire.py"),
    "cacheaware_engine": ("__init__.py", "step_reports.py", "blocks", "vllm_plugin"),
}
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "testing.py")


def install(folder: Path) -> None:
    """Over what an earlier copy left there."""
    for package in (cacheaware_api, cacheaware_engine):
        assert package.__file__ is not None
        source, target = Path(package.__file__).parent, folder / package.__name__
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)
        for part in PARTS[package.__name__]:
            if (source / part).is_dir():
                shutil.copytree(source / part, target / part, ignore=_LEFT_OUT)
            else:
                shutil.copy(source / part, target / part)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m cacheaware_engine.vllm_plugin.install FOLDER", file=sys.stderr)
        return 2
    try:
        install(Path(arguments[0]))
    except OSError as error:
        print(f"the plugin cannot be copied to {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
