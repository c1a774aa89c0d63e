"""What would happen to a request now, for `POST /pool/explain`: who calls, what is cached of it, whether it goes.

It takes the way of a real request (`preparing.py`, `gate.py`) up to the queue and no further: nobody waits, nothing is
reserved or learned, and the engine hears nothing of it. So what only the engine can say is not told.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import Any

from multidict import CIMultiDict

from cacheaware_api import wire
from cacheaware_sidecar.block_budget import Demand
from cacheaware_sidecar.engine_state import Link
from cacheaware_sidecar.errors import BadRequest, Reason, Refusal, TooLarge
from cacheaware_sidecar.estimates import Estimates
from cacheaware_sidecar.gate import Gate
from cacheaware_sidecar.preparing import Prepared, Preparing
from cacheaware_sidecar.record import Record
from cacheaware_sidecar.rewrite import encode, parse_object
from cacheaware_sidecar.salt import scope_kind
from cacheaware_sidecar.scheduling import FlushReason, Foreseen, WaitsFor
from cacheaware_sidecar.tiers import Promise, TierBy
from cacheaware_sidecar.traffic import Traffic

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_TIER_FIELDS = {
    TierBy.POOL: ("defaultTier",),
    TierBy.KEY: ("identity.apiKeys",),
    TierBy.GATEWAY: ("identity.trustedHeaders",),
}
_HOLD_FIELDS = {FlushReason.WINDOW: "batchingWindow", FlushReason.SLACK: "sla.timeToFirstToken"}
_WAIT_FIELDS = {
    WaitsFor.PROMPTS: ("weight",),
    WaitsFor.TURN: ("weight",),
    WaitsFor.SLOTS: ("quota.nominalPercent", "weight"),  # sequences are shared out as blocks are
    WaitsFor.BLOCKS: ("quota.nominalPercent", "quota.borrowingLimitPercent"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    path: str
    headers: CIMultiDict[str]
    body: Any


def question(data: bytes) -> Question:
    """Raises `BadRequest`, which names the field of the question."""
    asked = parse_object(data)
    path, headers = asked.get("path"), asked.get("headers", {})
    if path not in PATHS:
        raise BadRequest(f"path must be one of {', '.join(PATHS)}: requests of no other path queue", param="path")
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise BadRequest("headers must be an object of texts: those that the client would send", param="headers")
    if "body" not in asked:
        raise BadRequest("body is missing: the request's, as the client would send it", param="body")
    return Question(path, CIMultiDict(headers), asked["body"])


class Foresight:
    def __init__(
        self,
        preparing: Preparing,
        *,
        link: Link,
        gate: Gate,
        traffic: Traffic,
        estimates: Estimates | None = None,
        most_bytes: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._preparing = preparing
        self._link = link
        self._gate = gate
        self._traffic = traffic
        self._estimates = estimates  # absent: the engine keeps the accounts of blocks
        self.most_bytes = most_bytes  # of a request's body
        self._clock = clock
        self._wall_clock = wall_clock

    async def of(self, question: Question) -> wire.Foreseen:
        number = f"req-{secrets.token_hex(16)}"
        record = Record(number, question.path, arrived=self._clock(), time=self._wall_clock())
        told = wire.Foreseen(wire.Course.REFUSE, reason="")  # what was found out before a refusal is told with it
        fields: list[str] = []
        view: wire.View | None = None
        try:
            self._traffic.refuse_if_draining()
            view = self._preparing.view()
            caller = self._preparing.identify(question.headers, record)
            told = dataclasses.replace(told, key=record.key_name, tenant=caller.tenant)
            data = encode(question.body)
            if len(data) > self.most_bytes:
                raise TooLarge(self.most_bytes)
            wanted = self._preparing.wanted(question.path, data, record)
            prepared = await self._preparing.prepare(question.headers, record, wanted, caller, view)
            told = self._expected(told, prepared, record.promise, scope_kind(view.sharing, caller.tenant))
            fields = [*_TIER_FIELDS.get(prepared.choice.by, ()), "sharing"]
            await self._link.state.usable()
            demand, note = self._demand(prepared)
            told = dataclasses.replace(told, note=note)
            seen = self._gate.foresee(prepared.waiting, demand, reject_late=prepared.rejects_late)
        except Refusal as refusal:
            fields += () if view is None else _refused_by(refusal.reason, view, record.tier)
            return dataclasses.replace(
                told,
                tier=record.tier,
                reason=str(refusal.reason),
                status=refusal.status,
                message=refusal.message,
                param=refusal.param,
                fields=tuple(fields),
            )
        fields += _decided_by(seen, told.in_time, prepared.tier.name)
        return dataclasses.replace(
            told,
            course=_course(seen),
            reason=str(seen.waits_for or seen.hold_reason or FlushReason.NOT_HELD),
            hold_at_most_ms=None if seen.hold_reason is None else seen.hold_seconds * 1000,
            fields=tuple(fields),
        )

    def _expected(self, told: wire.Foreseen, prepared: Prepared, promise: Promise, scope: str) -> wire.Foreseen:
        """With what is known of the request before it is asked whether it would go."""
        waiting, ledger = prepared.waiting, self._link.ledger
        seconds, promised = self._gate.time_to_first_token(waiting), promise.time_to_first_token
        told = dataclasses.replace(
            told,
            tier=prepared.tier.name,
            tier_by=str(prepared.choice.by),
            scope=scope,
            waiting_before=self._gate.queued_of(prepared.tier.name),
            time_to_first_token_ms=None if seconds is None else seconds * 1000,
            promised_ms=None if promised is None else promised * 1000,
            in_time=None if seconds is None or promised is None else seconds <= promised,
        )
        if prepared.key is None:
            return told  # no single prompt that could be looked at
        tokens = round(waiting.prompt_tokens)
        return dataclasses.replace(
            told,
            prompt_tokens=tokens,
            prompt_blocks=None if ledger is None else -(-tokens // ledger.block_size),
            cached_tokens=self._gate.predicted_tokens(waiting),
        )

    def _demand(self, prepared: Prepared) -> tuple[Demand | None, str | None]:
        """Of blocks, where they are estimated; and what the engine would be asked first."""
        if self._estimates is None:
            return None, None
        tier = prepared.tier.name
        demand = self._estimates.demand(tier, prepared.key, prepared.asked)
        if (refusal := self._estimates.too_large(tier, demand)) is None:
            return demand, None
        return demand, f"the engine would be asked first how many tokens these are; if it agrees: {refusal.message}"


def _course(seen: Foreseen) -> wire.Course:
    if seen.waits_for is not None:
        return wire.Course.WAIT
    return wire.Course.GO if seen.hold_reason is None else wire.Course.HOLD


def _decided_by(seen: Foreseen, in_time: bool | None, tier: str) -> list[str]:
    names: list[str] = []
    if seen.waits_for is not None:
        names += _WAIT_FIELDS[seen.waits_for]
    if seen.hold_ends is not None:
        names.append(_HOLD_FIELDS[seen.hold_ends])
    if in_time is False:
        names += ("sla.timeToFirstToken", "admission")
    return [_of_tier(tier, name) for name in dict.fromkeys(names)]


def _refused_by(reason: Reason, view: wire.View, tier: str | None) -> list[str]:
    match reason:
        case Reason.UNKNOWN_TIER:
            return ["tiers", "defaultTier"]
        case Reason.UNKNOWN_KEY | Reason.TIER_NOT_ALLOWED:
            keys = view.identity.type is wire.IdentityType.API_KEYS
            return ["identity.apiKeys" if keys else "identity.trustedHeaders"]
        case Reason.SLA_INFEASIBLE if tier is not None:
            return [_of_tier(tier, name) for name in ("sla.timeToFirstToken", "admission")]
    return []


def _of_tier(tier: str, name: str) -> str:
    return f"tiers[{tier}].{name}"  # a list by name: its order means nothing
