"""`CacheAwarePool`, version v1alpha1: what users write, field by field. The status is in `status`, the pod's parts are
in `podtemplate`, what absent fields mean is in `defaults`, and rules across fields are in `rules`.

A model holds what was written, with the effective value where a field has a default; `model_dump(exclude_unset=True)`
gives back what was written and no more. Parse objects with `parse_pool`: it finds every problem at once and says each
in one plain line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from cacheaware_api import defaults, errors, quantities, rules
from cacheaware_api.defaults import KVCacheDtype as KVCacheDtype
from cacheaware_api.defaults import RebalancingMode as RebalancingMode
from cacheaware_api.metadata import ObjectMeta
from cacheaware_api.podtemplate import EnvVar, KeyReference, LocalReference, PodTemplate, Resources
from cacheaware_api.rules import EngineType as EngineType
from cacheaware_api.schema import (
    DNS_LABEL,
    IMAGE,
    MODEL_NAME,
    MODEL_SOURCE,
    TEXT,
    DnsLabel,
    Duration,
    Line,
    Memory,
    Percent,
    SpecModel,
    StrictInt,
    StrictStr,
)
from cacheaware_api.status import CacheAwarePoolStatus as CacheAwarePoolStatus
from cacheaware_api.wire import Admission, IdentityType, Sharing

GROUP = "cacheaware.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "CacheAwarePool"
PLURAL = "cacheawarepools"
SINGULAR = "cacheawarepool"
SHORT_NAMES = ("cap",)


class Model(SpecModel):
    """The model that the pool serves."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=MODEL_NAME)] = Field(
        description="The name that clients send."
    )
    source: Annotated[StrictStr, Field(min_length=1, max_length=512, pattern=MODEL_SOURCE)] = Field(
        description="Where its files come from: hf://org/repo[@revision], file:///path, pvc://claim/path "
        "or pypi://package[@version]."
    )
    max_model_len: Annotated[StrictInt, Field(ge=1, le=16_777_216)] | None = Field(
        default=None,
        description="Most tokens of a request, prompt and answer together. Absent: what the model was made for.",
    )


class KVCache(SpecModel):
    """The engine's KV cache, which the tiers share."""

    memory: Memory | None = Field(
        default=None,
        description="Its size, such as 1Gi. Absent: the engine decides (vLLM takes what its GPU has left).",
    )
    block_size: Annotated[StrictInt, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="Tokens of one block. Absent: the engine decides (Torch: 16; vLLM: what suits its device), and "
        "status.capacity.blockSize says how.",
    )
    dtype: KVCacheDtype = Field(
        default=defaults.KV_CACHE_DTYPE, description="How keys and values are stored. Absent: Auto, the compute type."
    )

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else quantities.bytes_of(self.memory)


class Engine(SpecModel):
    """The engine that runs the model."""

    type: EngineType = Field(description="Torch or VLLM. It cannot change.")
    image: Annotated[StrictStr, Field(min_length=1, max_length=512, pattern=IMAGE)] | None = Field(
        default=None, description="Image of the engine. Absent: the release's own image for the type."
    )
    args: Annotated[tuple[Line, ...], Field(max_length=64)] = Field(
        default=(), description="Flags added to the engine's command line. Those that the pool sets itself are refused."
    )
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = Field(
        default=(), description="Environment variables of the engine."
    )
    resources: Resources = Field(default_factory=Resources, description="What the engine's container asks of its node.")
    kv_cache: KVCache = Field(default_factory=KVCache, description="The KV cache that the tiers share.")


class Quota(SpecModel):
    """A tier's share of the KV cache, in percent of each replica's blocks."""

    nominal_percent: Percent = Field(
        default=defaults.NOMINAL_PERCENT, description="What the tier may always hold. Absent: 0."
    )
    borrowing_limit_percent: Percent | None = Field(
        default=None,
        description="What it may use beyond nominal while others leave it idle. Absent: no limit; 0: none.",
    )
    lending_limit_percent: Percent | None = Field(
        default=None,
        description="How much of nominal others may use while the tier leaves it idle. Absent: all; 0: none.",
    )


class SLA(SpecModel):
    """What the tier was promised."""

    time_to_first_token: Duration | None = Field(
        default=None, description="Time until the first token, such as 800ms. Absent: nothing was promised."
    )
    time_per_output_token: Duration | None = Field(
        default=None, description="Mean time between tokens, such as 100ms. Absent: nothing was promised."
    )
    attainment_percent: Annotated[StrictInt, Field(ge=1, le=100)] = Field(
        default=defaults.ATTAINMENT_PERCENT, description="Requests that must meet it for the SLA to be met. Absent: 95."
    )


class Tier(SpecModel):
    """A class of users: what it is guaranteed, what it was promised, how it is treated."""

    name: DnsLabel = Field(description="Name of the tier, which clients send as service_tier.")
    priority: Annotated[StrictInt, Field(ge=-1_000_000, le=1_000_000)] = Field(
        default=defaults.PRIORITY, description="A higher number is more important. Absent: 0."
    )
    weight: Annotated[StrictInt, Field(ge=1, le=1000)] = Field(
        default=defaults.WEIGHT,
        description="Share of engine time when tiers compete, and worth of the tier's hits in rebalancing. Absent: 1.",
    )
    quota: Quota = Field(
        default_factory=Quota, description="The tier's share of the KV cache, in percent of each replica's blocks."
    )
    sla: SLA = Field(default_factory=SLA, description="What the tier was promised.")
    batching_window: Duration = Field(
        default=defaults.BATCHING_WINDOW,
        description="Most that a request may be held for company with the same prompt start; at most half of "
        'sla.timeToFirstToken. Absent, or "0s": never held.',
    )
    retention: Duration | None = Field(
        default=None,
        description="How long idle blocks of the tier stay protected after their last use. Absent: as long as they are "
        "within its quota.",
    )
    admission: Admission = Field(
        default=defaults.ADMISSION,
        description="When the SLA cannot be met: Queue serves late and counts it, Reject answers 429. Absent: Queue.",
    )


class PublicPrefix(SpecModel):
    """A prompt start that everyone may share: it is loaded ahead and charged to the public share."""

    name: DnsLabel = Field(description="Name of the prefix.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="Entry of a ConfigMap with the text.")
    text: Annotated[StrictStr, Field(min_length=1, max_length=32_768, pattern=TEXT)] | None = Field(
        default=None, description="The text itself, instead of configMapKeyRef."
    )


class SecretSource(SpecModel):
    secret_ref: LocalReference = Field(description="A Secret of the pool's namespace.")


class Identity(SpecModel):
    """How callers are known."""

    type: IdentityType = Field(
        description="APIKeys: by the key they send. TrustedHeaders: by headers of a gateway that proves itself. "
        "Open: not at all; everyone may use every tier."
    )
    api_keys: SecretSource | None = Field(
        default=None, description="Keys and what each may use. Required for type APIKeys, and only there."
    )
    trusted_headers: SecretSource | None = Field(
        default=None,
        description="The secret that the gateway shares with the pool. Required for type TrustedHeaders, and only "
        "there.",
    )


class Rebalancing(SpecModel):
    """Moving effective quota to the tiers that gain most hits by it. The section's absence means Off."""

    mode: RebalancingMode = Field(
        default=defaults.REBALANCING_MODE,
        description='Auto moves quota, DryRun only tells in the status, "Off" does nothing (in quotes: YAML reads Off '
        "as false). Absent: Auto.",
    )
    interval: Duration = Field(
        default=defaults.REBALANCING_INTERVAL, description="Time between two looks, at least 1s. Absent: 30s."
    )
    max_step_percent: Annotated[StrictInt, Field(ge=1, le=100)] = Field(
        default=defaults.REBALANCING_MAX_STEP_PERCENT, description="Most that moves at once. Absent: 10."
    )
    min_gain_percent: Percent = Field(
        default=defaults.REBALANCING_MIN_GAIN_PERCENT, description="Least gain that is worth a move. Absent: 1."
    )


class CacheAwarePoolSpec(SpecModel):
    """A model, the engine that runs it, and the tiers that share its KV cache."""

    model: Model = Field(description="The model that the pool serves.")
    engine: Engine = Field(description="The engine that runs the model.")
    replicas: Annotated[StrictInt, Field(ge=0, le=10_000)] = Field(
        default=defaults.REPLICAS,
        description="Engines that run. Leave it out where an autoscaler sets it. Absent: 1.",
    )
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1, max_length=16)] = Field(
        description="Classes of users, by name. Their order means nothing."
    )
    default_tier: DnsLabel | None = Field(
        default=None, description="Tier of a request that names none. Absent: such a request is refused."
    )
    sharing: Sharing | None = Field(
        default=None,
        description="Who may hit whose blocks: Pool, Tier, Tenant or None. Absent: Tenant, or Tier with identity.type "
        "Open.",
    )
    public_prefixes: Annotated[tuple[PublicPrefix, ...], Field(max_length=32)] = Field(
        default=(), description="Prompt starts that everyone may share. They need publicPercent."
    )
    public_percent: Percent = Field(
        default=defaults.PUBLIC_PERCENT, description="Share of the KV cache for publicPrefixes. Absent: 0."
    )
    identity: Identity = Field(description="How callers are known.")
    rebalancing: Rebalancing | None = Field(
        default=None, description="Moving effective quota to where it earns most hits. Absent: off."
    )
    pod_template: PodTemplate = Field(
        default_factory=PodTemplate, description="What the pods get besides what the operator builds."
    )

    @property
    def effective_sharing(self) -> Sharing:
        return self.sharing or defaults.sharing(self.identity.type)

    @property
    def effective_rebalancing(self) -> Rebalancing:
        return self.rebalancing or Rebalancing(mode=defaults.REBALANCING_MODE_WITHOUT_SECTION)

    def tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    @model_validator(mode="wrap")
    @classmethod
    def _rules(cls, data: Any, handler: ModelWrapValidatorHandler[CacheAwarePoolSpec]) -> CacheAwarePoolSpec:
        """Check the rules whether or not every field is right, so that one look finds every problem."""
        try:
            spec = handler(data)
        except ValidationError as error:
            broken = rules.broken(data) if isinstance(data, Mapping) else []
            raise errors.joined(cls.__name__, error, broken) from None
        if broken := rules.broken(spec.model_dump(by_alias=True, exclude_unset=True, mode="json")):
            raise errors.joined(cls.__name__, None, broken)
        return spec


class PoolMeta(ObjectMeta):
    # it becomes part of other names, and that of a Service: 63 letters with "-internal" added
    name: Annotated[StrictStr, Field(min_length=1, max_length=54, pattern=DNS_LABEL)]


class CacheAwarePool(SpecModel):
    """One model served to several classes of users: how much KV cache each is guaranteed, and what it was promised."""

    api_version: Literal["cacheaware.dev/v1alpha1"]
    kind: Literal["CacheAwarePool"]
    metadata: PoolMeta
    spec: CacheAwarePoolSpec = Field(
        description="What is wanted: a model, the engine that runs it, and the tiers that share its KV cache."
    )
    status: CacheAwarePoolStatus | None = Field(
        default=None, description="What was decided and seen; the operator writes it."
    )


def parse_pool(data: Any) -> CacheAwarePool:
    """Read a pool object; raises `ObjectInvalid` with every problem in it."""
    try:
        return CacheAwarePool.model_validate(data)
    except ValidationError as error:
        raise errors.ObjectInvalid(errors.problems(error, CacheAwarePool)) from None


def parse_spec(data: Any) -> CacheAwarePoolSpec:
    """Read a pool's spec alone; paths in the problems begin with `spec`, as they do for the whole object."""
    try:
        return CacheAwarePoolSpec.model_validate(data)
    except ValidationError as error:
        raise errors.ObjectInvalid(errors.problems(error, CacheAwarePoolSpec, prefix=("spec",))) from None
