"""Values of plain options without pydantic, which takes longer to load than most commands take to run.

Typer builds a validator of pydantic for every option of a command, also for those that nobody gave. Text, flags, lists
of text, and numbers and paths as they are need none. Whatever is not plainly right is left to Typer, which says what is
wrong with it. Without the parts of Typer that this stands on it does nothing, and everything is as slow as before.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from typer import core

_NUMBERS = {int: re.compile(r"-?[0-9]{1,18}\Z"), float: re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?\Z")}


class PlainValue:
    """In the place of a parameter's own validator, which is built if it is needed."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        described = param.type_descriptor
        if _is_unbounded(described.parameter_info):
            known, plain = _plain(described.annotation, value)
            if known:
                return plain
        return self._build().coerce(value, param=param, ctx=ctx)


def _is_unbounded(about: Any) -> bool:
    """Nothing was said of it that a validator would have to hold it to."""
    return all(getattr(about, name, None) is None for name in ("min", "max", "parser", "formats"))


def _plain(annotation: Any, value: Any) -> tuple[bool, Any]:
    """Is it plainly right, and what is it then?"""
    if annotation is str:
        return type(value) is str, value
    if annotation == list[str]:
        return isinstance(value, list | tuple) and all(type(each) is str for each in value), list(value)
    if annotation in _NUMBERS:
        if type(value) is annotation:
            return True, value
        if type(value) is str and _NUMBERS[annotation].match(value):
            return True, annotation(value)
    return False, None


@functools.cache
def use_plain_values() -> None:
    """From now on, for every parameter of every command of this process."""
    parameter = getattr(core, "_TyperParameter", None)
    validator = getattr(parameter, "get_runtime_param", None)
    if validator is not None:
        parameter.get_runtime_param = lambda self: PlainValue(lambda: validator(self))  # type: ignore[union-attr]
