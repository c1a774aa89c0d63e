"""`cacheaware explain`: how a running pool treated its last requests, why, and which line of its file decides that."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheaware.pool_status import NotRunning
from cacheaware.state_file import State
from cacheaware_api import wire
from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.v1alpha1 import KIND
from cacheaware_api.yaml_documents import Document, documents

TIMEOUT = aiohttp.ClientTimeout(total=5)  # a control answer is small and local
_LONG_QUEUE_MS = 50.0  # less is the time that a step takes, and no matter of shares

# Why a request was let go, in words, and the tier's field that decides it (None: nothing in the file does).
_REASONS: Mapping[str, tuple[str, tuple[str, ...] | None]] = {
    "not-held": ("not held for company", None),
    "prefix-ready": ("held until the prefix that it shares was computed", None),
    "window": ("held for company as long as its tier allows", ("batchingWindow",)),
    "slack": ("held until waiting longer would have cost its promise", ("sla", "timeToFirstToken")),
    "group-full": ("held until enough company had come", None),
    "not-busy": ("held until the engine had room for it", None),
    "idle": ("held until the engine had nothing else to do", None),
    "no-gain": ("held until company no longer paid", None),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Explained:
    decision: wire.Decision
    why: str
    field: tuple[str, ...] | None = None  # of the tier; None: nothing in the pool's file decides it


def explained(decision: wire.Decision) -> Explained:
    """What decided how long the request waited: its hold, or the share of its tier where the queue was longer."""
    why, field = _REASONS.get(decision.flush_reason, (decision.flush_reason, None))
    if decision.queue_ms > max(_LONG_QUEUE_MS, decision.hold_ms):
        return Explained(decision, f"waited for its tier's share of the engine; {why}", ("weight",))
    return Explained(decision, why, field)


class PoolLines:
    """Where the fields of a pool's tiers stand in its file; empty where the file is gone or no longer says it."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._document: Document | None = None
        try:
            found = documents(path.read_bytes())
        except (OSError, ObjectInvalid):
            return
        self._document = next((d for d in found if isinstance(d.data, dict) and d.data.get("kind") == KIND), None)

    def where(self, tier: str, field: tuple[str, ...]) -> str:
        """`pool.yaml:12 batchingWindow: 200ms`; without a line where the default decides."""
        document = self._document
        tiers = _value(document.data, ("spec", "tiers")) if document is not None else None
        if document is None or not isinstance(tiers, list):
            return ""
        for number, each in enumerate(tiers):
            if isinstance(each, dict) and each.get("name") == tier:
                value = _value(each, field)
                name = ".".join(field)
                if value is None:
                    return f"{name} (not set: its default)"
                return f"{self._name}:{document.line(('spec', 'tiers', number, *field))} {name}: {value}"
        return ""

    def of_field(self, field: str, tier: str | None) -> str:
        """The same of a field as a sidecar names it: `tiers[gold].batchingWindow`, `defaultTier`; its name alone where
        the file does not say it.
        """
        prefix = f"tiers[{tier}]."
        if tier is not None and field.startswith(prefix):
            path = tuple(field.removeprefix(prefix).split("."))
            return self.where(tier, path) or field
        document, spec_path = self._document, ("spec", *field.split("."))
        if document is None or (value := _value(document.data, spec_path)) is None:
            return field
        said = "" if isinstance(value, (dict, list)) else f": {value}"
        return f"{self._name}:{document.line(spec_path)} {field}{said}"


def _value(data: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data


async def last_decisions(state: State, count: int) -> list[wire.Decision]:
    """Of all replicas, the newest first; raises `NotRunning` where none answers."""
    async with aiohttp.ClientSession(trust_env=False, timeout=TIMEOUT) as session:
        answers = await asyncio.gather(
            *(ask(session, each.control_url, state.token, count) for each in state.replicas), return_exceptions=True
        )
    found: list[wire.Decision] = []
    problems = []
    for answer in answers:
        if isinstance(answer, list):
            found += answer
        elif isinstance(answer, (aiohttp.ClientError, TimeoutError, OSError, ValueError)):
            problems.append(str(answer) or type(answer).__name__)
        else:
            raise answer
    if len(problems) == len(answers):
        raise NotRunning(f"no sidecar of pool {state.pool.name} answers: {'; '.join(problems) or 'it has no replica'}")
    return sorted(found, key=lambda decision: -decision.time)[:count]


async def ask(session: aiohttp.ClientSession, url: str, token: str, count: int) -> list[wire.Decision]:
    """The last decisions of the sidecar with this control URL; raises `ValueError` for an answer that is none."""
    headers = {"Authorization": f"Bearer {token}"}
    async with session.get(f"{url}/pool/explain", params={"n": str(count)}, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"{url} answered {response.status}")
        answer = await response.json()
    rows = answer.get("decisions") if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise ValueError(f"{url} answered without decisions")
    return [wire.from_json(wire.Decision, row) for row in rows]


def to_lines(decisions: Sequence[wire.Decision]) -> str:
    """A decision on each line, oldest first: what `cacheaware replay` reads."""
    return "\n".join(json.dumps(wire.to_json(decision)) for decision in reversed(decisions))


def table(decisions: Sequence[wire.Decision], lines: PoolLines) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("time", "tier", "outcome"):
        shown.add_column(name, no_wrap=True)
    for name in ("queue", "hold", "first token", "prompt", "cached", "predicted"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("why", "decided by"):
        shown.add_column(name, overflow="fold")
    for decision in decisions:
        each = explained(decision)
        shown.add_row(
            datetime.fromtimestamp(decision.time).strftime("%H:%M:%S"),
            decision.tier,
            decision.outcome,
            _ms(decision.queue_ms),
            _ms(decision.hold_ms),
            _ms(decision.time_to_first_token_ms),
            _count(decision.prompt_tokens),
            _count(decision.hit_tokens),
            _count(decision.predicted_hit_tokens),
            each.why,
            "" if each.field is None else lines.where(decision.tier, each.field),
        )
    return shown


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} ms"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)
