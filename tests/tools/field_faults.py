"""Every way in which one field of a request can be invalid, generated from the declarations.

The types say which JSON values a field accepts; msgspec, which decodes requests, is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import inspect as types

from tidings.contract.core import MAX_REQUEST, Operation
from tidings.wire.roster import Attention
from tools.examples import example

Kind = Literal["null", "boolean", "integer", "number", "string", "array", "object"]
Path = tuple[str | int, ...]
#: a value of each kind of JSON that no field accepts as a value of another kind
VALUES: dict[Kind, Any] = {
    "null": None,
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "x",
    "array": [],
    "object": {},
}
EVERY_KIND = frozenset(VALUES)
KINDS: dict[type[types.Type], frozenset[Kind]] = {
    types.NoneType: frozenset({"null"}),
    types.BoolType: frozenset({"boolean"}),
    types.IntType: frozenset({"integer"}),
    types.FloatType: frozenset({"integer", "number"}),
    types.DictType: frozenset({"object"}),
    types.StructType: frozenset({"object"}),
    types.ListType: frozenset({"array"}),
    types.VarTupleType: frozenset({"array"}),
    types.TupleType: frozenset({"array"}),
    types.AnyType: EVERY_KIND,
}
TEXTS = (types.StrType, types.BytesType, types.DateTimeType, types.LiteralType, types.EnumType)


@dataclass(frozen=True)
class FieldFault:
    """The arguments of a request of which one field is invalid. A refusal contains `named`."""

    fault: str
    arguments: dict[str, Any]
    named: str


@dataclass(frozen=True)
class _Place:
    """A field, or an item of one, of a valid request."""

    path: Path
    type: types.Type

    @property
    def name(self) -> str:
        """Returns the path as refusals write it: receipts[0].seq."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).removeprefix(".")


def whole(operation: Operation) -> dict[str, Any]:
    """Returns valid arguments with every field of the operation."""
    return {name: example(field.type) for name, field in operation.fields.items()}


def accepted_kinds(kind: types.Type) -> frozenset[Kind]:
    """Returns the kinds of JSON value that a type accepts."""
    match kind:
        case types.Metadata(type=inner):
            return accepted_kinds(inner)
        case types.UnionType(types=choices):
            return frozenset[Kind]().union(*map(accepted_kinds, choices))
        case types.StructType(array_like=True):
            return frozenset({"array"})
        case _ if isinstance(kind, TEXTS):
            return frozenset({"string"})
        case _:
            return KINDS[type(kind)]


def field_faults(operation: Operation) -> Iterator[FieldFault]:
    """Yields requests of which one field is null, missing, unknown, of the wrong type or too large."""
    valid = whole(operation)
    yield FieldFault("unknown", {**valid, "colour": 1}, "unknown field 'colour'")
    for name, field in operation.fields.items():
        if field.required:
            yield FieldFault("missing", {k: v for k, v in valid.items() if k != name}, f"missing field `{name}`")
        for place in _places((name,), field.type):
            yield from _faults_at(place, valid)


def oversize_requests(operation: Operation) -> Iterator[FieldFault]:
    """Yields requests that are too large as a whole because of one field."""
    valid = whole(operation)
    for name, field in operation.fields.items():
        if not accepted_kinds(field.type).isdisjoint({"string", "array", "object"}):
            named = f": the request has more than {operation.limit:,} bytes; its largest field is `{name}`"
            yield FieldFault("oversize", {**valid, name: "x" * operation.limit}, named)


def _places(path: Path, kind: types.Type) -> Iterator[_Place]:
    yield _Place(path, kind)
    match _first(kind):
        case types.StructType(fields=fields, array_like=True):
            for number, field in enumerate(fields):
                yield from _places((*path, number), field.type)
        case types.StructType(fields=fields):
            for field in fields:
                yield from _places((*path, field.encode_name), field.type)
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            yield from _places((*path, 0), item)
        case types.TupleType(item_types=items):
            for number, item in enumerate(items):
                yield from _places((*path, number), item)


def _faults_at(place: _Place, valid: dict[str, Any]) -> Iterator[FieldFault]:
    named = f"`{place.name}`"
    for kind, value in VALUES.items():
        if kind not in accepted_kinds(place.type):
            fault = "null" if kind == "null" else f"wrong type: {kind}"
            yield FieldFault(f"{place.name} {fault}", _with(valid, place.path, value), named)
    for fault, value in _too_large(place.type):
        yield FieldFault(f"{place.name} {fault}", _with(valid, place.path, value), named)
    first = _first(place.type)
    if isinstance(first, types.StructType) and not first.array_like:
        inside = _at(valid, place.path)
        for field in first.fields:
            if field.required:
                fewer = {name: value for name, value in inside.items() if name != field.encode_name}
                missing = f"missing field `{place.name}.{field.encode_name}`"
                yield FieldFault(f"{place.name} missing", _with(valid, place.path, fewer), missing)
        if first.cls is not Attention:  # answers have it too, and readers ignore fields that they do not know
            unknown = _with(valid, place.path, {**inside, "colour": 1})
            yield FieldFault(f"{place.name} unknown", unknown, f"{named}: object contains unknown field colour")


def _too_large(kind: types.Type) -> Iterator[tuple[str, Any]]:
    """Yields values of the right kind that are above a bound, below one, or not of a set."""
    match _first(kind):
        case types.IntType(ge=least):
            yield "above every integer", 2**53
            if least is not None:
                yield "too small", least - 1
        case types.FloatType(ge=least):
            yield "above every number", 1e300
            if least is not None:
                yield "too small", least - 1
        case types.StrType(max_length=most, min_length=least, pattern=pattern):
            if most is not None:
                yield "too long", "x" * (most + 1)
            if least:
                yield "too short", "x" * (least - 1)
            if pattern is not None:
                yield "not of its pattern", "x\n"
        case types.BytesType(max_length=most):
            yield "not base64", "!"
            if most is not None and most < MAX_REQUEST // 2:
                yield "too long", "AAAA" * (most // 3 + 1)
        case types.DateTimeType():
            yield "no time", "yesterday"
            yield "a time without a zone", "2025-11-15T12:00:00"
        case types.LiteralType() | types.EnumType():
            yield "no such value", "colour"
        case (types.ListType(item_type=item) | types.VarTupleType(item_type=item)) as rows:
            if rows.max_length is not None and rows.max_length <= MAX_REQUEST // 512:
                yield "too many", [example(item)] * (rows.max_length + 1)
            if rows.min_length:
                yield "too few", [example(item)] * (rows.min_length - 1)


def _first(kind: types.Type) -> types.Type:
    """Returns the alternative of which `example` returns a value, without its bounds' wrapper."""
    match kind:
        case types.Metadata(type=inner):
            return _first(inner)
        case types.UnionType(types=choices):
            return _first(choices[0])
        case _:
            return kind


def _at(arguments: Any, path: Path) -> Any:
    for part in path:
        arguments = arguments[part]
    return arguments


def _with(valid: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Returns the arguments with another value at a path."""
    changed = deepcopy(valid)
    _at(changed, path[:-1])[path[-1]] = value
    return changed
