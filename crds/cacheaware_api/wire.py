"""Messages between operator, sidecar and engine: frozen dataclasses with one codec.

`to_json` and `from_json` map a message to plain JSON values and back. Unknown fields are ignored, so that a newer peer
may say more. A field typed `X | None` may be absent (it then means "no limit" or "not known"); any other missing or
ill-typed field raises `WireError` with its path. Field names on the wire are those of the dataclass, or camelCase where
the message carries spec fields (`CAMEL`). Standard library only: the engine imports this module.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar, Union

T = TypeVar("T")


class WireError(ValueError):
    """A message that cannot be read; `path` names the field."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'message'}: {problem}")
        self.path = path
        self.problem = problem


# -- codec ------------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Plain JSON values for a message; absent optional fields are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _wire_names(type(value))
        return {
            names[field.name]: to_json(item)
            for field in dataclasses.fields(value)
            if (item := getattr(value, field.name)) is not None
        }
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(cls: type[T], data: Any, path: str = "") -> T:
    """Read a message of type `cls`; raises `WireError` naming the field that does not fit."""
    if not isinstance(data, Mapping):
        raise WireError(path, f"expected an object, got {_kind(data)}")
    hints, names = _hints(cls), _wire_names(cls)  # type: ignore[arg-type]  # mypy: type[T] is not Hashable
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every message is a dataclass
        name = names[field.name]
        where = f"{path}.{name}" if path else name
        hint = hints[field.name]
        if data.get(name) is not None:
            values[field.name] = _read(hint, data[name], where)
        elif _optional(hint):
            values[field.name] = None
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
        else:
            raise WireError(where, "is missing")
    try:
        return cls(**values)
    except WireError as error:
        raise WireError(f"{path}.{error.path}" if path else error.path, error.problem) from None


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _read(inner, value, path)
    if origin is Literal:
        if value not in arguments:
            raise WireError(path, f"expected one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise WireError(path, f"expected a list, got {_kind(value)}")
        return tuple(_read(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise WireError(path, f"expected an object, got {_kind(value)}")
        return {str(key): _read(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, path)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise WireError(path, f"expected one of {', '.join(hint)}, got {value!r}") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise WireError(path, f"expected {_NAMES.get(hint, hint.__name__)}, got {_kind(value)}")
    return value


_NAMES: Mapping[type, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, (str, int, float, bool)) and len(repr(value)) < 40 else type(value).__name__


def _optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType) and type(None) in typing.get_args(hint)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _wire_names(cls: type) -> dict[str, str]:
    camel = getattr(cls, "CAMEL", False)
    rename = (lambda name: re.sub(r"_([a-z])", lambda match: match[1].upper(), name)) if camel else str
    return {field.name: rename(field.name) for field in dataclasses.fields(cls)}


def _at_least(value: float | None, least: float, path: str) -> None:
    if value is not None and not value >= least:
        raise WireError(path, f"must be at least {least:g}, got {value}")


def _check_digest(text: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise WireError("sha256", "must be the 64 hexadecimal digits of a SHA-256")


# -- what several messages share --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Revision:
    """Which wanted state this is: `number` grows within one pool object; another object has another uid."""

    pool_uid: str
    number: int

    def __post_init__(self) -> None:
        _at_least(self.number, 0, "number")


# -- engine: PUT /kv/quotas, PUT /kv/public, GET /kv/ledger, GET /kv/steps ---------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class TierQuota:
    """One tier's share of an engine, in blocks. `lending` is how much of `nominal` others may be admitted into."""

    name: str
    priority: int
    weight: int
    nominal: int
    effective: int
    limit: int
    lending: int
    retention_s: float | None = None  # absent: protected as long as it is within `effective`
    time_per_output_token_s: float | None = None  # promised by its SLA: how long a step may hold up those that decode

    def __post_init__(self) -> None:
        for field in ("nominal", "effective", "limit", "lending"):
            _at_least(getattr(self, field), 0, field)
        _at_least(self.weight, 1, "weight")
        _at_least(self.retention_s, 0, "retention_s")
        _at_least(self.time_per_output_token_s, 0, "time_per_output_token_s")
        if self.lending > self.nominal:
            raise WireError("lending", f"must not exceed nominal ({self.nominal}), got {self.lending}")
        if self.limit < self.nominal:
            raise WireError("limit", f"must not be below nominal ({self.nominal}), got {self.limit}")


@dataclasses.dataclass(frozen=True, slots=True)
class Quotas:
    """Wanted quotas of one engine (`PUT /kv/quotas`). A tier left out has N = Q = limit = 0 until it is drained."""

    revision: Revision
    tiers: tuple[TierQuota, ...]
    public: int  # blocks of the public share

    def __post_init__(self) -> None:
        _at_least(self.public, 0, "public")
        names = [tier.name for tier in self.tiers]
        if len(names) != len(set(names)):
            raise WireError("tiers", "names must be unique")


@dataclasses.dataclass(frozen=True, slots=True)
class PublicPrefix:
    """A prompt start that everyone may share: either `text`, or chat `messages` to be put through the template."""

    name: str
    text: str | None = None
    messages: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise WireError("text", "exactly one of text and messages is needed")


@dataclasses.dataclass(frozen=True, slots=True)
class PublicPrefixes:
    prefixes: tuple[PublicPrefix, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixLedger:
    blocks: int
    resident: int


@dataclasses.dataclass(frozen=True, slots=True)
class PublicLedger:
    share: int
    held: int
    cached: int
    prefixes: Mapping[str, PrefixLedger]


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    nominal: int
    running: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierLedger:
    """One tier's account. Blocks, except the `_total` counters: blocks, blocks, requests, tokens, tokens."""

    nominal: int
    effective: int
    limit: int
    held: int
    cached: int
    lapsed: int
    borrowed: int
    lent: int
    slots: Slots
    evicted_total: int
    reclaimed_total: int
    preempted_total: int
    hit_tokens_total: int
    query_tokens_total: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """`GET /kv/ledger`: Σ (held + cached) over tiers and public + free = capacity, at every sequence number."""

    sequence: int
    revision: Revision | None
    block_size: int
    bytes_per_token: int | None  # absent: the engine does not say
    capacity: int
    free: int
    public: PublicLedger
    tiers: Mapping[str, TierLedger]
    running: int
    waiting: int
    max_sequences: int | None = None  # sequences that can run at once; absent: the engine does not say


@dataclasses.dataclass(frozen=True, slots=True)
class GroupHint:
    """Blocks that a group is expected to need beyond those it holds, and for how long that is to be believed."""

    expected_blocks: int
    ttl_s: float

    def __post_init__(self) -> None:
        _at_least(self.expected_blocks, 0, "expected_blocks")
        _at_least(self.ttl_s, 0, "ttl_s")


@dataclasses.dataclass(frozen=True, slots=True)
class Hints:
    """`PUT /kv/hints`: by the id that requests carry as `cacheaware_group`."""

    groups: Mapping[str, GroupHint]


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroup:
    size: int
    prefix_tokens: int
    cascade: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepReport:
    """`GET /kv/steps` (SSE): sums over `steps` engine steps since the last report."""

    steps: int
    tokens: int
    query_context: int  # Σ q·ctx: query tokens times the context each one attends to
    kv_bytes_read: int
    unique_kv_bytes: int
    step_seconds: float
    groups: tuple[StepGroup, ...] = ()


# -- sidecar: PUT /pool/view, GET /pool/status, GET and POST /pool/explain ---------------------------------------------


class Sharing(StrEnum):
    """Who may hit whose blocks."""

    POOL = "Pool"
    TIER = "Tier"
    TENANT = "Tenant"
    NONE = "None"


class IdentityType(StrEnum):
    OPEN = "Open"
    API_KEYS = "APIKeys"
    TRUSTED_HEADERS = "TrustedHeaders"


class Admission(StrEnum):
    QUEUE = "Queue"
    REJECT = "Reject"


class Enforcement(StrEnum):
    ENGINE = "Engine"
    ESTIMATE_ONLY = "EstimateOnly"


@dataclasses.dataclass(frozen=True, slots=True)
class ViewQuota:
    CAMEL: ClassVar[bool] = True
    nominal_percent: int = 0
    borrowing_limit_percent: int | None = None  # absent: no limit
    lending_limit_percent: int | None = None  # absent: all of nominal


@dataclasses.dataclass(frozen=True, slots=True)
class ViewSLA:
    """Promises, as the spec's duration strings; absent means nothing was promised."""

    CAMEL: ClassVar[bool] = True
    time_to_first_token: str | None = None
    time_per_output_token: str | None = None
    attainment_percent: int = 95


@dataclasses.dataclass(frozen=True, slots=True)
class ViewTier:
    """A tier as the sidecar needs it: every spec field, defaults filled in, and the effective share."""

    CAMEL: ClassVar[bool] = True
    name: str
    priority: int
    weight: int
    quota: ViewQuota
    sla: ViewSLA
    effective_percent: int
    batching_window: str = "0s"
    retention: str | None = None
    admission: Admission = Admission.QUEUE


@dataclasses.dataclass(frozen=True, slots=True)
class ViewIdentity:
    CAMEL: ClassVar[bool] = True
    type: IdentityType


@dataclasses.dataclass(frozen=True, slots=True)
class ViewPrefix:
    name: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    pod: str
    url: str


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What one sidecar is wanted to do (`PUT /pool/view`, and the file a pod starts from)."""

    CAMEL: ClassVar[bool] = True
    revision: Revision
    model: str
    tiers: tuple[ViewTier, ...]
    sharing: Sharing
    identity: ViewIdentity
    default_tier: str | None = None
    public_percent: int = 0
    public_prefixes: tuple[ViewPrefix, ...] = ()
    peers: tuple[Peer, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """A condition as Kubernetes spells it. `status` is True, False or Unknown."""

    CAMEL: ClassVar[bool] = True
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TierFigures:
    """What one sidecar saw of a tier in the last five minutes; seconds and percent, absent where nothing was seen."""

    CAMEL: ClassVar[bool] = True
    queue: int
    requests: int
    hit_percent: float | None = None
    time_to_first_token_p50: float | None = None
    time_to_first_token_p95: float | None = None
    attainment_percent: float | None = None
    longest_prompt_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """Prompts of a tier that share most of their text and little of the cache, because they differ near their start."""

    CAMEL: ClassVar[bool] = True
    tier: str
    requests: int  # seen so
    diverges_at_token: int  # on average: what comes after it is computed each time
    would_save_tokens: int  # of each such prompt, if what differs came last


@dataclasses.dataclass(frozen=True, slots=True)
class GroupFigures:
    """Requests that share a prefix, and their working set as seen in the last minute."""

    CAMEL: ClassVar[bool] = True
    id: str  # what requests carry as `cacheaware_group`
    tier: str  # of its last request
    requests_per_minute: float
    conversations: int
    prefix_tokens: int
    context_tokens: int  # the prefix once, and what its conversations have beyond it
    growth_tokens: int  # what a request adds: mean and one standard deviation
    hinted_blocks: int | None = None  # as the engine was told; absent: it was told nothing


@dataclasses.dataclass(frozen=True, slots=True)
class PoolStatus:
    """`GET /pool/status`: what one sidecar applies and sees."""

    CAMEL: ClassVar[bool] = True
    applied: Revision | None  # acknowledged by the engine
    capacity: int | None  # blocks; absent until the engine answered
    ledger: Ledger | None
    tiers: Mapping[str, TierFigures]
    enforcement: Enforcement
    conditions: tuple[Condition, ...]
    key_algorithm: str
    advice: tuple[Advice, ...] = ()
    groups: tuple[GroupFigures, ...] = ()  # those with the largest working sets


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One line of `GET /pool/explain`: how a request was treated and why."""

    CAMEL: ClassVar[bool] = True
    request_id: str
    time: float  # seconds since the epoch, when the request arrived
    tier: str
    queue_ms: float
    hold_ms: float
    flush_reason: str
    outcome: str
    group: str | None = None
    prompt_tokens: int | None = None
    predicted_hit_tokens: int | None = None
    hit_tokens: int | None = None
    time_to_first_token_ms: float | None = None


class Course(StrEnum):
    """What would happen first to a request that came now."""

    GO = "go"  # to the engine, at once
    HOLD = "hold"  # held for company, then it goes
    WAIT = "wait"  # for its turn, or for room
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """The answer of `POST /pool/explain` `{path, headers?, body}`: what would happen to this request now, and why.

    What is absent is not known, or was not reached because the request would be refused before.
    """

    CAMEL: ClassVar[bool] = True
    course: Course
    reason: str  # a flush reason, what it waits for, or the reason of a refusal
    status: int | None = None  # of a refusal; the rest of what a client would be told
    message: str | None = None
    param: str | None = None
    key: str | None = None  # the name of the caller's key, or of its gateway's secret
    tenant: str | None = None
    tier: str | None = None
    tier_by: str | None = None  # service_tier | gateway | key | defaultTier
    scope: str | None = None  # who may share its blocks: pool | tier | tenant | request (nobody)
    prompt_tokens: int | None = None  # predicted, like all that follow
    prompt_blocks: int | None = None
    cached_tokens: int | None = None
    waiting_before: int | None = None  # requests of its tier
    hold_at_most_ms: float | None = None
    time_to_first_token_ms: float | None = None
    promised_ms: float | None = None
    in_time: bool | None = None
    fields: tuple[str, ...] = ()  # of the pool's spec, that decide this: `tiers[gold].batchingWindow`
    note: str | None = None


# -- secrets: <pool>-internal, api-keys.json ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """Who holds a key. Only the SHA-256 (hex) of the key is ever stored."""

    CAMEL: ClassVar[bool] = True
    name: str  # the entry's name in the user's Secret, for messages
    sha256: str
    tenant: str
    tiers: tuple[str, ...]
    default_tier: str | None = None

    def __post_init__(self) -> None:
        _check_digest(self.sha256)


@dataclasses.dataclass(frozen=True, slots=True)
class GatewaySecret:
    """By what a gateway proves that its headers may be believed."""

    CAMEL: ClassVar[bool] = True
    name: str  # the entry's name in the user's Secret, for messages
    sha256: str

    def __post_init__(self) -> None:
        _check_digest(self.sha256)


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKeys:
    """Who is known: callers by their own keys, or gateways that tell who is calling."""

    keys: tuple[ApiKey, ...]
    gateways: tuple[GatewaySecret, ...] = ()
