"""What `cacheaware top` shows at one moment: the sidecars' answers, added up over replicas. Pure.

Blocks, queues and requests are sums. A hit rate is weighed by requests; a latency is that of the slowest replica, since
an average would hide it. Rates come from two frames of the same replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from cacheaware_api import wire

PUBLIC = "(public)"  # no tier can be called so


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one replica said: a status, or why there is none."""

    replica: str
    status: wire.PoolStatus | None
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TierLine:
    name: str
    queue: int = 0
    running: int = 0
    requests: int = 0  # of the last five minutes
    nominal: int = 0
    effective: int = 0
    held: int = 0
    cached: int = 0
    borrowed: int = 0
    lent: int = 0
    reclaimed_total: int = 0
    preempted_total: int = 0
    reclaimed_a_second: float | None = None  # None: the first frame
    preempted_a_second: float | None = None
    hit_percent: float | None = None
    time_to_first_token_p50: float | None = None
    time_to_first_token_p95: float | None = None
    attainment_percent: float | None = None

    @property
    def used(self) -> int:
        return self.held + self.cached


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    at: float  # seconds of any clock that only goes forward
    title: str
    answers: tuple[Answer, ...]
    capacity: int
    free: int
    block_size: int | None
    running: int
    waiting: int  # inside the engines
    tiers: tuple[TierLine, ...]

    @property
    def answered(self) -> int:
        return sum(answer.status is not None for answer in self.answers)

    @property
    def queued(self) -> int:
        return sum(tier.queue for tier in self.tiers)

    @property
    def hit_percent(self) -> float | None:
        return _weighed([(tier.hit_percent, tier.requests) for tier in self.tiers])

    def problems(self) -> list[tuple[str, str]]:
        """What is not as it should be: where, and what."""
        found = [(answer.replica, answer.problem) for answer in self.answers if answer.status is None]
        for answer in self.answers:
            conditions = () if answer.status is None else answer.status.conditions
            found += [
                (answer.replica, f"{each.type}={each.status} ({each.reason}) {each.message}".rstrip())
                for each in conditions
                if each.status != "True"
            ]
        return found


def frame(title: str, answers: Sequence[Answer], at: float, previous: Frame | None = None) -> Frame:
    statuses = [answer.status for answer in answers if answer.status is not None]
    ledgers = [status.ledger for status in statuses if status.ledger is not None]
    names = list(dict.fromkeys(name for status in statuses for name in status.tiers))
    tiers = [_tier(name, statuses) for name in names]
    public = sum(ledger.public.share for ledger in ledgers)
    if public:
        tiers.append(
            TierLine(
                PUBLIC,
                nominal=public,
                effective=public,
                held=sum(ledger.public.held for ledger in ledgers),
                cached=sum(ledger.public.cached for ledger in ledgers),
            )
        )
    before = _comparable(previous, answers)
    return Frame(
        at=at,
        title=title,
        answers=tuple(answers),
        capacity=sum(ledger.capacity for ledger in ledgers),
        free=sum(ledger.free for ledger in ledgers),
        block_size=ledgers[0].block_size if ledgers else None,
        running=sum(ledger.running for ledger in ledgers),
        waiting=sum(ledger.waiting for ledger in ledgers),
        tiers=tuple(_with_rates(tier, before, at) for tier in tiers),
    )


def _tier(name: str, statuses: Sequence[wire.PoolStatus]) -> TierLine:
    figures = [status.tiers[name] for status in statuses if name in status.tiers]
    accounts = [s.ledger.tiers[name] for s in statuses if s.ledger is not None and name in s.ledger.tiers]
    return TierLine(
        name,
        queue=sum(each.queue for each in figures),
        running=sum(each.slots.running for each in accounts),
        requests=sum(each.requests for each in figures),
        nominal=sum(each.nominal for each in accounts),
        effective=sum(each.effective for each in accounts),
        held=sum(each.held for each in accounts),
        cached=sum(each.cached for each in accounts),
        borrowed=sum(each.borrowed for each in accounts),
        lent=sum(each.lent for each in accounts),
        reclaimed_total=sum(each.reclaimed_total for each in accounts),
        preempted_total=sum(each.preempted_total for each in accounts),
        hit_percent=_weighed([(each.hit_percent, each.requests) for each in figures]),
        time_to_first_token_p50=_slowest([each.time_to_first_token_p50 for each in figures]),
        time_to_first_token_p95=_slowest([each.time_to_first_token_p95 for each in figures]),
        attainment_percent=_weighed([(each.attainment_percent, each.requests) for each in figures]),
    )


def _comparable(previous: Frame | None, answers: Sequence[Answer]) -> Frame | None:
    """The frame before, if the same replicas answered then: sums of others say nothing about a rate."""
    if previous is None:
        return None
    before = {answer.replica for answer in previous.answers if answer.status is not None}
    return previous if before == {answer.replica for answer in answers if answer.status is not None} else None


def _with_rates(tier: TierLine, before: Frame | None, at: float) -> TierLine:
    earlier: Mapping[str, TierLine] = {} if before is None else {each.name: each for each in before.tiers}
    if before is None or tier.name not in earlier or at <= before.at:
        return tier

    def rate(now: int, then: int) -> float | None:
        return None if now < then else (now - then) / (at - before.at)  # an engine that was started anew counts anew

    then = earlier[tier.name]
    return dataclasses.replace(
        tier,
        reclaimed_a_second=rate(tier.reclaimed_total, then.reclaimed_total),
        preempted_a_second=rate(tier.preempted_total, then.preempted_total),
    )


def _weighed(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _slowest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
