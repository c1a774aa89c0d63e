"""What an edit of a pool means while it runs: applied live, kept for a restart, or refused. Pure.

Live: everything that a view or the key file carries, and the number of replicas. A restart is needed for what an engine
is started with: the model and its cache. The rest of such an edit is applied, and the running values of those fields
stay until `cacheaware up` is started again: restarting engines by itself would empty their caches and cut streams.
Refused: what makes it another pool. Then nothing of the edit is applied, as an API server would do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheaware_api import wire
from cacheaware_operator.plan import Wanted

_NEEDS_RESTART = ("spec.model", "spec.engine")
_NO_EFFECT_HERE = ("spec.podTemplate", "spec.engine.image", "spec.engine.resources")
_MAP_LISTS = ("spec.tiers", "spec.publicPrefixes")  # lists whose items go by their name
_LONGEST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Changes:
    """One sentence per changed field: `spec.tiers[gold].quota.nominalPercent: 50 → 30`."""

    live: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.live, self.needs_restart, self.no_effect, self.refused))


def compare(running: Wanted, new: Wanted) -> Changes:
    """What changes from the pool that runs to the one in the edited file."""
    found: dict[str, list[str]] = {field.name: [] for field in dataclasses.fields(Changes)}
    found["refused"] += _identity_changes(running, new)
    before, after = _plain(running), _plain(new)
    for path, old, value in _differences("spec", before, after):
        sentence = f"{path}: {_shown(old)} → {_shown(value)}"
        if path == "spec.engine.type":
            found["refused"].append(
                f"{sentence}: cannot change: delete the pool and create one of another name with that engine"
            )
        elif _under(path, _NO_EFFECT_HERE):
            found["no_effect"].append(sentence)
        elif _under(path, _NEEDS_RESTART):
            found["needs_restart"].append(sentence)
        else:
            found["live"].append(sentence)
    found["live"] += _prefix_changes(running, new)
    found["live"] += _key_changes(running.api_keys, new.api_keys)
    return Changes(**{name: tuple(sentences) for name, sentences in found.items()})


def applied(running: Wanted, new: Wanted) -> Wanted:
    """The part of `new` that can be true without a restart: everything but what engines were started with."""
    spec = new.spec.model_copy(update={"model": running.spec.model, "engine": running.spec.engine})
    return dataclasses.replace(new, spec=spec)


def _identity_changes(running: Wanted, new: Wanted) -> Iterator[str]:
    for field in ("namespace", "name"):
        old, value = getattr(running, field), getattr(new, field)
        if old != value:
            yield f"metadata.{field}: {old} → {value}: that is another pool: start it with its own `cacheaware up`"


def _plain(wanted: Wanted) -> dict[str, Any]:
    """The spec as plain values with every default filled in: writing a default out is no change."""
    return wanted.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every leaf that differs; a field that is absent on one side is None there."""
    if path in _MAP_LISTS:
        old, new = _by_name(old), _by_name(new)
        for name in dict.fromkeys((*old, *new)):
            yield from _differences(f"{path}[{name}]", old.get(name), new.get(name))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _differences(f"{path}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield path, old, new


def _by_name(items: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    return {item["name"]: item for item in items or ()}


def _prefix_changes(running: Wanted, new: Wanted) -> Iterator[str]:
    """Text that came from a ConfigMap; text written in the spec shows in the spec."""
    for prefix in new.spec.public_prefixes:
        old, text = running.prefix_texts.get(prefix.name), new.prefix_texts.get(prefix.name)
        if prefix.config_map_key_ref is not None and old is not None and text is not None and old != text:
            yield f"text of public prefix {prefix.name}: {len(old)} → {len(text)} characters"


def _key_changes(running: wire.ApiKeys, new: wire.ApiKeys) -> Iterator[str]:
    """Keys and gateways by the name of their entry; hashes are not shown."""
    old, now = _by_label(running), _by_label(new)
    for name in dict.fromkeys((*old, *now)):
        if name not in now:
            yield f"{name}: removed"
        elif name not in old:
            yield f"{name}: added"
        elif old[name] != now[name]:
            yield f"{name}: changed"


def _by_label(keys: wire.ApiKeys) -> dict[str, wire.ApiKey | wire.GatewaySecret]:
    callers = {f"API key {key.name}": key for key in keys.keys}
    gateways = {f"gateway {gateway.name}": gateway for gateway in keys.gateways}
    return {**callers, **gateways}


def _under(path: str, roots: Sequence[str]) -> bool:
    return any(path == root or path.startswith((f"{root}.", f"{root}[")) for root in roots)


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, Mapping) and "name" in value:
        return "present"  # a whole tier or prefix that came or went; its fields are in the file
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
