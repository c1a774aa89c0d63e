"""The native library of attention on a CPU: the one that came with the package, or built once for this processor.

An image brings libraries for common processors and needs no compiler (`python -m cacheaware_engine.native_build FOLDER`
makes them). Elsewhere `c++` builds one for the very processor, some ten seconds at the first start, and it is kept
under the cache folder. Imports nothing but the standard library: images build with it before the rest is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from cacheaware_engine.errors import NativeAttentionUnsupported, NoNativeAttention

SOURCE: Final = Path(__file__).with_name("paged_attention.cpp")
FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-shared")
PATIENCE_S: Final = 300.0

TARGETS: Final[Mapping[str, tuple[str, ...]]] = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"),
}
"""What images bring for x86-64, best first: the compiler's name, and the features that a processor needs for it."""


def library(
    kept_in: Path,
    *,
    shipped_in: Path = SOURCE.parent,
    compiler: str | None = None,
    on_build: Callable[[], None] = lambda: None,
) -> Path:
    """Its path. `on_build` is called before a build, which takes a while.

    Raises NoNativeAttention.
    """
    features = processor_features()
    for target, needed in TARGETS.items():
        path = shipped_in / _file_name(target)
        if features.issuperset(needed) and path.exists():
            return path
    if (generic := shipped_in / _file_name(platform.machine())).exists():
        return generic
    command = _compiler(compiler)
    about = "\n".join([_version(command), platform.machine(), *sorted(features), *FLAGS, SOURCE.read_text("utf-8")])
    path = kept_in / f"paged-attention-{hashlib.sha256(about.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        on_build()
        build(path, "native", command)
    return path


def build(path: Path, target: str, command: list[str]) -> None:
    """Compile for `target`, a processor by its name or "native". The file appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise NoNativeAttention(f"{path.parent} cannot be written ({error.strerror})") from error
    try:
        arguments = [*command, *FLAGS, f"-march={target}", "-o", unfinished, str(SOURCE)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            raise NoNativeAttention(
                f"{shlex.join(command)} failed: {next((x for x in said if 'error' in x), said[-1])}"
            )
        Path(unfinished).chmod(0o644)
        os.replace(unfinished, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeAttention(f"{shlex.join(command)} cannot be run: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)


def processor_features() -> frozenset[str]:
    """As Linux names them; empty where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def _compiler(asked: str | None) -> list[str]:
    """`asked`, or $CXX, or the first that is there."""
    named = asked or os.environ.get("CXX")
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if command and shutil.which(command[0]):
            return command
    wanted = named or "c++, g++ or clang++"
    raise NativeAttentionUnsupported(f"there is no C++ compiler ({wanted}): install one, or name it in CXX")


def _version(command: list[str]) -> str:
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeAttention(f"{shlex.join(command)} cannot be run: {error}") from error


def _file_name(target: str) -> str:
    return f"paged-attention-{target}.so"


def main(arguments: list[str]) -> int:
    """Build for all processors of this kind, into the folder that is named."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m cacheaware_engine.native_build FOLDER", file=sys.stderr)
        return 2
    folder, machine = Path(arguments[0]), platform.machine()
    try:
        command = _compiler(None)
        if machine == "x86_64":
            for target in TARGETS:
                build(folder / _file_name(target), target, command)
        else:
            build(folder / _file_name(machine), "armv8-a" if machine in ("aarch64", "arm64") else "native", command)
    except NoNativeAttention as error:
        print(f"cacheaware_engine.native_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
