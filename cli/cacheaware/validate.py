"""`cacheaware validate`: reads pool files and says everything that is wrong with them. No cluster is asked.

A file for a cluster may name Secrets and ConfigMaps that are only there; they are listed as expected. With `--local`
they must be in the file, as `cacheaware up` needs them, and so must nothing be that `up` does not build.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, TextIO

from cacheaware_api.errors import ObjectInvalid, Problem
from cacheaware_api.objects import PoolFile, read_pool_file
from cacheaware_operator.one_machine import not_on_one_machine

STDIN = Path("-")


def validate_file(path: Path, stdin: BinaryIO | None = None, *, local: bool = False) -> PoolFile:
    """The pool in the file at `path` (`-`: standard input); raises `ObjectInvalid` with every problem.

    `local`: it has to be one that `cacheaware up` can run.
    """
    try:
        content = (stdin or sys.stdin.buffer).read() if path == STDIN else path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ObjectInvalid([Problem("", f"cannot be read: {said}")]) from None
    pool_file = read_pool_file(content, for_cluster=not local)
    if local and (not_built := not_on_one_machine(pool_file.pool.spec)):
        raise ObjectInvalid(Problem("", reason) for reason in not_built)
    return pool_file


def validate(
    paths: list[Path],
    out: TextIO | None = None,
    err: TextIO | None = None,
    stdin: BinaryIO | None = None,
    *,
    local: bool = False,
) -> int:
    """Check every file: a line for each good one, a line for each problem of the others; 1 if there was any."""
    failed = False
    for path in paths:
        try:
            pool_file = validate_file(path, stdin, local=local)
        except ObjectInvalid as error:
            failed = True
            print(*(render(path, problem) for problem in error.problems), sep="\n", file=err or sys.stderr)
        else:
            print(summary(path, pool_file), file=out or sys.stdout)
            for expected in pool_file.elsewhere:
                print(f"{_name(path)}: expected in the cluster: {expected}", file=out or sys.stdout)
    return 1 if failed else 0


def render(path: Path, problem: Problem) -> str:
    """One line that editors and terminals can follow: `pool.yaml:12: field: what is wrong: what to do`."""
    where = _name(path) if problem.line is None else f"{_name(path)}:{problem.line}"
    return f"{where}: {problem.text}"


def summary(path: Path, pool_file: PoolFile) -> str:
    tiers = ", ".join(tier.name for tier in pool_file.pool.spec.tiers)
    return f"{_name(path)}: OK: pool {pool_file.namespace}/{pool_file.pool.metadata.name} with tiers {tiers}"


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path).encode(errors="backslashreplace").decode()
