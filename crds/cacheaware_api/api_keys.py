"""The user's Secret of API keys: each entry says who holds a key, and which tiers it may use.

An entry's name is a label for people; its value is YAML or JSON with `sha256` (hexadecimal, of the key), `tenant`,
`tiers` and perhaps `defaultTier`. The key itself is stored nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from cacheaware_api import errors, wire
from cacheaware_api.errors import ObjectInvalid, Problem
from cacheaware_api.schema import ONE_LINE, SHA256, DnsLabel, SpecModel, StrictStr
from cacheaware_api.yaml_documents import one_document


class ApiKeyEntry(SpecModel):
    """The value of one entry."""

    sha256: Annotated[StrictStr, Field(min_length=1, max_length=64, pattern=SHA256)]
    tenant: Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=ONE_LINE)]
    tiers: Annotated[tuple[DnsLabel, ...], Field(min_length=1, max_length=16)]
    default_tier: DnsLabel | None = None


def read_api_keys(secret: str, entries: Mapping[str, bytes], tiers: Collection[str]) -> wire.ApiKeys:
    """The keys in the entries of the Secret named `secret`, for a pool with `tiers`.

    Raises `ObjectInvalid` with everything that is wrong in any entry. No entries are no keys: nobody is let in.
    """
    keys: list[wire.ApiKey] = []
    problems: list[Problem] = []
    for name, value in sorted(entries.items()):
        where = f"Secret {secret}: {name}"
        try:
            entry = _entry(where, value)
        except ObjectInvalid as error:
            problems += error.problems
            continue
        problems += _broken(where, entry, tiers)
        digest = entry.sha256.lower()
        same = next((key for key in keys if key.sha256 == digest), None)
        if same:
            problems.append(
                Problem(f"{where}.sha256", f"is the same key as that of {same.name}", "give each entry its own key")
            )
        keys.append(wire.ApiKey(name, digest, entry.tenant, entry.tiers, entry.default_tier))
    if problems:
        raise ObjectInvalid(problems)
    return wire.ApiKeys(tuple(keys))


def _entry(where: str, value: bytes) -> ApiKeyEntry:
    try:
        return ApiKeyEntry.model_validate(one_document(value))
    except ValidationError as error:
        found = errors.problems(error, ApiKeyEntry, secret=True)
        raise ObjectInvalid(
            dataclasses.replace(problem, path=f"{where}.{problem.path}" if problem.path else where) for problem in found
        ) from None
    except ObjectInvalid as error:  # the line is one within the entry
        raise ObjectInvalid(dataclasses.replace(problem, path=where, line=None) for problem in error.problems) from None


def _broken(where: str, entry: ApiKeyEntry, tiers: Collection[str]) -> list[Problem]:
    found = [
        Problem(f"{where}.tiers[{index}]", f"{tier} is no tier of the pool", f"choose among {', '.join(sorted(tiers))}")
        for index, tier in enumerate(entry.tiers)
        if tier not in tiers
    ]
    found += [
        Problem(f"{where}.tiers[{index}]", f"{tier} is named twice", "remove one of them")
        for index, tier in enumerate(entry.tiers)
        if tier in entry.tiers[:index]
    ]
    if entry.default_tier is not None and entry.default_tier not in entry.tiers:
        message = f"{entry.default_tier} is not among the tiers of the key"
        found.append(
            Problem(f"{where}.defaultTier", message, f"choose one of {', '.join(entry.tiers)}, or add it there")
        )
    return found
