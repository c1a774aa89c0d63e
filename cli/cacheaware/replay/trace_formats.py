"""Reads request traces: Mooncake's JSON lines, WEKA's agent sessions, Azure's CSV, and a sidecar's explain log.

A format is known by what a file contains, never by its name. Blocks may be made larger than the trace's own, by
joining neighbours, and never smaller: what lies inside a block is not in the trace.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from cacheaware.replay.errors import ReplayError
from cacheaware.replay.trace import Trace, TraceRequest
from cacheaware_api import wire

MOONCAKE_BLOCK = 512
WEKA_BLOCK = 64
TYPICAL_OUTPUT = 128  # tokens, of requests in an explain log
_DECISIONS = b'"decisions"'
WEKA_START_HOURS = 1.0  # sessions have no common clock: they start at random within so much


class TraceFormat(StrEnum):
    MOONCAKE = "mooncake"
    WEKA = "weka"
    AZURE = "azure"
    EXPLAIN = "explain"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file whose format is known. `block_size` is the trace's own; None: it has no prefixes, any will do."""

    path: Path
    name: str
    format: TraceFormat
    block_size: int | None

    def read(self, block_size: int, seed: int = 0) -> Trace:
        """Raises `ReplayError` that names the line. `seed` places what has no time of its own."""
        if self.block_size is not None and block_size % self.block_size:
            raise ReplayError(
                f"--block-size {block_size}: {self.path} has blocks of {self.block_size} tokens, which can be joined "
                f"and not split: choose a multiple of {self.block_size}"
            )
        reader = _READERS[self.format]
        requests, notes = reader(self.path, block_size, random.Random(f"{self.name}/{seed}"))
        if not requests:
            raise ReplayError(f"{self.path}: there is no request in it")
        requests.sort(key=lambda request: request.at)
        start = requests[0].at
        if start:
            requests = [_at(request, request.at - start) for request in requests]
        return Trace(self.name, block_size, requests, tuple(notes))


_Read = tuple[list[TraceRequest], list[str]]


def trace_file(path: Path) -> TraceFile:
    """Look at the file's beginning; raises `ReplayError` where it is no trace."""
    if not path.exists():
        raise ReplayError(f"{path}: there is no such file")
    name = path.name.split(".")[0]
    if path.is_dir() or tarfile.is_tarfile(path):
        return TraceFile(path, name, TraceFormat.WEKA, WEKA_BLOCK)
    start = _beginning(path)
    first = start.split(b"\n", 1)[0].strip()
    if first.startswith(b"TIMESTAMP,"):
        return TraceFile(path, name, TraceFormat.AZURE, None)
    if _DECISIONS in start:
        return TraceFile(path, name, TraceFormat.EXPLAIN, None)
    row: Any = None
    try:
        row = json.loads(first)
    except ValueError:
        if b'"hash_id_scope"' in start or b'"block_size"' in start:
            return TraceFile(path, name, TraceFormat.WEKA, WEKA_BLOCK)
    if isinstance(row, dict):
        if "hash_ids" in row and "input_length" in row:
            return TraceFile(path, name, TraceFormat.MOONCAKE, MOONCAKE_BLOCK)
        if "requests" in row and "block_size" in row:
            return TraceFile(path, name, TraceFormat.WEKA, WEKA_BLOCK)
        if "requestId" in row and "tier" in row:
            return TraceFile(path, name, TraceFormat.EXPLAIN, None)
    raise ReplayError(
        f"{path}: not a trace that can be read. Known are Mooncake's JSON lines (timestamp, input_length, "
        "output_length, hash_ids), WEKA's sessions (a .json, a folder or a tar archive of them), Azure's CSV "
        "(TIMESTAMP, ContextTokens, GeneratedTokens), and what a sidecar's /pool/explain answers"
    )


# -- Mooncake ----------------------------------------------------------------------------------------------------------


def _mooncake(path: Path, block_size: int, _: random.Random) -> _Read:
    joined = block_size // MOONCAKE_BLOCK
    requests = []
    for where, row in _json_lines(path):
        tokens = int(_number(where, row, "input_length", least=1))
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise ReplayError(f"{where}: hash_ids must be a list of numbers")
        if len(ids) < tokens // MOONCAKE_BLOCK:
            raise ReplayError(
                f"{where}: {tokens} tokens are {tokens // MOONCAKE_BLOCK} full blocks, hash_ids has {len(ids)}"
            )
        requests.append(
            TraceRequest(
                at=_number(where, row, "timestamp") / 1000,
                prompt_tokens=tokens,
                output_tokens=max(1, int(_number(where, row, "output_length"))),
                # An id stands for the whole prompt up to its end, so a joined block is known by its last part.
                blocks=tuple(ids[: tokens // MOONCAKE_BLOCK][joined - 1 :: joined]),
            )
        )
    return requests, []


# -- WEKA --------------------------------------------------------------------------------------------------------------


def _weka(path: Path, block_size: int, rng: random.Random) -> _Read:
    requests: list[TraceRequest] = []
    sessions = 0
    blocks = itertools.count()
    for where, session in _weka_sessions(path):
        if not isinstance(session, dict) or not isinstance(session.get("requests"), list):
            raise ReplayError(f"{where}: a session has a list of requests")
        if session.get("block_size") != WEKA_BLOCK:
            raise ReplayError(f"{where}: block_size is {session.get('block_size')!r}, not {WEKA_BLOCK}")
        sessions += 1
        start = rng.uniform(0, WEKA_START_HOURS * 3600)
        known: dict[int, int] = {}  # ids are the session's own
        name = str(session.get("id", where))
        for at, row in _weka_requests(where, session["requests"], start):
            ids = row.get("hash_ids") or []
            tokens = int(_number(where, row, "in", least=1))
            joined = block_size // WEKA_BLOCK
            full = ids[: tokens // WEKA_BLOCK][joined - 1 :: joined]
            numbered = tuple(
                known[number] if number in known else known.setdefault(number, next(blocks)) for number in full
            )
            requests.append(TraceRequest(at, tokens, max(1, int(_number(where, row, "out"))), numbered, tenant=name))
    notes = [
        f"{path.name}: {sessions} sessions have no common clock; they start at random within {WEKA_START_HOURS:g} h "
        "(--seed), and share nothing with each other"
    ]
    return requests, notes


def _weka_requests(where: str, rows: Sequence[Any], start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for row in rows:
        if not isinstance(row, dict):
            raise ReplayError(f"{where}: a request must be an object")
        at = start + _number(where, row, "t")
        if row.get("type") == "subagent":
            yield from _weka_requests(where, row.get("requests") or [], at)
        elif row.get("in"):
            yield at, row


def _weka_sessions(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield str(file), _json(str(file), file.read_bytes())
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".json") else None
                if content is not None:
                    yield f"{path}:{member.name}", _json(member.name, content.read())
    else:
        yield str(path), _json(str(path), path.read_bytes())


# -- Azure -------------------------------------------------------------------------------------------------------------


def _azure(path: Path, block_size: int, _: random.Random) -> _Read:
    requests = []
    blocks = itertools.count()
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            where = f"{path}:{number}"
            try:
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            except (ValueError, TypeError):
                raise ReplayError(f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is no time") from None
            tokens = max(1, int(_number(where, row, "ContextTokens")))
            output = max(1, int(_number(where, row, "GeneratedTokens")))
            own = tuple(itertools.islice(blocks, tokens // block_size))
            requests.append(TraceRequest(at, tokens, output, own))
    return requests, [f"{path.name}: the trace tells lengths and no prefixes: no two prompts share anything"]


# -- our own explain log -----------------------------------------------------------------------------------------------


def _explain(path: Path, block_size: int, _: random.Random) -> _Read:
    """An explain log holds no prompts: of each it tells how much was cached, and which group it went with."""
    requests = []
    left_out = 0
    fresh = itertools.count()
    chains: dict[str, list[int]] = {}
    for where, row in _decisions(path):
        try:
            decision = wire.from_json(wire.Decision, row)
        except wire.WireError as error:
            raise ReplayError(f"{where}: no decision of a sidecar: {error}") from None
        tokens = decision.prompt_tokens
        if tokens is None or tokens < 1:
            left_out += 1
            continue
        full = tokens // block_size
        shared = min(full, (decision.hit_tokens or 0) // block_size)
        chain = chains.setdefault(f"{decision.tier}/{decision.group}", [])
        chain.extend(itertools.islice(fresh, max(0, shared - len(chain))))
        blocks = (*chain[:shared], *itertools.islice(fresh, full - shared))
        requests.append(TraceRequest(decision.time, tokens, TYPICAL_OUTPUT, blocks, decision.tier))
    notes = [
        f"{path.name}: an explain log holds no prompts: what was cached is taken as one common beginning for each tier "
        f"and group, the rest as the request's own; answers are taken to have {TYPICAL_OUTPUT} tokens"
    ]
    if left_out:
        notes.append(f"{path.name}: {left_out} requests that the engine never counted are left out")
    return requests, notes


def _decisions(path: Path) -> Iterator[tuple[str, Any]]:
    """Of a saved answer of `/pool/explain`, or a decision on each line."""
    if _DECISIONS in _beginning(path):
        answer = _json(str(path), path.read_bytes())
        rows = answer.get("decisions") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise ReplayError(f"{path}: decisions must be a list, as /pool/explain answers")
        yield from ((f"{path}: decisions[{number}]", row) for number, row in enumerate(rows))
    else:
        yield from _json_lines(path)


# -- reading -----------------------------------------------------------------------------------------------------------


_READERS: dict[TraceFormat, Callable[[Path, int, random.Random], _Read]] = {
    TraceFormat.MOONCAKE: _mooncake,
    TraceFormat.WEKA: _weka,
    TraceFormat.AZURE: _azure,
    TraceFormat.EXPLAIN: _explain,
}


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(65_536)


def _json_lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                row = _json(where, line)
                if not isinstance(row, dict):
                    raise ReplayError(f"{where}: expected a JSON object")
                yield where, row


def _json(where: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ReplayError(f"{where}: not JSON: {error}") from None


def _number(where: str, row: dict[str, Any], name: str, least: float = 0) -> float:
    value = row.get(name)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number < math.inf:
        raise ReplayError(f"{where}: {name} must be a number of at least {least:g}, got {value!r}")
    return number


def _at(request: TraceRequest, at: float) -> TraceRequest:
    return TraceRequest(at, request.prompt_tokens, request.output_tokens, request.blocks, request.tier, request.tenant)
