"""Errors of objects and files, in plain sentences.

    ValueError
    └── ObjectInvalid      a pool, Secret or ConfigMap that cannot be used: every problem in it, not only the first

A `Problem` prints as `path: what is wrong: what to do`. pydantic's errors are translated here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from cacheaware_api.rules import Broken, Path
from cacheaware_api.schema import EXPECTED, LEAVE_OUT

_LONGEST_SHOWN = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where it is (a field path, or a file and line), and what to do about it."""

    path: str
    message: str
    fix: str | None = None
    line: int | None = None  # of the file that the object was read from, counted from 1

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"

    @property
    def text(self) -> str:
        """The problem without its line, for callers that print `file:line:` themselves."""
        return ": ".join(part for part in (self.path, self.message, self.fix) if part)


class ObjectInvalid(ValueError):
    """An object that cannot be used; `problems` has everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class _HiddenNumber(int):
    """Stands in messages for a number in a Secret."""

    def __str__(self) -> str:
        return "***"


# -- to one ValidationError, and from it ------------------------------------------------------------------------------


def joined(title: str, error: ValidationError | None, broken: Sequence[Broken]) -> ValidationError:
    """One error with the fields' errors and the broken rules, for a validator to raise."""
    lines = [
        InitErrorDetails(
            type=PydanticCustomError(line["type"], line["msg"], line.get("ctx")),
            loc=line["loc"],
            input=line["input"],
        )
        for line in (error.errors(include_url=False) if error else ())
    ]
    lines += [
        InitErrorDetails(
            type=PydanticCustomError("rule", "{message}", {"message": rule.message, "fix": rule.fix}),
            loc=rule.path,
            input="",
        )
        for rule in broken
    ]
    return ValidationError.from_exception_data(title, lines)


def problems(
    error: ValidationError,
    model: type[BaseModel],
    prefix: Path = (),
    line_of: Callable[[Path], int | None] = lambda path: None,
    secret: bool = False,
) -> list[Problem]:
    """The problems of `error`, which `model` raised.

    `prefix` is where the model's object lies in the whole, `line_of` tells where a field was written, and of a `secret`
    no value is shown.
    """
    return [
        dataclasses.replace(_problem(line, model, prefix, secret), line=line_of(_location(line)))
        for line in error.errors(include_url=False)
        if not _echo(line)
    ]


def path_text(path: Path) -> str:
    """`("spec", "tiers", 1, "a.b")` → `spec.tiers[1]["a.b"]`"""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z0-9_-]{1,64}", part):
            text += f".{part}" if text else part
        else:
            text += f"[{shown(part)}]"
    return text


def shown(value: Any) -> str:
    """A value for a message: short, on one line, in YAML's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_SHOWN:  # too long to print, perhaps also for str()
        return f"a number of more than {_LONGEST_SHOWN} digits"
    text = ascii(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


# -- translation ------------------------------------------------------------------------------------------------------


def _echo(line: ErrorDetails) -> bool:
    """A list counts as too short when some of its items are wrong: those have errors of their own."""
    return line["type"] == "too_short" and len(line["input"]) >= line["ctx"]["min_length"]


def _location(line: ErrorDetails) -> Path:
    return tuple(part for part in line["loc"] if part != "[key]")


def _problem(line: ErrorDetails, model: type[BaseModel], prefix: Path, secret: bool) -> Problem:
    location = _location(line)
    where = path_text((*prefix, *location))
    kind, value = line["type"], line["input"]
    if secret and isinstance(value, (str, int, float)):
        value = "*" * len(value) if isinstance(value, str) else _HiddenNumber()
    context = line.get("ctx", {})
    if kind == "rule":
        return Problem(where, context["message"], context["fix"])
    if kind == "missing":
        return Problem(where, "is missing", "add it")
    if kind == "extra_forbidden":
        return Problem(where, "unknown field", _near(str(location[-1]), _field_names(model, location[:-1])))
    if kind in ("null", "none_required") or value is None:
        return Problem(where, "must not be null", LEAVE_OUT)
    if kind in ("enum", "literal_error"):
        return _not_one_of(where, value, str(context["expected"]))
    if kind in _SENTENCES:
        return Problem(where, *_SENTENCES[kind](value, context))
    return Problem(where, str(line["msg"]))


def _not_one_of(where: str, value: Any, expected: str) -> Problem:
    allowed = re.findall(r"'([^']*)'", expected)
    fix: str | None = None
    if isinstance(value, bool) and {"Off", "On"} & set(allowed):
        fix = 'put it in quotes ("Off"): YAML reads Off, On, Yes and No as true and false'
    elif isinstance(value, str):
        fix = next((f"did you mean {name}?" for name in allowed if name.lower() == value.lower()), None) or _near(
            value, allowed
        )
    return Problem(where, f"must be {_either(allowed)}, not {shown(value)}", fix)


def _near(name: str, names: Sequence[str]) -> str | None:
    """A guess at what was meant."""
    folded = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name[:64].lower(), folded, n=1)
    return f"did you mean {folded[found[0]]}?" if found else None


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _no_text(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    quotable = isinstance(value, (bool, int, float))
    return f"must be text, not {shown(value)}", "put it in quotes" if quotable else None


def _no_integer(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    bare = isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value)
    return f"must be an integer, not {shown(value)}", "remove the quotes" if bare else None


def _too_long(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    return f"must be at most {context['max_length']} characters long, and has {len(value)}", "shorten it"


def _pattern(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    expected = EXPECTED.get(context["pattern"], f"text that matches {context['pattern']}")
    return f"must be {expected}, not {shown(value)}", None


def _too_few(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    return f"must have at least {context['min_length']}", "add one"


def _too_many(value: Any, context: Mapping[str, Any]) -> tuple[str, str | None]:
    return f"must have at most {context['max_length']} entries, and has {len(value)}", "remove some"


def _kind(expected: str) -> Callable[[Any, Mapping[str, Any]], tuple[str, str | None]]:
    return lambda value, context: (f"must be {expected}, not {shown(value)}", None)


_SENTENCES: Mapping[str, Callable[[Any, Mapping[str, Any]], tuple[str, str | None]]] = {
    "string_type": _no_text,
    "string_unicode": _kind("text in Unicode"),
    "string_too_short": lambda value, context: ("must not be empty", None),
    "string_too_long": _too_long,
    "string_pattern_mismatch": _pattern,
    "int_type": _no_integer,
    "int_parsing_size": _kind("a number of fewer digits"),
    "bool_type": _kind("true or false"),
    "greater_than_equal": lambda value, context: (f"must be at least {context['ge']}, not {shown(value)}", None),
    "less_than_equal": lambda value, context: (f"must be at most {context['le']}, not {shown(value)}", None),
    "list_type": _kind("a list"),
    "tuple_type": _kind("a list"),
    "dict_type": _kind("an object"),
    "mapping_type": _kind("an object"),
    "model_type": _kind("an object"),
    "model_attributes_type": _kind("an object"),
    "quantity_type": lambda value, context: (f"must be {context['expected']}, not {shown(value)}", None),
    "too_short": _too_few,
    "too_long": _too_many,
}


# -- which fields there are -------------------------------------------------------------------------------------------


def _field_names(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Names of the fields that the object at `location` may have."""
    found: Any = model
    for part in location:
        found = _without_none(found)
        arguments = typing.get_args(found)
        if isinstance(part, int):
            found = arguments[0]
        elif isinstance(found, type) and issubclass(found, BaseModel):
            fields = {field.alias or name: field for name, field in found.model_fields.items()}
            found = fields[part].annotation
        else:  # a map: any name leads to its values
            found = arguments[1]
    found = _without_none(found)
    return [field.alias or name for name, field in found.model_fields.items()]


def _without_none(annotation: Any) -> Any:
    """The type itself behind `X | None` and `Annotated[X, …]`."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            annotation = next(each for each in typing.get_args(annotation) if each is not types.NoneType)
        else:
            return annotation
