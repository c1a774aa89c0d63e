"""What the groups at work have in the engine's cache, and how much more they will want of it soon. Pure; told the time.

A group's working set is its common prefix once, and what the conversations seen in the last minute have beyond it. It
grows by what each request adds: the part of its prompt that was not cached, and its answer. Both are counted by the
engine; a request without a conversation's name is a conversation of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict

from cacheaware_sidecar.scheduling.requests import Used, Waiting

ACTIVE_SECONDS = 60.0
MOST_GROUPS = 256
_MOST_CONVERSATIONS = 512  # of a group
_SMOOTHING = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class GroupWorkingSet:
    """`growth_tokens` is what a request adds, its mean and one standard deviation."""

    id: str
    tier: str  # of its last request
    prefix_tokens: int
    conversations: int
    context_tokens: int
    growth_tokens: int
    requests_a_second: float

    def growth_within(self, seconds: float) -> float:
        """Tokens that its requests will probably add in so many seconds."""
        return self.requests_a_second * seconds * self.growth_tokens


@dataclasses.dataclass(slots=True)
class _Group:
    id: str
    tier: str
    prefix_tokens: int
    seen_at: float
    interval: float | None = None  # seconds between two requests, as usual
    growth: float | None = None
    variance: float = 0.0
    # Tokens beyond the prefix, and when that was; the one seen last is the last one.
    conversations: OrderedDict[str, tuple[float, int]] = dataclasses.field(default_factory=OrderedDict)

    def requests_a_second(self, now: float) -> float:
        """One in a minute, where only one was seen; and no more than the silence since then allows."""
        usual = ACTIVE_SECONDS if self.interval is None else self.interval
        return 1 / max(usual, now - self.seen_at, 1e-3)

    def forget(self, now: float) -> None:
        conversations = self.conversations
        while conversations and (
            len(conversations) > _MOST_CONVERSATIONS or next(iter(conversations.values()))[0] < now - ACTIVE_SECONDS
        ):
            conversations.popitem(last=False)

    def figures(self, now: float) -> GroupWorkingSet:
        self.forget(now)
        growth = 0.0 if self.growth is None else self.growth + math.sqrt(self.variance)
        return GroupWorkingSet(
            self.id,
            self.tier,
            self.prefix_tokens,
            len(self.conversations),
            self.prefix_tokens + sum(tokens for _, tokens in self.conversations.values()),
            round(growth),
            self.requests_a_second(now),
        )


class ActiveGroups:
    """Bounded: the groups seen last, and of each the conversations seen last. O(1) a request, amortised."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def sent(self, group_id: str, prefix_tokens: float, request: Waiting, now: float) -> None:
        """A request of the group goes to the engine."""
        group = self._groups.get(group_id)
        if group is None:
            self._groups[group_id] = _Group(group_id, request.tier, round(prefix_tokens), now)
            if len(self._groups) > MOST_GROUPS:
                self._groups.popitem(last=False)
            return
        self._groups.move_to_end(group_id)
        interval = now - group.seen_at
        usual = interval if group.interval is None else group.interval
        group.interval = usual + _SMOOTHING * (interval - usual)
        group.seen_at, group.tier, group.prefix_tokens = now, request.tier, round(prefix_tokens)

    def ended(self, group_id: str, request: Waiting, used: Used, now: float) -> None:
        """The engine has counted one that was sent."""
        group = self._groups.get(group_id)
        if group is None:
            return  # forgotten meanwhile
        name = request.conversation or request.id
        group.conversations.pop(name, None)
        group.conversations[name] = (now, max(0, used.prompt_tokens + used.output_tokens - group.prefix_tokens))
        if len(group.conversations) > _MOST_CONVERSATIONS:
            group.forget(now)
        if used.cached_tokens is None:
            return
        added = used.prompt_tokens - used.cached_tokens + used.output_tokens
        if group.growth is None:
            group.growth = float(added)
            return
        error = added - group.growth
        group.growth += _SMOOTHING * error
        group.variance += _SMOOTHING * (error * error - group.variance)

    def top(self, count: int, now: float) -> list[GroupWorkingSet]:
        """Those with the largest working sets, of the ones that are at work."""
        while self._groups and next(iter(self._groups.values())).seen_at < now - ACTIVE_SECONDS:
            self._groups.popitem(last=False)
        figures = [group.figures(now) for group in self._groups.values()]
        return sorted(figures, key=lambda group: (-group.context_tokens, group.id))[:count]

    def clear(self) -> None:
        """The engine started anew."""
        self._groups.clear()
