"""A valid value for every type that a declaration uses."""

from __future__ import annotations

from typing import Any

from msgspec import inspect as types


def example(kind: types.Type) -> Any:
    """Returns a value that the type accepts, as plain JSON values."""
    match kind:
        case types.Metadata(type=inner):
            return example(inner)
        case types.UnionType(types=choices):
            return example(choices[0])
        case types.IntType(ge=least):
            return max(1, least or 1)
        case types.LiteralType(values=values):
            return values[0]
        case types.EnumType(cls=enum):
            return next(iter(enum)).value
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return [example(item)]
        case types.TupleType(item_types=items):
            return [example(item) for item in items]
        case types.StructType(fields=fields, array_like=True):
            return [example(field.type) for field in fields]
        case types.StructType(fields=fields):
            return {field.encode_name: example(field.type) for field in fields}
        case types.DictType():
            return {}
        case _:
            return SIMPLE[type(kind)]


SIMPLE: dict[type[types.Type], Any] = {
    types.StrType: "facade-1",
    types.BytesType: "",
    types.BoolType: True,
    types.FloatType: 1.5,
    types.NoneType: None,
    types.AnyType: {},
    types.DateTimeType: "2025-11-15T12:00:00.000Z",
}
