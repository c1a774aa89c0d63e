"""Mutated requests against a sidecar, for tests: whatever is sent, an answer comes, nothing breaks and nothing is left.

A campaign is a seed and a number of requests: the same seed sends the same bytes. Bodies are mutated as values and as
bytes, heads as bytes, and the engine answers well, badly or not at all meanwhile. `python -m
cacheaware_sidecar.testing_fuzz --requests 100000` runs a long one.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import json
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheaware_sidecar.testing import Behaviour, StubEngine
from cacheaware_sidecar.testing_http import RawAnswer, raw_exchange
from cacheaware_sidecar.testing_sidecar import Running, eventually, running_sidecar, view_json

log = logging.getLogger(__name__)

KEYS = {
    "key-of-acme": {"tenant": "acme", "tiers": ["gold", "bronze"], "defaultTier": "gold"},
    "key-of-zeta": {"tenant": "zeta", "tiers": ["bronze"]},
}
SEEDS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {}}]},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": "auto",
            "n": 2,
            "max_tokens": 5,
            "temperature": 0.5,
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {"type": "json_object"},
        },
    ),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"model": "m", "prompt": "Hi", "best_of": 2, "n": 1, "logprobs": 1, "seed": 7, "stop": ["."]}),
    ("/v1/completions", {"model": "m", "prompt": [1, 2, 3], "stream": True, "max_tokens": 16}),
    ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "priority": -5, "cache_salt": "mine", "vllm_xargs": {}}),
    ("/tokenize", {"model": "m", "prompt": "Hi"}),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "rain"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "max_output_tokens": 5,
            "stream": True,
            "store": False,
        },
    ),
    ("/v1/responses", {"model": "m", "input": "Hi", "stream": True}),
    ("/v1/responses", {"model": "m", "input": "Hi", "previous_response_id": None, "temperature": 0.5}),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *("", "gold", "lead", "auto", "x" * 5000, "\x00", "\ud800", "é\U0001f642", "data: [DONE]\n\n", "../../kv/ledger"),
    *([], {}, [[]], [None], {"a": {"b": {"c": []}}}, [[1, 2], [3]], [{"role": 7}], {"include_usage": "yes"}),
)
NAMES = (
    *("stream", "n", "best_of", "max_tokens", "service_tier", "stream_options", "messages", "prompt", "logprobs"),
    *("input", "instructions", "store", "tools", "tool_choice", "text", "include", "metadata", "reasoning"),
    *("priority", "cache_salt", "vllm_xargs", "request_id", "kv_transfer_params", "", "cache_salt\x00", "Priority"),
)
HEADERS = (
    *("x-cacheaware-tier: gold", "x-cacheaware-tenant: acme", "x-llm-d-slo-ttft-ms: 1e400", "x-llm-d-slo-tpot-ms: -1"),
    *("x-llm-d-slo-ttft-ms: nan", "traceparent: \xff\xfe", "x-request-id: " + "a" * 300, "expect: 200-ok"),
    *("connection: authorization, x-a", "content-encoding: gzip", "te: trailers", "transfer-encoding: chunked"),
    *("content-length: 3", "range: bytes=0-1", "host: elsewhere", "accept-encoding: br", "cookie: a=b", "upgrade: h2c"),
)
ENGINES: tuple[Behaviour, ...] = (
    *([Behaviour()] * 6),
    Behaviour(status=400, body=b'{"error": {"message": "no"}}'),
    Behaviour(status=500, body=b"oops", content_type="text/plain"),
    Behaviour(body=b"[not json", content_type="application/json"),
    Behaviour(die_after=0),
    Behaviour(die_after=2, flush=True),
    Behaviour(end_after=1),
    Behaviour(compressed=True),
    Behaviour(pieces=(b"data: {}\n\n", b"\xff\xfe\n\n", b"data: [DONE]\n\n")),
    Behaviour(hang_after=1, flush=True),
    Behaviour(pieces=(b'data: {"choices": [{"delta": {"tool_calls": [{}, 7]}}]}\n\n', b'data: {"error": 1}\n\n')),
    Behaviour(body=b'{"choices": [{"message": {"tool_calls": 7}, "logprobs": []}], "usage": []}'),
)
_AT_ONCE = 1000  # of a long run
# What may be answered; anything else, 500 above all, is a fault of ours.
ALLOWED = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 417, 429, 431, 502, 503, 504})


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A request that broke something: enough to send it again."""

    request: bytes
    problem: str


@dataclasses.dataclass(slots=True)
class Outcome:
    statuses: Counter[int] = dataclasses.field(default_factory=Counter)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    forwarded: int = 0


def mutated_body(rng: random.Random, body: Mapping[str, Any]) -> bytes:
    changed: Any = copy.deepcopy(dict(body))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        changed = _mutated(rng, changed)
    data = bytearray(json.dumps(changed, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.25 and data:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 20)]
                case 2:
                    data[at:at] = data[: rng.randint(1, 40)]
                case _:
                    data[at:at] = rng.choice((b"\xff", b"NaN", b"{", b"}" * 3, b"\\u", b'"', b"[" * 2000, b"1e999"))
            if not data:
                break
    return bytes(data)


def _mutated(rng: random.Random, value: Any) -> Any:
    """One change somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        match rng.randrange(4):
            case 0:
                del value[name]
            case 1:
                value[rng.choice(NAMES)] = copy.deepcopy(rng.choice(VALUES))
            case 2:
                value[name] = copy.deepcopy(rng.choice(VALUES))
            case _:
                value[name] = _mutated(rng, value[name])
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        value[at] = _mutated(rng, value[at])
        return value * rng.choice((1, 1, 1, 3, 50))
    return copy.deepcopy(rng.choice(VALUES))


def mutated_request(rng: random.Random) -> bytes:
    path, body = rng.choice(SEEDS)
    data = mutated_body(rng, body)
    method = "POST"
    if rng.random() < 0.1:
        path = rng.choice((path + "?a=b", path + "/", "//" + path, path[:-2], "/v1/models", "/kv/ledger", "*"))
    if rng.random() < 0.1:
        method = rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE"))
    head = [f"{method} {path} HTTP/1.1", "host: test", "connection: close", f"content-length: {len(data)}"]
    head.append("authorization: Bearer " + rng.choice((*KEYS, *KEYS, *KEYS, *KEYS, "wrong", "\xff")))
    if rng.random() < 0.3:
        head.insert(rng.randint(1, len(head)), rng.choice(HEADERS))
    request = bytearray("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + data)
    if rng.random() < 0.08:  # on the wire, where it may hit the framing too
        at = rng.randrange(len(request))
        request[at : at + rng.randint(0, 2)] = rng.choice((b"", b"\x00", b"\r", b"\n", b"\r\n\r\n", b":", b"\xff"))
    return bytes(request)


async def campaign(seed: int, requests: int, *, batch: int = 200, at_once: int = 16) -> Outcome:
    """Send so many requests to a sidecar in front of a stub, and look at everything afterwards. The engine behaves
    alike during a batch.
    """
    rng, outcome = random.Random(seed), Outcome()
    wanted = view_json(identity={"type": "APIKeys"}, sharing="Tenant")
    with tempfile.TemporaryDirectory(prefix="ca-") as name:
        folder = Path(name)
        async with (
            StubEngine(folder / "kv.sock", max_sequences=2 * at_once) as engine,
            running_sidecar(
                engine, folder, wanted=wanted, keys=KEYS, idle_timeout=0.3, first_byte_timeout=2
            ) as sidecar,
        ):
            limit = asyncio.Semaphore(at_once)

            async def one(request: bytes) -> None:
                async with limit:
                    answer = await raw_exchange(sidecar.url, request, whole=True)
                    problem = _judged(request, answer)
                    if answer.data:
                        outcome.statuses[answer.status] += 1
                    if problem is not None:
                        outcome.faults.append(Fault(request, problem))

            for start in range(0, requests, batch):
                log.info("%d of %d, %d faults", start, requests, len(outcome.faults))
                engine.behaviour = rng.choice(ENGINES)
                sent = [mutated_request(rng) for _ in range(min(batch, requests - start))]
                await asyncio.gather(*(one(request) for request in sent))
                outcome.forwarded += len(engine.requests)
                outcome.faults += [
                    Fault(each.body, problem) for each in engine.requests if (problem := _leak(each.json))
                ]
                engine.requests.clear()
            await _all_given_back(sidecar, outcome)
    return outcome


def _judged(request: bytes, answer: RawAnswer) -> str | None:
    """What is wrong with an answer, if anything is."""
    if not answer.data and not answer.closed:
        return "no answer in time"
    if not answer.data:
        return "the connection was closed without an answer"
    if answer.status not in ALLOWED:
        return f"answered {answer.status}: {answer.data[:500]!r}"
    if not answer.whole and b"HEAD" not in request[:8]:
        return f"no end of the answer in time: {answer.data[:500]!r}"
    if answer.status >= 400 and answer.body and b'"error"' not in answer.body:
        return f"an error that is not in OpenAI's shape: {answer.data[:500]!r}"
    return None


def _leak(body: Mapping[str, Any]) -> str | None:
    """What reached the engine and must not, or did not and must."""
    extra = body["vllm_xargs"]
    if extra.get("cacheaware_tier") not in ("gold", "bronze") or extra.keys() - {"cacheaware_tier", "cacheaware_group"}:
        return "the client's vllm_xargs reached the engine"
    if body["priority"] not in (-100, 0):
        return "the client's priority reached the engine"
    if len(body["cache_salt"]) < 20:
        return "the client's cache_salt reached the engine"
    left = {"service_tier", "request_id", "kv_transfer_params"} & body.keys()
    return f"{sorted(left)} reached the engine" if left else None


async def _all_given_back(sidecar: Running, outcome: Outcome) -> None:
    try:
        await eventually(sidecar.is_idle)
    except TimeoutError:
        gate = sidecar.sidecar.gate
        outcome.faults.append(Fault(b"", f"left behind: {gate.queued} queued, {gate.in_flight} in flight"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cacheaware_sidecar.testing_fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the engine's own, which dies on purpose
    start = time.monotonic()
    # Some of each batch wait for limits of time, so a long run has large ones.
    batch = max(200, arguments.requests // 40)
    outcome = asyncio.run(campaign(arguments.seed, arguments.requests, batch=batch, at_once=_AT_ONCE))
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.statuses.items()))
    print(f"seed {arguments.seed}: {arguments.requests} requests in {time.monotonic() - start:.0f} s; {statuses}")
    print(f"{outcome.forwarded} reached the engine; {len(outcome.faults)} faults")
    for fault in outcome.faults[:20]:
        print(f"- {fault.problem}\n  {fault.request[:1000]!r}")
    raise SystemExit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
