"""The status of a pool: everything that was decided or seen, and nothing that was asked for.

Figures cover the last five minutes and are rounded, so that watchers are not flooded.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from cacheaware_api.conditions import ConditionStatus
from cacheaware_api.schema import Count, Duration, Percent, StatusModel, StrictStr

TierName: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=63)]
Time: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=32)]  # RFC 3339


class Condition(StatusModel):
    """One condition, as Kubernetes spells it."""

    type: Annotated[StrictStr, Field(min_length=1, max_length=63)] = Field(description="What the condition is about.")
    status: ConditionStatus = Field(description="True, False, or Unknown until known.")
    reason: Annotated[StrictStr, Field(min_length=1, max_length=63)] = Field(description="Why, as one constant word.")
    message: Annotated[StrictStr, Field(max_length=4096)] = Field(default="", description="What to do next, in words.")
    observed_generation: Count | None = Field(default=None, description="Generation of the object that it speaks of.")
    last_transition_time: Time | None = Field(default=None, description="When its status last changed.")


class Capacity(StatusModel):
    """KV cache of one replica; replicas may differ."""

    min_blocks: Count = Field(description="Usable blocks of the replica that has fewest.")
    max_blocks: Count = Field(description="Usable blocks of the replica that has most.")
    block_size: Count = Field(description="Tokens that one block holds.")
    bytes_per_token: Count | None = Field(
        default=None, description="Bytes that the keys and values of one token take. Absent: the engine does not say."
    )


class TierStatus(StatusModel):
    """One tier: its quota, what it uses over all ready replicas, and what its users saw."""

    name: TierName = Field(description="Name of the tier.")
    nominal_percent: Percent = Field(description="Share of the cache that it may always hold, from the spec.")
    effective_percent: Percent = Field(description="Share of the cache that it is given now.")
    held_blocks: Count | None = Field(default=None, description="Blocks that running requests use.")
    cached_blocks: Count | None = Field(default=None, description="Idle blocks kept for the next hit.")
    borrowed_blocks: Count | None = Field(default=None, description="Blocks used beyond nominal.")
    lent_blocks: Count | None = Field(default=None, description="Blocks of its nominal that others use.")
    hit_percent: Percent | None = Field(default=None, description="Prompt tokens found in the cache.")
    time_to_first_token_p95: Duration | None = Field(
        default=None, description="Time within which 95 of 100 requests had their first token."
    )
    attainment_percent: Percent | None = Field(default=None, description="Requests that met the tier's SLA.")


class QuotaMove(StatusModel):
    """One share that rebalancing moved."""

    from_: TierName = Field(description="Tier that gave.")
    to: TierName = Field(description="Tier that got.")
    percent: Percent = Field(description="Share of the cache that moved.")
    reason: Annotated[StrictStr, Field(min_length=1, max_length=256)] = Field(description="Why it moved.")
    gain_percent: Percent | None = Field(default=None, description="Predicted gain in hits.")


class LastRebalance(StatusModel):
    """The last time that shares moved."""

    time: Time = Field(description="When.")
    moves: Annotated[tuple[QuotaMove, ...], Field(max_length=16)] = Field(
        default=(), description="What moved, and why."
    )


class CacheAwarePoolStatus(StatusModel):
    """What was decided and seen."""

    observed_generation: Count | None = Field(default=None, description="Generation of the object last acted on.")
    replicas: Count | None = Field(default=None, description="Replicas that there are.")
    ready_replicas: Count | None = Field(default=None, description="Replicas that take requests.")
    selector: Annotated[StrictStr, Field(max_length=1024)] | None = Field(
        default=None, description="Label selector of the pods, for autoscalers."
    )
    capacity: Capacity | None = Field(default=None, description="KV cache of one replica.")
    revision: Count | None = Field(default=None, description="Number of the view that the replicas are given.")
    tier_count: Count | None = Field(default=None, description="How many tiers the pool has.")
    hit_percent: Percent | None = Field(default=None, description="Prompt tokens found in the cache, over all tiers.")
    tiers: Annotated[tuple[TierStatus, ...], Field(max_length=16)] = Field(
        default=(), description="Every tier, by name."
    )
    last_rebalance: LastRebalance | None = Field(default=None, description="When shares last moved, and why.")
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = Field(
        default=(), description="Whether the pool does what it should, and what to do where it does not."
    )
