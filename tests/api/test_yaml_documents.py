"""YAML is read as an API server with strict field validation reads it, and every refusal has its line."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheaware_api.errors import ObjectInvalid
from cacheaware_api.yaml_documents import documents


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("a: 1", {"a": 1}, id="integer"),
        pytest.param("a: '1'", {"a": "1"}, id="quoted"),
        pytest.param("a: 1.5", {"a": 1.5}, id="number"),
        pytest.param("a: Off", {"a": False}, id="Off is a boolean, as for kubectl"),
        pytest.param("a: None", {"a": "None"}, id="None is text"),
        pytest.param("a: ~", {"a": None}, id="null"),
        pytest.param("a: 2026-01-01", {"a": "2026-01-01"}, id="a date stays text"),
        pytest.param("a: 2026-01-01T00:00:00Z", {"a": "2026-01-01T00:00:00Z"}, id="a time stays text"),
        pytest.param("a: 1:30", {"a": "1:30"}, id="no numbers to base 60"),
        pytest.param("a: 5ms", {"a": "5ms"}, id="duration"),
        pytest.param("a: =", {"a": "="}, id="equals sign"),
        pytest.param("a: &x [1]\nb: *x", {"a": [1], "b": [1]}, id="alias"),
        pytest.param(
            "a: &x {k: 1, l: 1}\nb: {<<: *x, l: 2}", {"a": {"k": 1, "l": 1}, "b": {"k": 1, "l": 2}}, id="merge"
        ),
        pytest.param('{"a": [true, null]}', {"a": [True, None]}, id="JSON"),
        pytest.param("\ufeffa: 1", {"a": 1}, id="byte order mark"),
    ],
)
def test_values(text: str, value: Any) -> None:
    (document,) = documents(text.encode())
    assert document.data == value


def test_of_several_merges_the_first_named_wins() -> None:
    (document,) = documents(b"a: &x {k: 1}\nb: &y {k: 2, l: 2}\nc: {<<: [*x, *y]}\n")
    assert document.data["c"] == {"k": 1, "l": 2}


def test_documents_are_numbered_and_empty_ones_left_out() -> None:
    found = documents(b"---\n---\na: 1\n---\n# only a comment\n---\nb: 2\n")
    assert [(each.number, each.data, each.line()) for each in found] == [(2, {"a": 1}, 3), (4, {"b": 2}, 7)]
    assert documents(b"") == []


def test_a_field_is_found_by_its_line() -> None:
    (document,) = documents(b"a:\n  b:\n  - c: 1\n  - c: 2\n")
    assert document.line(("a", "b", 1, "c")) == 4
    assert document.line(("a", "b", 7, "c")) == 3, "the nearest part around it"
    assert document.line(("a", "missing")) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"a: 1\nb:\n  c: 1\n  c: 2\n", "line 4: has the field 'c' twice", id="a field twice"),
        pytest.param(b"a: 1\n5: x\n", "line 2: has a field name that is no text: 5", id="a number as a name"),
        pytest.param(b"a: 1\non: x\n", "line 2: has a field name that is no text: true", id="on as a name"),
        pytest.param(b"a: 1\n[x]: y\n", "line 2: has a field name that is no text: a list", id="list as a name"),
        pytest.param(b"a: 1\nb: \xff\n", "line 2: is not UTF-8: byte 0xff: save it as UTF-8", id="bytes"),
        pytest.param(b"a: 1\nb: \x01\n", "line 2: has the character 0x01, which YAML does not allow", id="control"),
        pytest.param(b"a: 1\nb: [\n", "line 3: is no YAML: ", id="not closed"),
        pytest.param(b"a: 1\n\tb: 1\n", "line 2: is no YAML: ", id="tab"),
        pytest.param(b"a: *nowhere\n", "line 1: is no YAML: found undefined alias", id="alias to nowhere"),
        pytest.param(b"a: &x [*x]\n", "line 1: has an alias that contains itself", id="alias to itself"),
        pytest.param(b"a: !!python/object:os.system x\n", "line 1: has the tag ", id="a Python tag"),
        pytest.param(b"a: !!binary aGk=\n", "line 1: has the tag ", id="a binary tag"),
        pytest.param(b"a: !!set {x}\n", "line 1: has the tag ", id="a set"),
        pytest.param(b"a: !!int x\n", "line 1: has a number or boolean that cannot be read", id="a false tag"),
        pytest.param(b"a: !!bool x\n", "line 1: has a number or boolean that cannot be read", id="no boolean"),
        pytest.param(b"a: {<<: 5}\n", "line 1: merges (<<) something that is no object", id="merge of 5"),
        pytest.param(b"a: " + b"9" * 5000, "line 1: has a number or boolean that cannot be", id="5000 digits"),
        pytest.param(b"[" * 5000, "is nested too deep", id="too deep"),
        pytest.param(b"#" * 3_000_000, "has 3000000 bytes, and 2097152 is the most", id="too large"),
    ],
)
def test_what_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ObjectInvalid) as caught:
        documents(content)
    assert str(caught.value).startswith(said)
    assert str(caught.value).isprintable()


def test_aliases_that_multiply_are_refused_before_they_do() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ObjectInvalid, match=r"line 6: has more than 200000 values"):
        documents("\n".join(lines).encode())


@given(st.binary(max_size=200) | st.text(alphabet="ab:-[]{}&*<!?|>'\"#% \n\t\x85\u2028", max_size=60).map(str.encode))
@example(b"a: '\n---\n")
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    with contextlib.suppress(ObjectInvalid):
        documents(content)
