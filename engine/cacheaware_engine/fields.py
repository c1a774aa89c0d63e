"""Typed reads from JSON: bytes to an object, an object's fields to values within bounds.

Null counts as absent, true is not 1, and every refusal is a `BadRequest` that names the field and what was expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import BadRequest


def load_json(body: bytes) -> dict[str, Any]:
    """The body as an object; says where it stops being JSON."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 (byte {error.start}): send JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets nested thousands deep
        raise BadRequest("the body is not usable JSON: a number is too long or the nesting too deep") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {kind(value)}")
    return value


class Fields:
    """Typed reads from one JSON object; null is absent, true is not 1, and every refusal names the field."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self.body, self.prefix = body, prefix

    def get(self, name: str) -> Any:
        return self.body.get(name)

    def required(self, name: str) -> Any:
        if (value := self.body.get(name)) is None:
            raise BadRequest(
                f"{self.prefix}{name} is required", param=f"{self.prefix}{name}", code="missing_required_parameter"
            )
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(self.prefix + name, "true or false", value)
        return value

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        value = self.optional_integer(name, least, most)
        return default if value is None else value

    def optional_integer(self, name: str, least: int, most: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # some clients write 5.0
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            refuse(self.prefix + name, f"a whole number from {least} to {most}", value)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            refuse(self.prefix + name, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def text(self, name: str, most: int | None = None) -> str | None:
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or (most is not None and not 0 < len(value) <= most):
            refuse(self.prefix + name, f"a string of 1 to {most} characters" if most else "a string", value)
        return encodable(value, self.prefix + name)

    def required_text(self, name: str) -> str:
        self.required(name)
        return self.text(name) or ""


def encodable(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; no tokenizer can read it
        raise BadRequest(f"{param}: character {error.start} is half of a surrogate pair", param=param) from None
    return text


def refuse(param: str, expected: str, got: Any) -> NoReturn:
    raise BadRequest(f"{param}: expected {expected}, got {kind(got)}", param=param)


def kind(value: Any) -> str:
    """A short, safe rendering of a value in a message."""
    if value is None:
        return "nothing"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number too large"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number too large"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return ascii(value) if len(value) <= 40 else "a longer string"
    if isinstance(value, (list, tuple)):
        return "an empty list" if not value else f"a list of {len(value)}"
    return "an object" if isinstance(value, Mapping) else type(value).__name__


def _no_constant(name: str) -> NoReturn:
    raise BadRequest(f"the body is not valid JSON: {name} is not a JSON number")
