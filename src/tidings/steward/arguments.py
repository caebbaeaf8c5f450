"""What each control request may say: the verbs of every service, and the kind of each of their arguments.

One table. A request is held against it before its handler runs, so that a handler meets no value of a kind it did not
think of, and whoever misspells an argument hears the known ones instead of an answer that ignored it. `null` is the
same as leaving an argument out. What a value means, and which arguments are needed, is the handler's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tidings.errors import UsageError
from tidings.steward.requests import Request
from tidings.wire.roster import Beat
from tidings.wire.rulings import Access, Channel, Space

#: what JetStream counts with; a larger number is one that nobody was given
MOST = 2**63 - 1


class Kind(NamedTuple):
    words: str
    types: Any


TEXT = Kind("a text", (str,))
TEXTS = Kind("a list of texts", (list,))
COUNT = Kind("a whole number", (int,))
NUMBER = Kind("a number", (int, float))
FLAG = Kind("true or false", (bool,))
TABLE = Kind("an object", (dict,))
ROWS = Kind("a list of objects", (list,))
#: fields of a record, which is decoded by its own type
FIELD = Kind("a field of its record", (object,))


def _fields(record: type[msgspec.Struct], *without: str) -> dict[str, Kind]:
    return {name: FIELD for name in record.__struct_encode_fields__ if name not in without}


_TASK: Mapping[str, Kind] = {"seq": COUNT, "session": TEXT}
_SOUGHT: Mapping[str, Kind] = {"kind": TEXT, "to": TEXT, "since": COUNT, "after": COUNT}
ARGUMENTS: Mapping[tuple[str, str], Mapping[str, Kind]] = {
    ("member", "join"): {"pattern": TEXT, "epoch": TEXT, "marks": FIELD},
    ("member", "leave"): {"pattern": TEXT, "joined": COUNT},
    ("member", "list"): {},
    ("member", "members"): {"channel": TEXT, "after": TEXT},
    ("member", "deaf"): {"channel": TEXT, "ids": TEXTS},
    ("channel", "list"): {"after": TEXT},
    ("channel", "info"): {"channel": TEXT},
    ("channel", "set"): {"channel": TEXT, **_fields(Channel, "op", "v", "at", "by", "name")},
    ("space", "info"): {},
    ("access", "get"): {},
    ("history", "page"): {
        "channel": TEXT,
        "limit": COUNT,
        "before": COUNT,
        "after": COUNT,
        "until": COUNT,
        "since_ns": COUNT,
        "sender": TEXT,
    },
    ("confirm", "record"): {"seq": COUNT, "stream": TEXT},
    ("presence", "beat"): _fields(Beat),
    ("roster", "snapshot"): {"after": TEXT},
    ("roster", "names"): {"ids": TEXTS},
    ("session", "take"): {"session": TEXT, "held": COUNT, "ended": COUNT},
    ("session", "release"): {"session": TEXT},
    ("session", "ended"): {},
    ("attention", "get"): {"session": TEXT},
    ("attention", "set"): {"mode": TEXT, "channels": TABLE, "session": TEXT},
    ("receipt", "put"): {
        "stream": TEXT,
        "receipts": ROWS,
        "seq": COUNT,
        "stage": TEXT,
        "sender": TEXT,
        "id": TEXT,
    },
    ("receipt", "wait"): {"id": TEXT, "to": TEXT, "seq": COUNT, "stage": TEXT, "wait": NUMBER, "timeout": NUMBER},
    ("receipt", "watch"): {"since": COUNT, "wait": NUMBER, "timeout": NUMBER},
    ("receipt", "room"): {"to": TEXT},
    ("trace", "get"): {"id": TEXT, "seq": COUNT},
    ("trace", "find"): {"id": TEXT, **_SOUGHT},
    ("trace", "which"): {"ids": TEXTS, **_SOUGHT},
    ("task", "claim"): {"role": TEXT, "wait": NUMBER, "session": TEXT},
    ("task", "beat"): _TASK,
    ("task", "done"): {**_TASK, "result": TEXT, "sig": TEXT},
    ("task", "fail"): {**_TASK, "reason": TEXT, "retry": FLAG, "untouched": FLAG},
    ("task", "check"): {"role": TEXT},
    ("task", "room"): {"role": TEXT},
    ("task", "result"): {"id": TEXT, "seq": COUNT, "wait": NUMBER},
    ("dead", "put"): {"kind": TEXT, "seq": COUNT, "error": TEXT, "attempts": COUNT},
    ("dead", "wanted"): {},
    ("dead", "list"): {},
    ("dead", "show"): {"seq": COUNT, "letter": TEXT},
    ("dead", "retry"): {"seq": COUNT, "letter": TEXT},
    ("dead", "drop"): {"seq": COUNT, "letter": TEXT},
    ("health", "ping"): {},
    ("admin", "grant"): {"id": TEXT, **_fields(Access, "op", "v", "at", "revoked")},
    ("admin", "revoke"): {"id": TEXT},
    ("admin", "space_set"): _fields(Space, "op", "v", "at", "steward_key"),
    ("admin", "rotate_key"): {},
    ("admin", "table"): {"seq": COUNT, "offset": COUNT},
    ("admin", "issued"): {"ids": TEXTS},
    ("admin", "unread"): {"id": TEXT},
    ("admin", "acknowledge"): {},
}


def check_arguments(request: Request) -> None:
    """Raise UsageError for a verb, an argument or a kind of value that the table does not know."""
    known = ARGUMENTS.get((request.service, request.do))
    if known is None:
        raise UsageError(_no_such_verb(request))
    unknown = sorted(set(request.arguments) - set(known))
    if unknown:
        named = ", ".join(repr(name[:64]) for name in unknown[:8])
        takes = f"the arguments {', '.join(sorted(known))}" if known else "no arguments"
        raise UsageError(f"{request.service} {request.do} takes {takes}, not {named}")
    for name, value in request.arguments.items():
        kind = known[name]
        if value is not None and not _is(kind, value):
            raise UsageError(f"{request.service} {request.do}: `{name}` must be {kind.words}")


def _no_such_verb(request: Request) -> str:
    verbs = [do for service, do in ARGUMENTS if service == request.service]
    known = f"its verbs are {', '.join(sorted(verbs))}" if verbs else "it has no verbs yet"
    return f"the service {request.service} has no {request.do[:64]!r}: {known}"


def _is(kind: Kind, value: Any) -> bool:
    if kind is FIELD:
        return True
    if isinstance(value, bool):
        return kind is FLAG
    if not isinstance(value, kind.types):
        return False
    if kind in (COUNT, NUMBER):
        return bool(-MOST <= value <= MOST)
    items: list[Any] = value if kind in (TEXTS, ROWS) else []
    return all(isinstance(item, str if kind is TEXTS else dict) for item in items)
