"""Pools with something changed in them: mostly broken, sometimes still valid, which is what verdicts are compared on.

Left out is what the two cannot agree on: JSON's null (an API server drops it before it looks, so `replicas: null` is no
error there), whole numbers written as fractions (1.0 is an integer to it), and the inside of what is free in form.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

_FREE = ("affinity", "securityContext", "volumes", "topologySpreadConstraints")

_NUMBERS = [0, 1, 2, 16, 17, 50, 100, 101, 1000, 1001, 10_000, 10_001, 2**31, 2**53, 2**63 - 2, 2**63 - 1]
_NUMBERS += [-1, -1_000_001, -(2**63)]
_DURATIONS = ["0s", "1ms", "999ms", "1s", "1000ms", "99999h99999h99999h99999h", "1h1h1h1h1h", "100000s", "1.5s", "-1s"]
_QUANTITIES = ["0", "0Ki", "0.000000001", "1", "1Gi", "1.5e3", "1e99", "7Ei", "8Ei", "500m", "1gi", "1Gi ", ".5Gi"]
_FLAGS = ["--", "-", "--=1", "--por", "--port=1", "--kv-c", "--max_model_len", "--max-m", "--max-num"]
_FLAGS += ["--kv_t.a", "-dp", "-dp=2", "-d", "-dp.x", "--api-key", "--api_k=1", "--no-enable-p", "--c", "--dtype"]
_SOURCES = ["hf://a/b@c", "hf://a", "file:///", "file:///a b", "pvc://Claim", "pvc://c/p", "pypi://a@1", "http://a/b"]
_TEXTS = ["", "a", "A", "gold", "bronze", "auto", "default", "a.b", "-a", "a-", "a/b", "a b", "a\n", "\t", "\x7f", "ä"]
_TEXTS += ["Tenant", "Open", "APIKeys", "TrustedHeaders", "VLLM", "Torch", "Auto", "Off", "FP8", "x" * 63, "x" * 64]
_TEXTS += ["x" * 253, "x" * 254, "x" * 1025, "example.com/app", "/app", "a/", "😀" * 63, "\u2028", "'", '"', "\\"]

_numbers = st.one_of(st.sampled_from(_NUMBERS), st.integers(-5, 110))
_texts = st.sampled_from([*_DURATIONS, *_QUANTITIES, *_FLAGS, *_SOURCES, *_TEXTS])
_others = st.sampled_from([True, False, 1.5, [], {}, [{}], ["x"], [1], {"a": "b"}, {"name": "a"}, {"a b": "c"}])
_values: st.SearchStrategy[Any] = st.one_of(_numbers, _texts, _others).map(copy.deepcopy)


def instead_of(value: Any) -> st.SearchStrategy[Any]:
    """Mostly a value of the same type, so that some objects stay valid."""
    match value:
        case bool():
            return st.booleans() | _values
        case int():
            return st.one_of(_numbers, _numbers, _values)
        case str():
            return st.one_of(_texts, _texts, _values)
        case _:
            return _values


def places(value: Any, path: Path = ()) -> list[Path]:
    """Everything in an object that may be changed."""
    if path and path[-1] in _FREE:
        return [path]
    found = [path] if path else []
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(item, (*path, name))
    return found


@st.composite
def damaged(draw: st.DrawFn, pool: dict[str, Any]) -> dict[str, Any]:
    """`pool` with one to three changes to its name or spec."""
    changed = copy.deepcopy(pool)
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        path = draw(st.sampled_from([("metadata", "name"), *places(changed["spec"], ("spec",))[1:]]))
        place: Any = changed
        for part in path[:-1]:
            place = place[part]
        name: Any = path[-1]
        match draw(st.sampled_from(["set", "remove", "add", "repeat", "another"])):
            case "remove" if path != ("metadata", "name"):
                del place[name]
            case "add" if isinstance(place[name], dict) and name not in _FREE:
                place[name][draw(st.sampled_from(["unknown", "a/b", "valueFrom", "text", "optional"]))] = draw(_values)
            case "repeat" if isinstance(place, list):
                place.append(copy.deepcopy(place[name]))
            case "another" if isinstance(place[name], list):
                place[name].append(draw(_values))
            case _:
                place[name] = draw(instead_of(place[name]))
    return changed
