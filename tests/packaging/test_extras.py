"""Each extra imports in an environment that has only what the extra asks for: a forgotten dependency fails here."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMPORTS = {
    "": ["cacheaware_api.wire", "cacheaware_api.v1alpha1", "cacheaware_api.quota"],
    "operator": [
        "cacheaware_operator.plan",
        "cacheaware_operator.status",
        "cacheaware_operator.local_fleet",
        "cacheaware_operator.__main__",
    ],
    "sidecar": ["cacheaware_sidecar.__main__", "cacheaware_sidecar.app", "cacheaware_sidecar.control_app"],
    "engine": ["cacheaware_engine.__main__", "cacheaware_engine.app", "cacheaware_engine.runner"],
    "vllm": ["cacheaware_engine.blocks"],
    "cli": ["cacheaware.__main__", "cacheaware.validate", "cacheaware.demo.report"],
    "all": ["cacheaware.demo.run", "cacheaware_engine.engine", "cacheaware_sidecar.proxy"],
}


def needed(extra: str) -> Iterator[metadata.Distribution]:
    """The distributions that `cacheaware[extra]` pulls in, found in the running environment."""
    seen: set[tuple[str, str]] = set()
    todo = [("cacheaware", extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        distribution = metadata.distribution(name)
        yield distribution
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": option}) for option in {wanted, ""}
            ):
                todo += [(canonicalize_name(requirement.name), option) for option in (requirement.extras or {""})]


def link_into(site: Path, distribution: metadata.Distribution) -> None:
    """Make one installed distribution importable from `site`, and nothing beside it."""
    root = Path(str(distribution.locate_file("")))
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        target = site / top
        if top.endswith(".pth"):
            target.write_text((root / top).read_text())  # the editable install of this project
        elif not target.exists():
            target.symlink_to(root / top)


@pytest.mark.parametrize("extra", [pytest.param(extra, id=extra or "base") for extra in IMPORTS])
def test_an_extra_brings_what_its_component_imports(extra: str, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    site = next(tmp_path.glob("lib/python*/site-packages"))
    for distribution in needed(extra):
        link_into(site, distribution)
    script = "\n".join(f"import {module}" for module in IMPORTS[extra])
    python = tmp_path / "bin" / "python"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_nothing_shadows_the_standard_library() -> None:
    root = Path(__file__).parents[2]
    assert not (root / "operator" / "__init__.py").exists(), "operator/__init__.py shadows the standard library"
