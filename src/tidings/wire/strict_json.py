"""Strict JSON: every reader of the same bytes sees the same document, or none of them does.

Python, Spark and other languages disagree about duplicate keys, NaN, lone surrogates, huge numbers and deep nesting;
a signed message that two readers understand differently is a hole. So `loads` refuses all of them with a sentence
that says which, and `dumps` writes nothing that `loads` would refuse. It does not canonicalise: received bytes are
kept verbatim elsewhere and never written again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from tidings.errors import MalformedMessage

MAX_DEPTH = 32
MAX_NUMBER = 64
_INT64 = range(-(2**63), 2**63)
# The closing quote is optional and the body possessive: an unterminated string costs one pass, not one per quote.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")


def loads(data: bytes) -> Any:
    """The document in `data`; MalformedMessage for anything that is not strict JSON."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _nests_too_deep(data):
        raise MalformedMessage(f"JSON nests deeper than {MAX_DEPTH} levels, or its brackets do not pair")
    try:
        document = _DECODER.decode(data.decode())
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"JSON is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise MalformedMessage(f"not JSON: {error}") from error
    if _SURROGATE_ESCAPE.search(data):
        _refuse_lone_surrogates(document)
    return document


def dumps(document: Any) -> bytes:
    """Compact UTF-8. MalformedMessage for what `loads` would not read back."""
    data = write(document)
    loads(data)
    return data


def write(document: Any) -> bytes:
    """Like `dumps`, for a caller that reads the bytes back itself."""
    try:
        return _ENCODER.encode(document).encode()
    except UnicodeEncodeError as error:
        raise MalformedMessage("text holds a lone surrogate, which UTF-8 cannot carry") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"cannot be written as JSON: {error}") from error


def _nests_too_deep(data: bytes) -> bool:
    """Outside strings, MAX_DEPTH rounds of removing innermost pairs must leave no bracket."""
    brackets = _STRING.sub(b"", data).translate(_ONE_BRACKET, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def _refuse_lone_surrogates(document: Any) -> None:
    try:
        _ENCODER.encode(document).encode()
    except UnicodeEncodeError as error:
        raise MalformedMessage("JSON text holds a lone surrogate") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedMessage(f"JSON object has the key {twice[:64]!r} twice")
    return made


def _integer(digits: str) -> int:
    if len(digits) <= 20 and (number := int(digits)) in _INT64:
        return number
    raise MalformedMessage(f"a JSON integer of {len(digits)} characters does not fit 64 bits: send it as text")


def _float(digits: str) -> float:
    if len(digits) <= MAX_NUMBER and math.isfinite(number := float(digits)):
        return number
    raise MalformedMessage(f"a JSON number of {len(digits)} characters does not fit a double: send it as text")


def _constant(name: str) -> NoReturn:
    raise MalformedMessage(f"JSON has no {name}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
