"""`cacheaware explain --request`: what would happen to a request now, and which lines of the pool's file decide it."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cacheaware.explain import TIMEOUT, PoolLines
from cacheaware.pool_status import NotRunning
from cacheaware.state_file import State
from cacheaware_api import wire

_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
_COURSES = {
    wire.Course.GO: "goes to the engine at once",
    wire.Course.HOLD: "is held for company",
    wire.Course.WAIT: "waits",
    wire.Course.REFUSE: "is refused",
}
_REASONS = {
    "prefix-ready": "until the prefix that it shares is computed",
    "window": "until its tier's window ends",
    "slack": "until waiting longer would cost its promise",
    "prompts-ahead": "until the engine has computed more of the prompts that it was sent",
    "slots": "until the engine runs fewer sequences",
    "blocks": "until its tier may have more of the cache",
    "turn": "until those that go first have gone",
}
_SCOPES = {
    "pool": "everyone in the pool",
    "tier": "its tier",
    "tenant": "its tenant",
    "request": "nobody",
}
_NAMED_BY = {
    "service_tier": "the request's service_tier",
    "key": "the key's default",
    "gateway": "the gateway",
    "defaultTier": "the pool's default",
}


class BadRequestFile(Exception):
    """What is wrong with the request that was to be asked about, and what to do."""


def request_of(text: str) -> tuple[str, dict[str, Any]]:
    """A request's path, by what its body has, and its body. Raises `BadRequestFile`."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadRequestFile(f"the request is not JSON: {error}") from None
    paths = [path for name, path in _PATHS.items() if name in body] if isinstance(body, dict) else []
    if len(paths) != 1:
        raise BadRequestFile(
            "the request must be a JSON object with messages (a chat), prompt (a completion) or input (a response), "
            "one of them"
        )
    return paths[0], body


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    replica: str
    foreseen: wire.Foreseen


async def ask_all(state: State, path: str, body: Mapping[str, Any], key: str | None) -> list[Answer]:
    """Of every replica that answers, as each has its own cache; raises `NotRunning` where none does."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    question = {"path": path, "headers": headers, "body": body}
    async with aiohttp.ClientSession(trust_env=False, timeout=TIMEOUT) as session:
        answers = await asyncio.gather(
            *(_ask(session, each.control_url, state.token, question) for each in state.replicas), return_exceptions=True
        )
    found: list[Answer] = []
    problems = []
    for replica, answer in zip(state.replicas, answers, strict=True):
        if isinstance(answer, wire.Foreseen):
            found.append(Answer(replica.name, answer))
        elif isinstance(answer, (aiohttp.ClientError, TimeoutError, OSError, ValueError)):
            problems.append(str(answer) or type(answer).__name__)
        else:
            raise answer
    if not found:
        raise NotRunning(f"no sidecar of pool {state.pool.name} answers: {'; '.join(problems) or 'it has no replica'}")
    return found


async def _ask(session: aiohttp.ClientSession, url: str, token: str, question: Mapping[str, Any]) -> wire.Foreseen:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = io.BytesIO(json.dumps(question).encode())  # a prompt may be long, and is then sent in parts
    async with session.post(f"{url}/pool/explain", data=data, headers=headers) as response:
        answer = await response.json()
        if response.status != 200:  # the question was none: it says why
            message = answer.get("error", {}).get("message", "") if isinstance(answer, dict) else ""
            raise ValueError(f"{url} answered {response.status} {message}".rstrip())
        return wire.from_json(wire.Foreseen, answer)


def to_lines(answers: Sequence[Answer]) -> str:
    """A JSON object for each replica."""
    return "\n".join(json.dumps({"replica": each.replica, **wire.to_json(each.foreseen)}) for each in answers)


def table(answers: Sequence[Answer], lines: PoolLines) -> Table:
    """A row for each thing that is known, a column for each replica."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column("", no_wrap=True)
    for each in answers:
        shown.add_column(each.replica, overflow="fold")
    told = [_rows(each.foreseen, lines) for each in answers]
    for name in dict.fromkeys(name for rows in told for name in rows):
        shown.add_row(name, *(Text(rows.get(name, "")) for rows in told))
    return shown


def _rows(told: wire.Foreseen, lines: PoolLines) -> dict[str, str]:
    rows = {
        "it": _course(told),
        "because": told.message or "",
        "caller": _caller(told),
        "tier": f"{told.tier}, by {_NAMED_BY.get(told.tier_by or '', 'itself')}" if told.tier_by else told.tier or "",
        "shares with": "" if told.scope is None else _SCOPES.get(told.scope, told.scope),
        "prompt": _prompt(told),
        "before it": "" if told.waiting_before is None else f"{told.waiting_before} of its tier",
        "first token": _first_token(told),
        "decided by": "\n".join(lines.of_field(field, told.tier) for field in told.fields),
        "note": told.note or "",
    }
    return {name: value for name, value in rows.items() if value}


def _course(told: wire.Foreseen) -> str:
    course = _COURSES[told.course]
    match told.course:
        case wire.Course.GO:
            return course
        case wire.Course.REFUSE:
            return f"{course}: {told.status} {told.reason}"
        case wire.Course.HOLD:
            return f"{course} {_REASONS.get(told.reason, told.reason)}, {told.hold_at_most_ms or 0:.0f} ms at most"
        case wire.Course.WAIT:
            return f"{course} {_REASONS.get(told.reason, told.reason)}"


def _caller(told: wire.Foreseen) -> str:
    if told.tenant is None:
        return "nobody in particular" if told.scope is not None and told.key is None else told.key or ""
    return f"tenant {told.tenant}" + ("" if told.key is None else f" (key {told.key})")


def _prompt(told: wire.Foreseen) -> str:
    if told.prompt_tokens is None:
        return ""
    blocks = "" if told.prompt_blocks is None else f" ({told.prompt_blocks} blocks)"
    return f"about {told.prompt_tokens} tokens{blocks}, {told.cached_tokens or 0} of them probably cached"


def _first_token(told: wire.Foreseen) -> str:
    promised = "" if told.promised_ms is None else f"promised within {told.promised_ms:.0f} ms"
    if told.time_to_first_token_ms is None:
        return f"not known yet, {promised}" if promised else ""
    expected = f"after about {told.time_to_first_token_ms:.0f} ms"
    if told.in_time is None:
        return expected
    return f"{expected}, {promised}" if told.in_time else f"{expected}, too late: {promised}"
