"""The project's images as archives for a node: built by `make images`, as anyone builds them, and kept in a cache.

Where there is no registry to start from, the base image is made of this system's own packages, and pip inside the build
gets what pip outside has: its configuration, certificates and folders of wheels, bound read-only. Nothing of that is in
the Dockerfiles or the images. A builder that works here may be named instead: CACHEAWARE_E2E_BASE=python:3.12-slim.

Kept under `${XDG_CACHE_HOME:-~/.cache}/cacheaware/e2e/`: the builder's layers, the base, and the images of the newest
sources, by a digest of everything that they are made of.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from e2e.control_plane import StartFailed, Unavailable

_ROOT = Path(__file__).resolve().parents[1]
_PARTS = ("operator", "sidecar", "engine")
_SOURCES = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "crds", "cli", *_PARTS)
_BASE_PACKAGES = "python3-minimal,python3-venv,python3-pip,ca-certificates"
_PAUSE = "pause:1"
_TOOLS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "/bin/busybox": "busybox-static"}
_BUILD_SECONDS = 900


@dataclasses.dataclass(frozen=True, slots=True)
class Images:
    """Names of images, and where they are: in archives, until somebody has unpacked them into the store."""

    operator: str
    sidecar: str
    engine: str
    pause: str
    folder: Path

    @property
    def archives(self) -> list[Path]:
        return sorted(self.folder.glob("*.tar"))

    @property
    def store(self) -> Path:
        """Where whoever unpacks them keeps what comes of it, as long as the images are kept."""
        return self.folder / "store"

    @contextmanager
    def lock(self) -> Iterator[None]:
        with _locked(self.folder.parent / "lock"):
            yield


def check() -> None:
    """Raises `Unavailable` where images can neither be built nor be found, and says what is missing."""
    if os.geteuid() != 0:
        raise Unavailable("images are built as root")
    if missing := [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]:
        raise Unavailable(f"images cannot be built here: apt-get install {' '.join(missing)}")


def project_images() -> Images:
    cache = cache_folder()
    builder = _Builder(cache)
    version = _version()
    names = {part: f"localhost/cacheaware/{part}:{version}" for part in _PARTS}
    names["pause"] = f"localhost/{_PAUSE}"
    with _locked(cache / "lock"):
        images = Images(**names, folder=cache / f"images-{_digest(_files())[:16]}")
        archives = {part: images.folder / f"{part}.tar" for part in names}
        if not images.store.is_dir() and not all(archive.is_file() for archive in archives.values()):
            for old in cache.glob("images-*"):
                shutil.rmtree(old)
            images.folder.mkdir()
            builder.build()
            for part, archive in archives.items():
                builder.save(names[part], archive)
    return images


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cacheaware" / "e2e"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Builder:
    """buildah, with its storage in a folder of our own."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._storage = ("buildah", "--root", str(cache / "buildah"), "--runroot", str(cache / "buildah-run"))

    def build(self) -> None:
        self._pause()
        base = os.environ.get("CACHEAWARE_E2E_BASE") or self._base()
        _run(
            "make",
            f"--directory={_copied(self._cache / 'sources')}",
            "images",
            f"BUILDER={' '.join(self._storage)}",
            f"BASE={base}",
            f"COMPILER={base}",
            f"BUILD_ARGS={' '.join(f'--volume {path}:{path}:ro' for path in _pip_paths())}",
        )

    def save(self, image: str, archive: Path) -> None:
        """Under another name first, so that what is there is whole."""
        unfinished = archive.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        _run(*self._storage, "push", "--quiet", image, f"docker-archive:{unfinished}:{image}")
        unfinished.rename(archive)

    def _base(self) -> str:
        """This system's Python and nothing else, made once."""
        release = _release()
        name = f"localhost/cacheaware-base:{release}"
        if not self._has(name):
            context = self._cache / "base"
            shutil.rmtree(context, ignore_errors=True)
            context.mkdir()
            _run(
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={_BASE_PACKAGES}",
                release,
                context / "base.tar",
            )
            self._image(name, context, "FROM scratch\nADD base.tar /\n")
        return name

    def _pause(self) -> None:
        """What holds a pod's namespaces: a program that sleeps."""
        context = self._cache / "pause"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        shutil.copy("/bin/busybox", context / "busybox")
        command = '["/busybox", "sleep", "2147483647"]'
        self._image(f"localhost/{_PAUSE}", context, f"FROM scratch\nCOPY busybox /\nENTRYPOINT {command}\n")

    def _image(self, name: str, context: Path, dockerfile: str) -> None:
        (context / "Dockerfile").write_text(dockerfile)
        _run(*self._storage, "build", "--quiet", "--tag", name, context)
        shutil.rmtree(context)

    def _has(self, name: str) -> bool:
        found = subprocess.run([*self._storage, "inspect", "--type=image", name], capture_output=True, check=False)
        return found.returncode == 0


# -- what images are made of ------------------------------------------------------------------------------------------


def _files() -> Iterator[Path]:
    for source in _SOURCES:
        path = _ROOT / source
        if path.is_file():
            yield path
        else:
            yield from (file for file in sorted(path.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)


def _copied(folder: Path) -> Path:
    """The sources in a place and of an age that never change, since buildah keeps layers by the age of files too."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in (_ROOT / "Makefile", _ROOT / ".dockerignore", *_files()):
        copy = folder / file.relative_to(_ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))
    return folder


def _digest(files: Iterable[Path]) -> str:
    """Of names and contents, and of what the images start from."""
    digest = hashlib.sha256(f"{os.environ.get('CACHEAWARE_E2E_BASE')} {_release()} {_BASE_PACKAGES}".encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(_ROOT)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version() -> str:
    found = re.search(r'^version = "(.+)"$', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _release() -> str:
    """The code name of this Debian or Ubuntu."""
    lines = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    if "VERSION_CODENAME" not in lines:
        raise Unavailable("a base image is made from Debian's packages: name another in CACHEAWARE_E2E_BASE")
    return lines["VERSION_CODENAME"].strip('"')


def _pip_paths() -> list[Path]:
    """The files and folders of this machine that pip's configuration consists of and names."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=True
    ).stdout
    paths = [Path(name) for name in re.findall(r"^\s+(/\S+), exists: True$", said, re.MULTILINE)]
    for line in re.findall(r"^\s+\w+\.[\w-]+: (.+)$", said, re.MULTILINE):
        for word in line.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                # an index of files links to files beside it
                paths.append(path.parent if word.startswith("file://") else path)
    return sorted(set(paths))


# -- processes --------------------------------------------------------------------------------------------------------


def _run(*command: str | Path) -> None:
    environment: Mapping[str, str] = {**os.environ, "BUILDAH_ISOLATION": "chroot", "BUILDAH_LAYERS": "true"}
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_BUILD_SECONDS,
    )
    if done.returncode != 0:
        raise StartFailed(f"{' '.join(map(str, command))} failed:\n{done.stdout[-3000:]}")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build them ahead of the tests."""
    try:
        check()
    except Unavailable as reason:
        print(f"no images for a node: {reason}")
        return 0
    print(f"images for a node are in {project_images().folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
