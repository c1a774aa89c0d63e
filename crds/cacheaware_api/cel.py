"""The rules of `rules` as CEL, which the API server evaluates: the same verdicts, the same places, the same words.

CEL meets an object only if every field has the type that the schema says; its pattern or length may still be wrong, and
then, as in `rules`, the field's own error is enough. Where a message is computed, the constant one stands in should
computing it fail. The server estimates what each rule may cost from the bounds of what it walks, and refuses a schema
that may cost too much: so messages are put together by `format`, because it cannot know how long `string()` or `join()`
of something will be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from cacheaware_api import defaults, durations, engine_flags, quantities, rules
from cacheaware_api.engine_flags import EngineType
from cacheaware_api.schema import EXPECTED
from cacheaware_api.wire import IdentityType, Sharing

Place: TypeAlias = tuple[str, ...]
"""Where a rule is evaluated (as `self`): property names from the object down, `[]` for the items of a list."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One validation: `rule` must be true."""

    rule: str
    message: str
    message_expression: str | None = None  # the same with figures of the object in it
    field_path: str | None = None  # field below `self` that the message is about

    def to_json(self) -> dict[str, str]:
        written = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.message_expression,
            "fieldPath": self.field_path,
        }
        return {field: text for field, text in written.items() if text is not None}


def keys_match(pattern: str, longest: int) -> Rule:
    """A rule for a map: JSON Schema has `patternProperties`, Kubernetes has not."""
    matches = f"size(key) <= {longest} && key.matches({_raw(pattern)})"
    message = f"every name in it must be {EXPECTED[pattern]}, of at most {longest} characters"
    return Rule(f"self.all(key, {matches})", message)


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _raw(pattern: str) -> str:
    if "'" in pattern:
        raise ValueError(f"a raw string of CEL cannot hold the quote in {pattern}")
    return f"r'{pattern}'"


def _is_duration(field: str) -> str:
    return f"{field}.matches({_raw(durations.PATTERN)})"


def _told(message: str, fix: str) -> str:
    return f"{message}: {fix}"


# -- engine -----------------------------------------------------------------------------------------------------------


def _no_owned_flag(engine: EngineType) -> Rule:
    """The flags that `engine_flags.owned_flag` finds, by the same steps; the message is about the first of them."""
    fixes = {
        flag: f"set {field} instead" if field else "leave it out" for flag, field in engine_flags.OWNED[engine].items()
    }
    owned = f"[{', '.join(map(_text, fixes))}]"
    free = f"[{', '.join(map(_text, sorted(engine_flags.FREE[engine])))}]"
    flags = "self.args.map(argument, argument.split('=')[0])"
    if engine is EngineType.VLLM:
        flags += ".map(flag, flag.startsWith('--') ? flag.split('.')[0].replace('_', '-') : flag)"
    begins = f"flag.startsWith('--') && !(flag in {free}) && {owned}.exists(name, name.startsWith(flag))"
    found = f"flag in {owned} || {begins}"
    fix_of = ", ".join(f"{_text(flag)}: {_text(fix)}" for flag, fix in fixes.items())
    return Rule(
        f"self.type != '{engine}' || !has(self.args) || !{flags}.exists(flag, {found})",
        f"args must not have flags that the pool sets itself: leave out {', '.join(fixes)}, and what is short for them",
        f"{flags}.filter(flag, {found})"
        f".map(flag, flag in {owned} ? flag : {owned}.filter(name, name.startsWith(flag))[0])"
        f".map(flag, flag + ' {rules.FLAG_OWNED}: ' + {{{fix_of}}}[flag])[0]",
        ".args",
    )


_FLAG_FIRST = _told(rules.FLAG_FIRST, "give each flag as --flag=value, or as --flag and then its value")

_SIZE = "quantity(string(self))"
_NO_SIZE = "!isQuantity(string(self))"

_ENGINE: Mapping[Place, tuple[Rule, ...]] = {
    ("spec", "engine", "kvCache", "memory"): (
        Rule(f"{_NO_SIZE} || {_SIZE}.isGreaterThan(quantity('0'))", "must be more than 0 bytes"),
        Rule(
            f"{_NO_SIZE} || {_SIZE}.compareTo(quantity('{quantities.MAX_BYTES}')) <= 0",
            f"must be at most {quantities.MAX_BYTES} bytes, the most that Kubernetes can say",
        ),
    ),
    ("spec", "engine"): tuple(map(_no_owned_flag, EngineType)),
    ("spec", "engine", "type"): (
        Rule(
            "self == oldSelf",
            _told(rules.ENGINE_TYPE_IMMUTABLE, "make a second pool with the other type and move the traffic"),
            f"'{rules.ENGINE_TYPE_IMMUTABLE}: it was ' + oldSelf + ': make a second pool with ' + self"
            " + ' and move the traffic'",
        ),
    ),
    ("spec", "engine", "args"): (Rule("size(self) == 0 || self[0].startsWith('-')", _FLAG_FIRST),),
    ("spec", "engine", "args", "[]"): (Rule("self != '--'", _FLAG_FIRST),),
    ("spec", "engine", "env", "[]"): (
        Rule("!(has(self.value) && has(self.valueFrom))", _told(rules.ENV_ONE_SOURCE, "remove one of them")),
    ),
    ("spec", "engine", "env", "[]", "valueFrom"): (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].exists_one(there, there)",
            _told(rules.ENV_SOURCE_ONE, "keep one of them"),
        ),
    ),
}

# -- tiers ------------------------------------------------------------------------------------------------------------

_NOMINALS = (
    f"self.tiers.map(tier, has(tier.quota) && has(tier.quota.nominalPercent) ? tier.quota.nominalPercent"
    f" : {defaults.NOMINAL_PERCENT})"
)
_PUBLIC = f"(has(self.publicPercent) ? self.publicPercent : {defaults.PUBLIC_PERCENT})"
_SHARES = f"({_NOMINALS}.sum() + {_PUBLIC})"
_NOMINAL = f"(has(self.quota.nominalPercent) ? self.quota.nominalPercent : {defaults.NOMINAL_PERCENT})"

_TIERS: Mapping[Place, tuple[Rule, ...]] = {
    ("spec",): (
        Rule(
            f"{_SHARES} <= 100",
            _told(rules.SHARES_WITHIN_100, "lower one of them"),
            f"'{rules.SHARES_WITHIN_100}: %s + %d public = %d: lower them by %d in all'"
            f".format([{_NOMINALS}, {_PUBLIC}, {_SHARES}, {_SHARES} - 100])",
            ".tiers",
        ),
        Rule(
            "!has(self.defaultTier) || size(self.tiers) == 0 || self.tiers.exists(tier, tier.name == self.defaultTier)",
            _told(rules.DEFAULT_TIER_EXISTS, "choose one of their names"),
            f"'{rules.DEFAULT_TIER_EXISTS}: choose one of %s'.format([self.tiers.map(tier, tier.name)])",
            ".defaultTier",
        ),
    ),
    ("spec", "tiers", "[]"): (
        Rule(
            f"!has(self.quota) || !has(self.quota.lendingLimitPercent) || self.quota.lendingLimitPercent <= {_NOMINAL}",
            _told(rules.LENDING_WITHIN_NOMINAL, "lower lendingLimitPercent, or raise nominalPercent"),
            f"'{rules.LENDING_WITHIN_NOMINAL} (%d): lower it to at most %d'.format([{_NOMINAL}, {_NOMINAL}])",
            ".quota.lendingLimitPercent",
        ),
        # durations add up, and cannot be divided
        Rule(
            "!has(self.batchingWindow) || !has(self.sla) || !has(self.sla.timeToFirstToken)"
            f" || !{_is_duration('self.batchingWindow')} || !{_is_duration('self.sla.timeToFirstToken')}"
            " || duration(self.batchingWindow) + duration(self.batchingWindow) <= duration(self.sla.timeToFirstToken)",
            _told(rules.WINDOW_WITHIN_HALF_SLA, "lower batchingWindow"),
            f"'{rules.WINDOW_WITHIN_HALF_SLA} (%s): lower it to at most %dms'"
            ".format([self.sla.timeToFirstToken, duration(self.sla.timeToFirstToken).getMilliseconds() / 2])",
            ".batchingWindow",
        ),
    ),
    ("spec", "tiers", "[]", "name"): (
        Rule(
            f"!(self in [{', '.join(map(_text, rules.RESERVED_TIER_NAMES))}])",
            _told(rules.TIER_NAME_FREE, "choose another name"),
        ),
    ),
}

# -- sharing, prefixes, identity, rebalancing -------------------------------------------------------------------------


def _only_for(kind: IdentityType, field: str, message: str) -> Rule:
    return Rule(
        f"(self.type == '{kind}') == has(self.{field})",
        _told(message, f"add {field}, or set another type"),
        f"'{message}: ' + (has(self.{field}) ? 'remove it, or set type: {kind}'"
        f" : 'add {field}: {{secretRef: {{name: …}}}}')",
        f".{field}",
    )


_REST: Mapping[Place, tuple[Rule, ...]] = {
    ("spec",): (
        Rule(
            f"self.identity.type != '{IdentityType.OPEN}' || !has(self.sharing) || self.sharing != '{Sharing.TENANT}'",
            _told(rules.OPEN_KNOWS_NO_TENANTS, "choose Tier, Pool or None, or another identity.type"),
            field_path=".sharing",
        ),
        Rule(
            f"!has(self.publicPrefixes) || size(self.publicPrefixes) == 0 || {_PUBLIC} > 0",
            _told(rules.PREFIXES_NEED_SHARE, "set spec.publicPercent, or remove the prefixes"),
            field_path=".publicPrefixes",
        ),
    ),
    ("spec", "publicPrefixes", "[]"): (
        Rule(
            "has(self.configMapKeyRef) != has(self.text)",
            _told(rules.PREFIX_ONE_SOURCE, "keep one of them"),
            f"'{rules.PREFIX_ONE_SOURCE}: ' + (has(self.text) ? 'remove one of them' : 'add one of them')",
        ),
    ),
    ("spec", "identity"): (
        _only_for(IdentityType.API_KEYS, "apiKeys", rules.API_KEYS_IFF_TYPE),
        _only_for(IdentityType.TRUSTED_HEADERS, "trustedHeaders", rules.TRUSTED_HEADERS_IFF_TYPE),
    ),
    ("spec", "rebalancing", "interval"): (
        Rule(
            f"!{_is_duration('self')} || duration(self) >= duration('{rules.LEAST_REBALANCING_INTERVAL}')",
            _told(rules.INTERVAL_LEAST, "raise it; 30s is a good start"),
        ),
    ),
}


def rules_of_pool() -> list[tuple[Place, Rule]]:
    """Every rule and its place."""
    return [(place, rule) for part in (_ENGINE, _TIERS, _REST) for place, found in part.items() for rule in found]
