"""Schemas as they are published: what a model needs to call a tool and to read its answer, and no byte more.

Every tool's schemas are in the context of every conversation. pydantic writes titles that repeat the names, defaults
that nobody sends, and `anyOf` for what may be left out; none of it changes what is taken or answered. What may be null
and need not be there is simply not there, in arguments and in answers (`plain`), so its schema does not speak of null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]


def trimmed_arguments(schema: Schema) -> Schema:
    """The schema of a tool's arguments; no other than these are taken."""
    return _trimmed(schema, defaults=True) | {"additionalProperties": False}


def trimmed_answer(schema: Schema, *, elsewhere: Mapping[str, str] | None = None) -> Schema:
    """The schema of a tool's answer. `elsewhere`: models that another tool describes, and what to say instead."""
    left = _trimmed(schema, defaults=False)
    named = {name: {"type": "object", "description": words} for name, words in (elsewhere or {}).items()}
    used = {name: named.get(name, each) for name, each in left.get("$defs", {}).items()}
    reached = {name: each for name, each in used.items() if f'#/$defs/{name}"' in json.dumps({**left, "$defs": used})}
    return left | ({"$defs": reached} if reached else {})


def _trimmed(schema: Schema, *, defaults: bool, nullable: bool = True) -> Schema:
    """`defaults`: those that say something are kept."""
    left = {name: value for name, value in schema.items() if name not in ("title", "default")}
    if defaults and schema.get("default"):
        left["default"] = schema["default"]
    if left.get("additionalProperties") is True:
        del left["additionalProperties"]
    required = schema.get("required", ())
    for group in ("properties", "$defs"):
        if group in left:
            left[group] = {
                name: _trimmed(each, defaults=defaults, nullable=name in required or group == "$defs")
                for name, each in schema[group].items()
            }
    for part in ("items", "additionalProperties"):
        if isinstance(left.get(part), dict):
            left[part] = _trimmed(left[part], defaults=defaults)
    return _one_type(left, nullable=nullable)


def _one_type(schema: Schema, *, nullable: bool) -> Schema:
    """`string or null` as one type; whatever else is a choice stays one."""
    choices = schema.get("anyOf", ())
    others = [each for each in choices if each.get("type") != "null"]
    if len(others) != 1 or len(choices) != 2 or (nullable and "type" not in others[0]):
        return schema
    one = {name: value for name, value in schema.items() if name != "anyOf"} | others[0]
    return {**one, "type": [one["type"], "null"]} if nullable else one


def plain(model: BaseModel) -> dict[str, Any]:
    """An answer without the fields that are as they are unless told. A notice is always told."""
    fields = type(model).model_fields
    return {
        name: _plain(value)
        for name, value in model
        if fields[name].is_required() or value != fields[name].default or (name == "notice" and value)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return plain(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value
