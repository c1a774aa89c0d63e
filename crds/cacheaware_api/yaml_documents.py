"""YAML, read as strictly as an API server with field validation does: plain JSON values, and where each was written.

Refused, with the line: a field given twice, a field name that is no text, tags, aliases that contain themselves or grow
without bound, and what is no UTF-8. Dates and times of day stay text, as they do for `kubectl`; `Off`, `No` and their
like are booleans, as they are for `kubectl`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from cacheaware_api.errors import ObjectInvalid, Problem, shown
from cacheaware_api.rules import Path

MAX_BYTES = 2 * 1024 * 1024  # more than any API server stores for one object
MAX_VALUES = 200_000  # after aliases are followed

_TAG = "tag:yaml.org,2002:"
_AS_TEXT = {f"{_TAG}{kind}" for kind in ("str", "timestamp", "value")}


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document of a file: `data` is never empty, `number` counts from 1."""

    number: int
    data: Any
    root: Node

    def line(self, path: Path = ()) -> int:
        """The line where the value at `path` begins, or the nearest one around it, counted from 1."""
        node = self.root
        for part in path:
            inner = _child(node, part)
            if inner is None:
                break
            node = inner
        return _line(node)


def documents(content: bytes) -> list[Document]:
    """The documents of a file without the empty ones; raises `ObjectInvalid` where it cannot be read."""
    text = _decoded(content)
    found: list[Document] = []
    try:
        for number, node in enumerate(yaml.compose_all(text, Loader=yaml.SafeLoader), start=1):
            if node is None:
                continue
            data = _Reader().read(node)
            if data is not None:
                found.append(Document(number, data, node))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refused(line, f"has the character {error.character:#04x}, which YAML does not allow") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise _refused(mark.line + 1 if mark else None, f"is no YAML: {said}") from None
    except RecursionError:
        raise _refused(None, "is nested too deep") from None
    return found


def _decoded(content: bytes) -> str:
    if len(content) > MAX_BYTES:
        raise _refused(None, f"has {len(content)} bytes, and {MAX_BYTES} is the most that is read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _refused(line, f"is not UTF-8: byte {content[error.start]:#04x}", "save it as UTF-8") from None


def _refused(line: int | None, message: str, fix: str | None = None) -> ObjectInvalid:
    return ObjectInvalid([Problem("", message, fix, line)])


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(node, SequenceNode) and isinstance(part, int):
        return node.value[part] if part < len(node.value) else None
    if isinstance(node, MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    return None


class _Reader:
    """Turns one document's nodes into values."""

    def __init__(self) -> None:
        self._scalars = yaml.constructor.SafeConstructor()
        self._known: dict[int, tuple[Any, int]] = {}  # id of a node → its value, and how many values that is
        self._open: set[int] = set()  # nodes being read: an alias to one of them has no end

    def read(self, node: Node) -> Any:
        return self._read(node)[0]

    def _read(self, node: Node) -> tuple[Any, int]:
        if id(node) in self._open:
            raise _refused(_line(node), "has an alias that contains itself")
        if id(node) not in self._known:
            self._open.add(id(node))
            self._known[id(node)] = self._value(node)
            self._open.discard(id(node))
        value, size = self._known[id(node)]
        if size > MAX_VALUES:
            raise _refused(_line(node), f"has more than {MAX_VALUES} values")
        return value, size

    def _value(self, node: Node) -> tuple[Any, int]:
        if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
            items = [self._read(item) for item in node.value]
            return [value for value, _ in items], 1 + sum(size for _, size in items)
        if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node)
        if isinstance(node, ScalarNode):
            return self._scalar(node), 1
        raise _refused(_line(node), f"has the tag {shown(node.tag)}", "remove the tag")

    def _mapping(self, node: MappingNode) -> tuple[dict[str, Any], int]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        size = 1
        for key_node, value_node in node.value:
            value, inner = self._read(value_node)
            size += inner
            if key_node.tag == f"{_TAG}merge":
                for source in value if isinstance(value, list) else [value]:
                    if not isinstance(source, dict):
                        raise _refused(_line(key_node), "merges (<<) something that is no object")
                    merged = {**source, **merged}  # the first named wins
                continue
            key = self._read(key_node)[0]
            if not isinstance(key, str):
                raise _refused(_line(key_node), f"has a field name that is no text: {shown(key)}", "put it in quotes")
            if key in own:
                raise _refused(_line(key_node), f"has the field {shown(key)} twice", "remove one of them")
            own[key] = value
        return {**merged, **own}, size

    def _scalar(self, node: ScalarNode) -> Any:
        text: str = node.value
        if node.tag in _AS_TEXT or (":" in text and node.tag in (f"{_TAG}int", f"{_TAG}float")):  # 1:30 is no number
            return text
        try:
            match node.tag.removeprefix(_TAG):
                case "null":
                    return None
                case "bool":
                    return self._scalars.construct_yaml_bool(node)
                case "int":
                    return self._scalars.construct_yaml_int(node)
                case "float":
                    return self._scalars.construct_yaml_float(node)
        except (ValueError, KeyError):  # thousands of digits, or a tag that lies about its text
            raise _refused(_line(node), f"has a number or boolean that cannot be read: {shown(text)}") from None
        raise _refused(_line(node), f"has the tag {shown(node.tag)}", "remove the tag")


def one_document(content: bytes) -> Any:
    """The value of a text that is to hold exactly one document, such as an entry of a Secret."""
    found = documents(content)
    if len(found) != 1:
        raise ObjectInvalid([Problem("", f"must hold one YAML or JSON object, and holds {len(found)}")])
    return found[0].data
