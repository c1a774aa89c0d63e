"""The requests of a replay: traces merged into one stream, each request with its tier, tenant and block keys."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from cacheaware.replay.errors import ReplayError
from cacheaware.replay.trace import Trace, TraceRequest
from cacheaware_api import wire

_KEY_BYTES = 12  # of a digest: the reuse histogram samples by a key's bits, so they must be uniform


@dataclass(frozen=True, slots=True)
class Request:
    """`keys` are of the full blocks of the prompt; equal keys mean equal prompts up to there, for the same readers."""

    id: str
    at: float
    tier: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]

    def hittable(self, block_size: int) -> Sequence[bytes]:
        """Keys that may be hit: at least one token is always computed."""
        return self.keys[: (self.prompt_tokens - 1) // block_size]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Where the requests of a trace go. `tier` None: as the trace says, else the default tier."""

    trace: Trace
    tier: str | None = None


def merged(sources: Iterable[Mapped], view: wire.View, *, rate: float = 1.0, seed: int = 0) -> tuple[Request, ...]:
    """All requests in the order of arrival; raises `ReplayError` for a tier that the pool does not have.

    `rate` is how many times faster than in the trace they arrive. Requests that came at the very same moment are put in
    an order by `seed`, once, the same for every policy.
    """
    sources = list(sources)
    tiers = [tier.name for tier in view.tiers]
    names = [source.trace.name for source in sources]
    if len(set(names)) < len(names):
        raise ReplayError(f"two traces are called {next(name for name in names if names.count(name) > 1)}: rename one")
    for source in sources:
        if source.tier is not None and source.tier not in tiers:
            raise ReplayError(f"--tier {source.trace.name}={source.tier}: the pool's tiers are {', '.join(tiers)}")
    rng = random.Random(seed)
    streams = [
        sorted(
            ((request.at / rate, rng.random(), source, request) for request in source.trace.requests),
            key=lambda entry: entry[:2],
        )
        for source in sources
    ]
    keys = _Keys(view.sharing)
    requests = []
    for number, (at, _, source, row) in enumerate(heapq.merge(*streams, key=lambda entry: entry[:2])):
        tier = source.tier or _own_tier(source.trace, row, view, tiers)
        tenant = source.trace.name if row.tenant is None else f"{source.trace.name}/{row.tenant}"
        request_id = f"r{number}"
        scope = _scope(view.sharing, tier=tier, tenant=tenant, request_id=request_id)
        requests.append(
            Request(
                request_id,
                at,
                tier,
                tenant,
                row.prompt_tokens,
                row.output_tokens,
                keys.of(f"{source.trace.name}\n{scope}", row.blocks),
            )
        )
    return tuple(requests)


def _own_tier(trace: Trace, row: TraceRequest, view: wire.View, tiers: Sequence[str]) -> str:
    if row.tier is not None and row.tier in tiers:
        return row.tier
    if row.tier is not None:
        raise ReplayError(
            f"{trace.name}: its requests are of a tier {row.tier!r}, which the pool does not have: "
            f"map the trace with --tier {trace.name}=TIER, one of {', '.join(tiers)}"
        )
    if view.default_tier is None:
        raise ReplayError(
            f"{trace.name}: which tier serves it? Map it with --tier {trace.name}=TIER, one of {', '.join(tiers)}, "
            "or set defaultTier in the pool"
        )
    return view.default_tier


def _scope(sharing: wire.Sharing, *, tier: str, tenant: str, request_id: str) -> str:
    """Who may hit whose blocks, as the sidecar's salt decides it."""
    match sharing:
        case wire.Sharing.POOL:
            return ""
        case wire.Sharing.TIER:
            return tier
        case wire.Sharing.TENANT:
            return tenant
        case _:
            return request_id


class _Keys:
    """Chained: a key covers all keys before it, so equal keys have equal parents whatever numbers a file has."""

    def __init__(self, sharing: wire.Sharing) -> None:
        self._remember = sharing is not wire.Sharing.NONE
        self._known: dict[tuple[bytes, int], bytes] = {}

    def of(self, scope: str, blocks: Sequence[int]) -> tuple[bytes, ...]:
        parent = blake2b(scope.encode(), digest_size=_KEY_BYTES).digest()
        keys = []
        for number in blocks:
            key = self._known.get((parent, number))
            if key is None:
                key = blake2b(parent + number.to_bytes(16, "little", signed=True), digest_size=_KEY_BYTES).digest()
                if self._remember:
                    self._known[parent, number] = key
            keys.append(key)
            parent = key
        return tuple(keys)


def tenants_by_tier(requests: Iterable[Request]) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for request in requests:
        found.setdefault(request.tier, set()).add(request.tenant)
    return found
