"""Whether an object in the cluster is still as we applied it, and whose it is. Pure.

The server fills in defaults and writes quantities its own way, so what we want is never compared with what is there;
what is there is compared with what was there right after we applied the same, field by field of what we want.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheaware_operator.kinds import Object


@dataclass(frozen=True, slots=True)
class Applied:
    """What we applied last (as a digest) and how the server wrote it (its part that is ours)."""

    wanted: str
    uid: str
    ours: str

    @classmethod
    def of(cls, wanted: Object, answer: Object) -> Applied:
        return cls(digest(wanted), answer["metadata"]["uid"], digest(part_of(answer, wanted)))


def differs(wanted: Object, there: Object | None, applied: Applied | None) -> bool:
    """Whether `wanted` has to be applied. After a start nothing is known of what we applied: then once."""
    if there is None or applied is None:
        return True
    return (
        applied.wanted != digest(wanted)
        or applied.uid != there["metadata"]["uid"]
        or applied.ours != digest(part_of(there, wanted))
    )


def part_of(there: Any, wanted: Any) -> Any:
    """Of what is there the part that `wanted` speaks of. A list is looked at whole where its length differs."""
    if isinstance(wanted, Mapping) and isinstance(there, Mapping):
        return {name: part_of(there[name], value) for name, value in wanted.items() if name in there}
    if _is_list(wanted) and _is_list(there) and len(wanted) == len(there):
        return [part_of(one, other) for one, other in zip(there, wanted, strict=True)]
    return there


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_owned_by(there: Object, uid: str) -> bool:
    """Whether the pool with this uid controls it."""
    owners = there["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def owner_in_words(there: Object) -> str:
    owners = there["metadata"].get("ownerReferences") or ()
    owner = next((owner for owner in owners if owner.get("controller")), None)
    return "nobody of ours made it" if owner is None else f"it belongs to {owner['kind']} {owner['name']}"


def merge_patch(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes `new` out of `old`: only what differs, null where a field goes away."""
    before = old if isinstance(old, Mapping) else {}
    patch: dict[str, Any] = {name: None for name in before if name not in new}
    for name, value in new.items():
        if name not in before:
            patch[name] = value
        elif isinstance(value, Mapping) and isinstance(before[name], Mapping):
            if inner := merge_patch(before[name], value):
                patch[name] = inner
        elif value != before[name]:
            patch[name] = value
    return patch


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
