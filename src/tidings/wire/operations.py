"""The control plane as one table: what may be asked of a steward, with which arguments, and what repeating it means.

    request   td.<space>.ctl.<service>.<sender>   {"op": ..., "do": ..., argument: value, ...}
    answer    {"ok": true, ...}   or   {"ok": false, "error": {"code": ..., "message": ...}}

From it come the checking of requests, the dispatch to handlers, the answer to `health describe`, `control.schema.json`
and docs/control.md; what each answers with is in `answers.py`.
`null` is the same as leaving an argument out; what a value means is the handler's to say. An operation with `once`
takes effect once for each `op` of its sender, whatever happened in between; any other may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tidings.wire.answers import ANSWERS
from tidings.wire.roster import Beat
from tidings.wire.rulings import Access, Channel, Link, Space

#: what every language reads exactly; a larger number is one that nobody was given
MOST = 2**53 - 1
#: seconds for which whoever asks about receipts, or about tasks, may be kept waiting
RECEIPT_WAIT, TASK_WAIT = 25.0, 20.0
#: and whoever accepts an invitation, until it is given its place
ACCEPT_WAIT = 40.0


class Kind(NamedTuple):
    """The kind of an argument, in words, in Python's types, and as JSON Schema."""

    words: str
    types: Any
    schema: Mapping[str, Any]


TEXT = Kind("a text", (str,), {"type": "string"})
COUNTS = Kind("a list of whole numbers", (list,), {"type": "array", "items": {"type": "integer"}})
TEXTS = Kind("a list of texts", (list,), {"type": "array", "items": {"type": "string"}})
COUNT = Kind("a whole number", (int,), {"type": "integer", "minimum": -MOST, "maximum": MOST})
NUMBER = Kind("a number", (int, float), {"type": "number", "minimum": -MOST, "maximum": MOST})
TIME = Kind("a time", (str,), {"type": "string", "format": "date-time"})
FLAG = Kind("true or false", (bool,), {"type": "boolean"})
TABLE = Kind("an object", (dict,), {"type": "object"})
ROWS = Kind("a list of objects", (list,), {"type": "array", "items": {"type": "object"}})
#: fields of a record, which is decoded by its own type
FIELD = Kind("a field of its record", (object,), {})


class Operation(NamedTuple):
    service: str
    do: str
    #: what it is for, in a sentence
    says: str
    arguments: Mapping[str, Kind]
    #: takes effect once for each `op`
    once: bool = False
    #: seconds for which it may be kept waiting, if it asks to be
    waits: float = 0.0
    #: programs may ask it through the host of their machine too: it concerns no session, and holds no secret
    host: bool = False
    #: what it answers with, a TypedDict of `answers.py`
    answer: Any = None


def _fields(record: type[msgspec.Struct], *without: str) -> dict[str, Kind]:
    return {name: FIELD for name in record.__struct_encode_fields__ if name not in without}


_HELD: Mapping[str, Kind] = {"seq": COUNT, "session": TEXT}
_SOUGHT: Mapping[str, Kind] = {"kind": TEXT, "to": TEXT, "since": TIME, "after": COUNT}
_LETTER: Mapping[str, Kind] = {"seq": COUNT, "letter": TEXT}
_PAGE: Mapping[str, Kind] = {
    "channel": TEXT,
    "limit": COUNT,
    "before": COUNT,
    "after": COUNT,
    "until": COUNT,
    "since": TIME,
    "sender": TEXT,
    "link": TEXT,
}
_RECEIPT: Mapping[str, Kind] = {
    "stream": TEXT,
    "receipts": ROWS,
    "seq": COUNT,
    "stage": TEXT,
    "sender": TEXT,
    "id": TEXT,
}
_WAITED: Mapping[str, Kind] = {"wait": NUMBER, "timeout": NUMBER}

_TABLE: tuple[Operation, ...] = (
    Operation(
        "accept",
        "redeem",
        "Become an agent by an invitation, or accept the link it offers, on the terms in `text`: asked by who has "
        "the line, signed by the new key, and for a link by the space that accepts (`proof`).",
        {"id": TEXT, "sig": TEXT, "name": TEXT, "text": TEXT, "proof": TEXT},
        waits=ACCEPT_WAIT,
    ),
    Operation(
        "accept",
        "offer",
        "What a space offers to be linked: asked by whoever has the line, signed by a new key.",
        {"id": TEXT, "sig": TEXT, "space": TEXT, "proof": TEXT},
    ),
    Operation("access", "get", "This agent's access record in force, with a new token if there is one.", {}),
    Operation(
        "admission",
        "links",
        "The link records in force, and the log: asked by this space's own worker of links.",
        {},
    ),
    Operation("admission", "facts", "The log as it is, and what a link lets in.", {"after": COUNT, "link": TEXT}),
    Operation("admission", "index", "What came in by links, in pages.", {"after": COUNT, "limit": COUNT}),
    Operation("admission", "listed", "Which of some channels are not listed, and have to be.", {"channels": TEXTS}),
    Operation(
        "admission",
        "people",
        "Who is in a linked space, as the worker verified it; asked without people, which version is known.",
        {
            "link": TEXT,
            "version": TEXT,
            "people": ROWS,
            "after": COUNT,
            "more": FLAG,
            "gone": TEXTS,
            "hidden": FLAG,
            "direct": FLAG,
            "tasks": FLAG,
        },
    ),
    Operation(
        "admission",
        "mail",
        "Whether direct messages may come in by a link.",
        {"link": TEXT, "mail": ROWS, "anew": FLAG},
    ),
    Operation("admission", "took", "Direct messages that were let in.", {"mail": ROWS}),
    Operation(
        "admission",
        "receipts",
        "What became of direct messages of other spaces, in pages.",
        {"epoch": TEXT, "after": COUNT, "mark": TEXT},
    ),
    Operation("admission", "tasks", "Whether tasks may come in by a link.", {"link": TEXT, "tasks": ROWS}),
    Operation("admission", "progress", "How far tasks of other spaces are here.", {"tasks": ROWS}),
    Operation("attention", "get", "What may wake this agent.", {"session": TEXT}, host=True),
    Operation(
        "attention", "set", "Say what may wake it.", {"mode": TEXT, "channels": TABLE, "session": TEXT}, host=True
    ),
    Operation("channel", "list", "The channels this agent may see, in pages.", {"after": TEXT}, host=True),
    Operation("channel", "info", "A channel as it is set.", {"channel": TEXT}, host=True),
    Operation(
        "channel",
        "set",
        "Change or remove a channel's settings.",
        {"channel": TEXT, **_fields(Channel, "op", "v", "at", "by", "name")},
        once=True,
        host=True,
    ),
    Operation(
        "confirm",
        "record",
        "Whether the record at a sequence is this agent's.",
        {"seq": COUNT, "stream": TEXT},
        host=True,
    ),
    Operation(
        "dead",
        "put",
        "Keep a message that a handler failed on as a dead letter.",
        {"kind": TEXT, "seq": COUNT, "error": TEXT, "attempts": COUNT},
    ),
    Operation("dead", "wanted", "Dead letters that are to be handed out again.", {}),
    Operation("dead", "list", "This agent's dead letters.", {}, host=True),
    Operation("dead", "show", "One of them, whole.", _LETTER),
    Operation("dead", "retry", "Have one handed out again.", _LETTER, host=True),
    Operation("dead", "drop", "Forget one.", _LETTER, host=True),
    Operation("health", "ping", "Every fact of the space, by a real round trip.", {}, host=True),
    Operation("health", "describe", "This table.", {}, host=True),
    Operation("history", "page", "A page of what was said, under the access of now.", _PAGE),
    Operation(
        "link",
        "hello",
        "What this space is and what it shares: asked by the worker of a linked space.",
        {},
    ),
    Operation(
        "link",
        "page",
        "What is shared and follows a token, oldest first; it says how far its asker has handled this log.",
        {"space": TEXT, "epoch": TEXT, "after": COUNT, "mark": TEXT, "limit": COUNT, "handled": COUNT},
    ),
    Operation("link", "fetch", "Single records that are shared.", {"seqs": COUNTS}),
    Operation("link", "digest", "Digests of what is shared, by channel and day.", {"through": COUNT, "after": TEXTS}),
    Operation(
        "link",
        "buckets",
        "The 256 digests of a channel and a day.",
        {"channel": TEXT, "day": TEXT, "through": COUNT},
    ),
    Operation(
        "link",
        "ids",
        "The records of some of these, in pages.",
        {"channel": TEXT, "day": TEXT, "buckets": COUNTS, "through": COUNT, "after": COUNT},
    ),
    Operation(
        "link",
        "roster",
        "Who is in this space, in signed statements and in pages, if the link shares that.",
        {"after": COUNT, "key": TEXT},
    ),
    Operation(
        "link",
        "mail",
        "Direct messages for agents of the asking space, in pages, if the link passes them.",
        {"epoch": TEXT, "people": TEXT, "after": COUNT, "marks": FIELD},
    ),
    Operation("link", "told", "What became of direct messages that were handed out there.", {"receipts": ROWS}),
    Operation(
        "link",
        "tasks",
        "Tasks for roles of the asking space, if the link passes them; none `without` askers, none for `busy` roles.",
        {"room": COUNT, "without": TEXTS, "busy": TEXTS},
    ),
    Operation("link", "progress", "How far tasks are that were handed out there.", {"tasks": ROWS}),
    Operation(
        "member",
        "join",
        "Become a member of a channel or pattern.",
        {"pattern": TEXT, "epoch": TEXT, "marks": FIELD},
        once=True,
    ),
    Operation(
        "member", "leave", "End the membership that a join began.", {"pattern": TEXT, "joined": COUNT}, once=True
    ),
    Operation("member", "list", "This agent's memberships.", {}, host=True),
    Operation("member", "members", "Who is in a channel, in pages.", {"channel": TEXT, "after": TEXT}, host=True),
    Operation(
        "member", "deaf", "Which of some agents would not hear a channel.", {"channel": TEXT, "ids": TEXTS}, host=True
    ),
    Operation("presence", "beat", "This agent is here; its status, activity and attention.", _fields(Beat)),
    Operation("receipt", "put", "What was delivered to this agent, or read by it.", _RECEIPT),
    Operation(
        "receipt",
        "wait",
        "Wait for a stage of something this agent sent.",
        {"id": TEXT, "to": TEXT, "seq": COUNT, "stage": TEXT, **_WAITED},
        waits=RECEIPT_WAIT,
    ),
    Operation(
        "receipt",
        "watch",
        "Wait for whatever happens to what it sent.",
        {"since": COUNT, **_WAITED},
        waits=RECEIPT_WAIT,
    ),
    Operation("receipt", "room", "How much room a mailbox has for this agent.", {"to": TEXT}, host=True),
    Operation("roster", "snapshot", "Who is here, in pages.", {"after": TEXT}),
    Operation("roster", "names", "The names of some ids.", {"ids": TEXTS}, host=True),
    Operation(
        "session",
        "take",
        "Receive for this agent from now on, or go on receiving.",
        {"session": TEXT, "held": COUNT, "ended": COUNT},
    ),
    Operation("session", "release", "Receive no more.", {"session": TEXT}),
    Operation("session", "ended", "Whether the session that receives has ended.", {}),
    Operation("space", "info", "The space's settings.", {}, host=True),
    Operation(
        "space", "links", "What each link of the space lets in, and since when, in pages.", {"after": TEXT}, host=True
    ),
    Operation(
        "task",
        "claim",
        "Take a task of a role, or wait for one.",
        {"role": TEXT, "wait": NUMBER, "session": TEXT},
        waits=TASK_WAIT,
    ),
    Operation("task", "beat", "The task is still worked on.", _HELD),
    Operation("task", "done", "Its result, signed.", {**_HELD, "result": TEXT, "sig": TEXT}),
    Operation("task", "fail", "It could not be done.", {**_HELD, "reason": TEXT, "retry": FLAG, "untouched": FLAG}),
    Operation("task", "check", "Whether anybody holds a role.", {"role": TEXT}, host=True),
    Operation("task", "room", "How many more tasks of this agent a role takes.", {"role": TEXT}, host=True),
    Operation(
        "task",
        "result",
        "What became of a task this agent asked.",
        {"id": TEXT, "seq": COUNT, "wait": NUMBER},
        waits=TASK_WAIT,
    ),
    Operation("trace", "get", "The life of one message.", {"id": TEXT, "seq": COUNT}),
    Operation("trace", "find", "Where a message of this agent is stored.", {"id": TEXT, **_SOUGHT}, host=True),
    Operation("trace", "which", "Which of some ids may be stored.", {"ids": TEXTS, **_SOUGHT}, host=True),
    Operation(
        "admin",
        "grant",
        "Write an access record.",
        {"id": TEXT, **_fields(Access, "op", "v", "at", "revoked")},
        once=True,
    ),
    Operation("admin", "revoke", "Take an agent's access away.", {"id": TEXT}),
    Operation(
        "admin", "space_set", "Change the space's settings.", _fields(Space, "op", "v", "at", "steward_key"), once=True
    ),
    Operation("admin", "rotate_key", "Rule under a new key.", {}),
    Operation("admin", "table", "The table of memberships as of a sequence.", {"seq": COUNT, "offset": COUNT}),
    Operation("admin", "issued", "Which access records of some agents the log has.", {"ids": TEXTS}),
    Operation("admin", "unread", "What an agent has not read.", {"id": TEXT}),
    Operation(
        "admin",
        "redeemed",
        "What came of an invitation that somebody accepted.",
        {"invitation": TEXT, "id": TEXT, "error": TABLE},
    ),
    Operation(
        "admin",
        "link_set",
        "Write a link record: what passes between this space and another.",
        _fields(Link, "op", "v", "at", "state"),
        once=True,
    ),
    Operation("admin", "link_end", "Let nothing pass a link any more.", {"link": TEXT}, once=True),
    Operation("admin", "links", "Which record of each link the log has.", {}),
    Operation("admin", "acknowledge", "What was lost has been seen to.", {}),
)
OPERATIONS: Mapping[tuple[str, str], Operation] = {
    (each.service, each.do): each._replace(answer=ANSWERS[each.service, each.do]) for each in _TABLE
}


def describe(services: Iterable[str]) -> list[dict[str, Any]]:
    """The operations of these services, for whoever asks for them."""
    wanted = set(services)
    return [
        {
            "service": each.service,
            "do": each.do,
            "says": each.says,
            "arguments": {name: kind.words for name, kind in each.arguments.items()},
            "once": each.once,
            "waits": each.waits,
            "host": each.host,
            "answer": sorted(answer_fields(each)),
        }
        for each in OPERATIONS.values()
        if each.service in wanted
    ]


def answer_fields(operation: Operation) -> dict[str, bool]:
    """The fields of an answer, and which of them are always there."""
    answer = operation.answer
    return {name: name in answer.__required_keys__ for name in answer.__annotations__}
