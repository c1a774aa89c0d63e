"""Reading `response_format`: plain text, any JSON object, or JSON of a schema. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import BadRequest
from .fields import Fields, refuse

MAX_SCHEMA = 2**16
SCHEMA = "response_format.json_schema.schema"


def schema_of(fields: Fields, *, supported: bool) -> str | None:
    """The JSON schema, as JSON, that texts must follow; None: any text may be made."""
    wanted = fields.get("response_format")
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        refuse("response_format", "an object with a type", wanted)
    own = Fields(wanted, "response_format.")
    schema: Any
    match own.required_text("type"):
        case "text":
            return None
        case "json_object":
            schema = {"type": "object"}
        case "json_schema":
            described = own.required("json_schema")
            if not isinstance(described, Mapping):
                refuse("response_format.json_schema", "an object with a schema", described)
            schema = Fields(described, "response_format.json_schema.").required("schema")
            if not isinstance(schema, Mapping):
                refuse(SCHEMA, "an object", schema)
        case other:
            refuse("response_format.type", "one of text, json_object, json_schema", other)
    if not supported:
        raise BadRequest(
            "response_format is not supported by this engine, which was installed without the extra `structured`: "
            "leave it out",
            param="response_format",
            code="unsupported_parameter",
        )
    for name, neutral in (("ignore_eos", False), ("min_tokens", 0)):
        if fields.get(name) not in (None, neutral):
            raise BadRequest(
                f"{name} cannot be given with response_format: a text ends where its schema does", param=name
            )
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA:
        raise BadRequest(f"{SCHEMA}: at most {MAX_SCHEMA} characters, got {len(text)}", param=SCHEMA)
    return text
