"""Rules across the fields of a pool's spec: the ones that no single field's type can hold.

They run on the object as written, also where some of its fields are wrong, and pass over what they cannot read: the
field's own error says that. The messages are constants, because the API server answers with the same ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from cacheaware_api import defaults, durations, engine_flags
from cacheaware_api.engine_flags import EngineType as EngineType
from cacheaware_api.schema import DNS_LABEL
from cacheaware_api.wire import IdentityType, Sharing

Path: TypeAlias = tuple[str | int, ...]

RESERVED_TIER_NAMES = ("auto", "default")
LEAST_REBALANCING_INTERVAL = "1s"

SHARES_WITHIN_100 = "nominalPercent of the tiers plus publicPercent must not exceed 100"
LENDING_WITHIN_NOMINAL = "must not exceed nominalPercent"
PREFIXES_NEED_SHARE = "publicPrefixes need publicPercent above 0"
DEFAULT_TIER_EXISTS = "must name one of the tiers"
TIER_NAME_FREE = "auto and default are reserved: clients send them for no tier in particular"
NAMES_UNIQUE = "must be unique in its list"
WINDOW_WITHIN_HALF_SLA = "must be at most half of sla.timeToFirstToken"
OPEN_KNOWS_NO_TENANTS = "must not be Tenant with identity.type Open, which knows no tenants"
API_KEYS_IFF_TYPE = "apiKeys is required for type APIKeys, and only there"
TRUSTED_HEADERS_IFF_TYPE = "trustedHeaders is required for type TrustedHeaders, and only there"
PREFIX_ONE_SOURCE = "exactly one of configMapKeyRef and text is needed"
ENV_ONE_SOURCE = "value and valueFrom exclude each other"
ENV_SOURCE_ONE = "exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed"
FLAG_OWNED = "is set by the pool itself"
FLAG_FIRST = "must begin with a flag"
INTERVAL_LEAST = f"must be at least {LEAST_REBALANCING_INTERVAL}"
ENGINE_TYPE_IMMUTABLE = "engine.type cannot change"


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold: where, what, and what to do about it."""

    path: Path
    message: str
    fix: str


def broken(spec: Mapping[str, Any]) -> list[Broken]:
    """Every rule that `spec` breaks, in the order of its fields."""
    return [found for rule in _RULES for found in rule(spec)]


def broken_by_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Broken]:
    """Rules about a change from one spec to another."""
    before, after = _at(old, "engine", "type"), _at(new, "engine", "type")
    if before is None or after is None or before == after:
        return []
    fix = f"it was {before}: make a second pool with {after} and move the traffic"
    return [Broken(("engine", "type"), ENGINE_TYPE_IMMUTABLE, fix)]


# -- engine -----------------------------------------------------------------------------------------------------------


def _args(spec: Mapping[str, Any]) -> Iterator[Broken]:
    arguments = _at(spec, "engine", "args")
    kind = _at(spec, "engine", "type")
    if not isinstance(arguments, (list, tuple)) or kind not in tuple(EngineType):
        return
    for index, argument in enumerate(arguments):
        if not isinstance(argument, str):
            continue
        path = ("engine", "args", index)
        if argument == "--" or (index == 0 and not argument.startswith("-")):
            yield Broken(path, FLAG_FIRST, "give each flag as --flag=value, or as --flag and then its value")
        elif flag := engine_flags.owned_flag(EngineType(kind), argument):
            field = engine_flags.OWNED[EngineType(kind)][flag]
            yield Broken(path, f"{flag} {FLAG_OWNED}", f"set {field} instead" if field else "leave it out")


def _env(spec: Mapping[str, Any]) -> Iterator[Broken]:
    yield from _unique(_at(spec, "engine", "env"), ("engine", "env"))
    for index, variable in _items(_at(spec, "engine", "env")):
        if "value" in variable and "valueFrom" in variable:
            yield Broken(("engine", "env", index), ENV_ONE_SOURCE, "remove one of them")
        source = variable.get("valueFrom")
        if isinstance(source, Mapping) and len(source.keys() & {"secretKeyRef", "configMapKeyRef", "fieldRef"}) != 1:
            yield Broken(("engine", "env", index, "valueFrom"), ENV_SOURCE_ONE, "keep one of them")


# -- tiers ------------------------------------------------------------------------------------------------------------


def _tier_names(spec: Mapping[str, Any]) -> Iterator[Broken]:
    yield from _unique(spec.get("tiers"), ("tiers",))
    for index, tier in _items(spec.get("tiers")):
        if tier.get("name") in RESERVED_TIER_NAMES:
            yield Broken(("tiers", index, "name"), TIER_NAME_FREE, "choose another name")


def _shares(spec: Mapping[str, Any]) -> Iterator[Broken]:
    nominal = [_percent(_at(tier, "quota", "nominalPercent")) for _, tier in _items(spec.get("tiers"))]
    public = _percent(spec.get("publicPercent"))
    total = sum(nominal) + public
    if total > 100:
        sums = f"{' + '.join(map(str, nominal))} + {public} public" if public else " + ".join(map(str, nominal))
        yield Broken(("tiers",), SHARES_WITHIN_100, f"{sums} = {total}: lower them by {total - 100} in all")


def _lending(spec: Mapping[str, Any]) -> Iterator[Broken]:
    for index, tier in _items(spec.get("tiers")):
        lending = _at(tier, "quota", "lendingLimitPercent")
        nominal = defaults.NOMINAL_PERCENT if (written := _at(tier, "quota", "nominalPercent")) is None else written
        if _is_percent(lending) and _is_percent(nominal) and lending > nominal:
            path = ("tiers", index, "quota", "lendingLimitPercent")
            yield Broken(path, f"{LENDING_WITHIN_NOMINAL} ({nominal})", f"lower it to at most {nominal}")


def _windows(spec: Mapping[str, Any]) -> Iterator[Broken]:
    for index, tier in _items(spec.get("tiers")):
        window = _milliseconds(tier.get("batchingWindow"))
        promised = _milliseconds(_at(tier, "sla", "timeToFirstToken"))
        if window is not None and promised is not None and 2 * window > promised:
            most = durations.duration(promised // 2 / 1000)
            path = ("tiers", index, "batchingWindow")
            message = f"{WINDOW_WITHIN_HALF_SLA} ({tier['sla']['timeToFirstToken']})"
            yield Broken(path, message, f"lower it to at most {most}")


def _default_tier(spec: Mapping[str, Any]) -> Iterator[Broken]:
    default = spec.get("defaultTier")
    names = [tier["name"] for _, tier in _items(spec.get("tiers")) if isinstance(tier.get("name"), str)]
    if isinstance(default, str) and names and default not in names:
        good = [name for name in names if len(name) <= 63 and re.fullmatch(DNS_LABEL, name)]
        yield Broken(("defaultTier",), DEFAULT_TIER_EXISTS, f"choose one of {', '.join(good)}" if good else "name one")


# -- sharing, prefixes, identity, rebalancing -------------------------------------------------------------------------


def _sharing(spec: Mapping[str, Any]) -> Iterator[Broken]:
    if spec.get("sharing") == Sharing.TENANT and _at(spec, "identity", "type") == IdentityType.OPEN:
        yield Broken(("sharing",), OPEN_KNOWS_NO_TENANTS, "choose Tier, Pool or None, or another identity.type")


def _prefixes(spec: Mapping[str, Any]) -> Iterator[Broken]:
    prefixes = spec.get("publicPrefixes")
    yield from _unique(prefixes, ("publicPrefixes",))
    public = spec.get("publicPercent", defaults.PUBLIC_PERCENT)
    if isinstance(prefixes, (list, tuple)) and prefixes and _is_percent(public) and public == 0:
        yield Broken(("publicPrefixes",), PREFIXES_NEED_SHARE, "set spec.publicPercent, or remove the prefixes")
    for index, prefix in _items(prefixes):
        if ("configMapKeyRef" in prefix) == ("text" in prefix):
            fix = "remove one of them" if "text" in prefix else "add one of them"
            yield Broken(("publicPrefixes", index), PREFIX_ONE_SOURCE, fix)


def _identity(spec: Mapping[str, Any]) -> Iterator[Broken]:
    identity = spec.get("identity")
    kind = _at(spec, "identity", "type")
    if not isinstance(identity, Mapping) or kind not in tuple(IdentityType):
        return
    for field, owner, message in (
        ("apiKeys", IdentityType.API_KEYS, API_KEYS_IFF_TYPE),
        ("trustedHeaders", IdentityType.TRUSTED_HEADERS, TRUSTED_HEADERS_IFF_TYPE),
    ):
        if kind == owner and field not in identity:
            yield Broken(("identity", field), message, f"add {field}: {{secretRef: {{name: …}}}}")
        elif kind != owner and field in identity:
            yield Broken(("identity", field), message, f"remove it, or set type: {owner}")


def _interval(spec: Mapping[str, Any]) -> Iterator[Broken]:
    interval = _milliseconds(_at(spec, "rebalancing", "interval"))
    if interval is not None and interval < durations.milliseconds(LEAST_REBALANCING_INTERVAL):
        yield Broken(("rebalancing", "interval"), INTERVAL_LEAST, "raise it; 30s is a good start")


_RULES: tuple[Callable[[Mapping[str, Any]], Iterable[Broken]], ...] = (
    _args,
    _env,
    _tier_names,
    _shares,
    _lending,
    _windows,
    _default_tier,
    _sharing,
    _prefixes,
    _identity,
    _interval,
)


# -- reading what may be wrong ----------------------------------------------------------------------------------------


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if isinstance(value, (list, tuple)):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, Mapping))


def _unique(value: Any, path: Path) -> Iterator[Broken]:
    first: dict[str, int] = {}
    for index, item in _items(value):
        name = item.get("name")
        if isinstance(name, str) and first.setdefault(name, index) != index:
            where = f"{path[-1]}[{first[name]}] has the same"
            yield Broken((*path, index, "name"), f"{NAMES_UNIQUE}: {where}", "choose another name")


def _is_percent(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100


def _percent(value: Any) -> int:
    """A percentage for sums; what is absent or wrong counts as 0, because its own error is told elsewhere."""
    return value if _is_percent(value) else 0


def _milliseconds(value: Any) -> int | None:
    try:
        return durations.milliseconds(value) if isinstance(value, str) else None
    except durations.DurationError:
        return None
