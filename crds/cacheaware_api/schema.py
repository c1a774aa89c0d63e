"""What the models of the object are made of: their configuration, and the field types that many of them share.

Types are strict (`"5"` is no integer, `5` is no text), every string, list and number is bounded, and every pattern
comes with a sentence that says what was expected: `errors` prints the sentence, the schema carries the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from cacheaware_api import durations, quantities

NULL = "must not be null"
LEAVE_OUT = "leave the field out, or give it a value"


def _field_name(name: str) -> str:
    """The object's name of a Python field: `from_` → `from`, `max_model_len` → `maxModelLen`."""
    return to_camel(name.removesuffix("_"))


class StatusModel(BaseModel):
    """A part of the status: written by us from Python, so it also takes Python's names."""

    model_config = ConfigDict(
        alias_generator=_field_name,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )


class SpecModel(BaseModel):
    """A part of what users write: unknown fields are refused, and null, which merge patches and Helm use to delete."""

    model_config = ConfigDict(
        alias_generator=_field_name,
        validate_by_alias=True,
        validate_by_name=False,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_null(cls, value: Any) -> Any:
        if value is None:
            raise PydanticCustomError("null", NULL)
        return value


# -- formats ----------------------------------------------------------------------------------------------------------

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
DATA_KEY = r"^[-._a-zA-Z0-9]+$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_.-]*$"
QUALIFIED_NAME = r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$"
MODEL_NAME = r"^[A-Za-z0-9][-A-Za-z0-9._:/@+]*$"
MODEL_SOURCE = (
    r"^(hf://[-A-Za-z0-9._]+/[-A-Za-z0-9._]+(@[-A-Za-z0-9._/]+)?"
    r"|file:///[^\x00-\x1f\x7f]+"
    r"|pvc://[a-z0-9]([-.a-z0-9]*[a-z0-9])?(/[^\x00-\x1f\x7f]*)?"
    r"|pypi://[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?(@[-A-Za-z0-9.!+_]+)?)$"
)
IMAGE = r"^[A-Za-z0-9][-A-Za-z0-9._:/@]*$"
SHA256 = r"^[0-9a-fA-F]{64}$"
ONE_LINE = r"^[^\x00-\x1f\x7f]*$"
TEXT = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
QUANTITY = r"^[0-9]{1,18}([.][0-9]{1,9})?(m|Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|[eE][0-9]{1,2})?$"

EXPECTED: Mapping[str, str] = {
    durations.PATTERN: durations.EXPECTED,
    quantities.PATTERN: quantities.EXPECTED,
    DNS_LABEL: "a DNS label: lower-case letters, digits and '-', beginning and ending with a letter or digit",
    DNS_SUBDOMAIN: "a DNS name: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    DATA_KEY: "a key of letters, digits, '-', '_' and '.'",
    ENV_NAME: "a variable name: letters, digits, '_', '-' and '.', not beginning with a digit",
    QUALIFIED_NAME: "a name such as app or example.com/app",
    LABEL_VALUE: "a label value: letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    MODEL_NAME: "a model name: letters, digits and . _ : / @ + -, beginning with a letter or digit",
    MODEL_SOURCE: "hf://org/repo[@revision], file:///path, pvc://claim/path or pypi://package[@version]",
    IMAGE: "an image reference such as example.com/engine:1.2",
    SHA256: "the 64 hexadecimal digits of a SHA-256",
    ONE_LINE: "one line without control characters",
    TEXT: "text without control characters (line breaks and tabs are fine)",
    QUANTITY: "a quantity such as 2, 500m or 1Gi",
}
"""What a value that does not match a pattern should have been."""


# -- field types ------------------------------------------------------------------------------------------------------

_LARGEST_NUMBER = 2**53  # beyond it JSON readers, the API server's bounds among them, are not exact

StrictInt: TypeAlias = Annotated[int, Strict()]
StrictStr: TypeAlias = Annotated[str, Strict()]
StrictBool: TypeAlias = Annotated[bool, Strict()]

Percent: TypeAlias = Annotated[StrictInt, Field(ge=0, le=100)]
Count: TypeAlias = Annotated[StrictInt, Field(ge=0, le=_LARGEST_NUMBER)]
DnsLabel: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
DnsSubdomain: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
DataKey: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=DATA_KEY)]
Line: TypeAlias = Annotated[StrictStr, Field(max_length=1024, pattern=ONE_LINE)]
Duration: TypeAlias = Annotated[
    StrictStr, Field(min_length=1, max_length=durations.MAX_LENGTH, pattern=durations.PATTERN)
]
LabelMap: TypeAlias = Annotated[
    dict[
        Annotated[StrictStr, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)],
        Annotated[StrictStr, Field(max_length=63, pattern=LABEL_VALUE)],
    ],
    Field(max_length=64),
]
AnnotationMap: TypeAlias = Annotated[
    dict[
        Annotated[StrictStr, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)],
        Annotated[StrictStr, Field(max_length=262_144, pattern=TEXT)],
    ],
    Field(max_length=64),
]


def _memory(value: Any) -> Any:
    """One message instead of one for each member of the union; bool is an int to Python, and to nobody else."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PydanticCustomError("quantity_type", "must be {expected}", {"expected": quantities.EXPECTED})
    if isinstance(value, int) and value > _LARGEST_NUMBER:
        raise PydanticCustomError(
            "quantity", "must be written as text, such as 16Pi, from {n} on", {"n": _LARGEST_NUMBER}
        )
    try:
        size = quantities.bytes_of(value)
    except quantities.QuantityError as error:
        raise PydanticCustomError("quantity", "{problem}", {"problem": str(error)}) from None
    if size < 1:
        raise PydanticCustomError("quantity", "must be more than 0 bytes")
    return value


def _quantity(value: Any) -> Any:
    sane = abs(value) <= _LARGEST_NUMBER if isinstance(value, int) else isinstance(value, str) and len(value) <= 32
    if not sane or isinstance(value, bool) or not re.fullmatch(QUANTITY, str(value)) or str(value).endswith("\n"):
        raise PydanticCustomError("quantity_type", "must be {expected}", {"expected": EXPECTED[QUANTITY]})
    return value


def _int_or_string(pattern: str) -> WithJsonSchema:
    """As Kubernetes writes a quantity: the pattern is for text, the minimum for numbers."""
    return WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": pattern,
            "maxLength": quantities.MAX_LENGTH,
            "minimum": 0,
            "maximum": _LARGEST_NUMBER,
        }
    )


Memory: TypeAlias = Annotated[StrictStr | StrictInt, BeforeValidator(_memory), _int_or_string(quantities.PATTERN)]
Quantity: TypeAlias = Annotated[StrictStr | StrictInt, BeforeValidator(_quantity), _int_or_string(QUANTITY)]


def _plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """A part of a pod that Kubernetes checks: only that it is JSON of a sane size, without null."""
    problem = _not_plain(value, depth=0)
    if problem:
        raise PydanticCustomError("not_json", "{problem}", {"problem": problem})
    return value


def _not_plain(value: Any, depth: int) -> str | None:
    if depth > 16:
        return "is nested more than 16 deep"
    if isinstance(value, dict):
        if len(value) > 256:
            return "has an object of more than 256 fields"
        if not all(isinstance(key, str) for key in value):
            return "has a field whose name is not text: put the name in quotes"
        return next((found for item in value.values() if (found := _not_plain(item, depth + 1))), None)
    if isinstance(value, list):
        if len(value) > 256:
            return "has a list of more than 256 items"
        return next((found for item in value if (found := _not_plain(item, depth + 1))), None)
    if value is None:
        return f"has a null in it: {LEAVE_OUT}"
    if isinstance(value, str):
        if len(value) > 4096:
            return "has text of more than 4096 characters"
        return "has text that is no Unicode" if any("\ud800" <= letter <= "\udfff" for letter in value) else None
    if isinstance(value, (bool, int)):
        return "has a number beyond 64 bits" if abs(value) > 2**63 - 1 else None
    if isinstance(value, float):
        return None if abs(value) < float("inf") else "has a number that is not finite"
    return f"has a {type(value).__name__}, which JSON cannot say"


JsonObject: TypeAlias = Annotated[
    dict[StrictStr, Any],
    AfterValidator(_plain_json),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": 256}),
]
