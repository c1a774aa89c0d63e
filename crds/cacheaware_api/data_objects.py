"""Secrets and ConfigMaps that come with a pool: their entries, as text.

Of a Secret no value is ever part of a message.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from cacheaware_api import errors
from cacheaware_api.errors import ObjectInvalid, Problem
from cacheaware_api.metadata import ObjectMeta
from cacheaware_api.schema import DATA_KEY, Line, SpecModel, StrictBool, StrictStr
from cacheaware_api.yaml_documents import Document

MAX_ENTRY = 1024 * 1024  # bytes; an API server takes no larger object

_Key = Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=DATA_KEY)]
_Entries = Annotated[dict[_Key, Annotated[StrictStr, Field(max_length=2 * MAX_ENTRY)]], Field(max_length=1024)]


class Secret(SpecModel):
    api_version: Literal["v1"]
    kind: Literal["Secret"]
    metadata: ObjectMeta
    type: Line | None = None
    immutable: StrictBool | None = None
    data: _Entries = Field(default_factory=dict)
    string_data: _Entries = Field(default_factory=dict)

    @property
    def entries(self) -> Mapping[str, bytes]:
        """Every entry's value; raises `ObjectInvalid` where one is no base64. `stringData` wins, as on the server."""
        found, problems = dict[str, bytes](), list[Problem]()
        for key, text in self.data.items():
            try:
                found[key] = base64.b64decode("".join(text.split()), validate=True)
            except (binascii.Error, ValueError):  # ValueError: letters beyond ASCII
                fix = "encode the value, or write it under stringData as it is"
                problems.append(Problem(f"{label(self)}: {errors.path_text(('data', key))}", "must be base64", fix))
        if problems:
            raise ObjectInvalid(problems)
        return found | {key: text.encode() for key, text in self.string_data.items()}


class ConfigMap(SpecModel):
    api_version: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: ObjectMeta
    immutable: StrictBool | None = None
    data: _Entries = Field(default_factory=dict)
    binary_data: _Entries = Field(default_factory=dict)


DataObject = TypeVar("DataObject", Secret, ConfigMap)


def parse_data_object(model: type[DataObject], document: Document) -> DataObject:
    """Read one document as a Secret or ConfigMap; raises `ObjectInvalid` with every problem in it."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        name = _name(document.data) or f"in document {document.number}"
        raise ObjectInvalid(
            dataclasses.replace(problem, path=f"{model.__name__} {name}: {problem.path}")
            for problem in errors.problems(error, model, line_of=document.line, secret=model is Secret)
        ) from None


def label(data_object: Secret | ConfigMap) -> str:
    """How messages call it."""
    return f"{data_object.kind} {data_object.metadata.name}"


def _name(data: Mapping[str, Any]) -> str | None:
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name[:253] if isinstance(name, str) and name.isprintable() else None
