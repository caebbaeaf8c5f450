"""Writes docs/errors.md, docs/control.md and docs/host-api.md from the code (`make docs`).

Names, order and meanings of errors come from the tree in `errors.py`, codes from the classes. The remedies are here; an
error without a remedy has that of its parent. Operations come from the declarations in `contract/`. A test compares
pages and code.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec

from tidings import errors
from tidings.contract import core
from tidings.contract.catalogue import OPERATIONS
from tidings.errors import TidingsError
from tidings.host.http_api import STATUS

EXIT_CODES = {
    0: "ok",
    1: "failed",
    2: "usage: what was typed or configured cannot be meant",
    3: "unhealthy: it runs, but not as promised",
    4: "denied",
    5: "unreachable: nobody answered",
    6: "conflict: somebody else holds it, or it changed meanwhile",
}

REMEDIES: dict[str, str] = {
    "TidingsError": "read the sentence; `tidings status` and `tidings logs` say more",
    "UsageError": "correct what was asked; `--help` of each command has examples",
    "InvalidName": "use letters, digits, `_` and `-`; dots separate the parts of a channel",
    "UnknownPeer": "`tidings who` lists the agents of the space",
    "AmbiguousPeer": "write the name exactly, or give the id",
    "UnknownMessage": "`tidings outbox list` and `tidings inbox` show what is kept",
    "DiskFull": "make room on that disk, then repeat the command",
    "ConfigError": "`tidings config` shows each setting and where it comes from; mend or remove that file",
    "WireError": "nothing was taken; whoever sent it has to send what the wire allows",
    "MalformedMessage": "the sender's program writes something else than a message: see the JSON Schema of the wire",
    "MalformedRecord": "somebody else than the steward wrote to the log: `tidings status` counts void records",
    "MalformedFrame": "it is kept aside and what it held is read from the log; if it goes on, `tidings logs`",
    "MalformedDigest": "whoever runs the other space looks at it; messages go on, and are compared again later",
    "HeaderRefused": "do not set `Nats-*`, `Status` or `KV-*` headers",
    "TooLarge": "send less, or a reference to where the rest is",
    "PageRefused": "the peer's operator has to look after its steward; the link goes on by itself once it answers well",
    "BadSignature": "the sender signs with another key or over other bytes: `tidings agent export` it again",
    "DeniedError": "`tidings agent access NAME` shows what it may; whoever runs the space can widen it",
    "AuthRevoked": "a narrowed agent: `tidings agent export NAME` again; a revoked one: `tidings agent add`",
    "LinkEnded": "make a new link record with a later end",
    "EndedThere": "`tidings link remove NAME` here too; to link again, ask the other operator for a new line",
    "WrongSpace": "is the address the peer's? If its operator made the space anew, make a new link",
    "NoSession": "open a session with the agent's key; the commands of `tidings` do so by themselves",
    "UnreachableError": "`tidings status` says which part does not answer",
    "BrokerUnreachable": "`tidings up` starts the space; for other machines with `--listen`. Is the way open?",
    "UntrustedServer": "it says what is wrong: a clock, a certificate that ended, or another server in its place",
    "ConnectionLost": "ask again: the connection is rebuilt by itself",
    "Reconnecting": "wait a moment and ask again",
    "StewardUnreachable": "`tidings logs steward`; it is started again by itself",
    "PeerUnheard": "ask again in a moment; if `tidings link list` says that it is paused, `tidings link resume NAME`",
    "HostUnreachable": "`tidings host up` starts it; `--direct` sends without it",
    "ConflictError": "look at what holds now, then ask again",
    "LeaseHeld": "stop the other steward; it is named with host and pid",
    "LeaseLost": "nothing: the steward that replaced it serves",
    "NameTaken": "take another name, or `tidings agent rotate NAME` for a new key",
    "IdBurned": "send it again under a new id",
    "IdReused": "an id names one message for ever: send the other one under an id of its own",
    "WrongState": "`tidings outbox show ID` says where it stands",
    "Superseded": "one session of an agent receives: end the other, or use another agent",
    "LinkConflict": "one worker carries a link: end the other; if its record was changed, make a new link",
    "TokenRefused": "rebuild the link: it reads the peer's log again, and takes nothing twice",
    "HostRuns": "use the one that runs, or `tidings host down`",
    "SpaceBusy": "wait for the process that is named, or `tidings down`",
    "NotLookedFor": "nothing: the host asks again by itself; `tidings outbox show ID` says where it stands",
    "OutcomeUnknown": "ask again with the same id: it takes effect once",
    "UnhealthyError": "`tidings status` lists the problems",
    "LogFull": "`tidings space set keep_age=7d`, or more room: `tidings up --budget 4G`; see operations.md",
    "MailboxFull": "wait until it reads; `tidings who` says when it was last seen",
    "QueueFull": "wait for results, or let more agents hold the role; `tidings status` counts what is queued",
    "LinkShareSpent": "nothing is lost and it goes on by itself; a larger budget of the log lets more in each day",
    "QuarantineFull": "look at what is in the quarantine of the link: let it in, or drop it with a reason",
    "HostBusy": "ask again in a moment; `tidings host status` says what it has at hand",
    "LogRegressed": "see operations.md, then `tidings space acknowledge`",
    "DeliveryLost": "its cause says why; read that range with `tidings history`, or ask those who wrote there",
    "LogGap": "restore the store from a backup; the log is damaged",
    "StreamMismatch": "move the store away, or give the stream back its settings",
    "StoreError": "ask again; if it goes on, the disk under TIDINGS_HOME fails",
    "StoreFull": "make room on the disk of TIDINGS_HOME and ask again; no restart is needed",
    "StoreReadOnly": "make the file and its disk writable and ask again; no restart is needed",
    "StoreBroken": "move the file away and restore a copy; `sqlite3 FILE .recover` saves what can be read",
    "StoreTooNew": "use the newer Tidings that wrote it, or set TIDINGS_HOME to another directory",
    "StoreBusy": "`tidings host status` names the process; end it or use it",
    "StoreClosed": "ask again when the host runs; the same id takes effect once",
    "BrokerFailed": "`tidings logs broker` says why",
    "PrerequisiteMissing": "`tidings doctor` says what to install",
}

CONTROL_HEAD = """# Control requests

`make docs` writes this page from the declarations in `contract/`, which also decode the requests. A client in any
language publishes strict JSON to `td.<space>.ctl.<service>.<its id>`, with a reply subject in its own inbox:

    {"op": "<8 to 64 characters, yours to choose>", "do": "<verb>", "<argument>": <value>, ...}

The answer is `{"ok": true, ...}` or `{"ok": false, "error": {"code": ..., "message": ...}}`; [errors](errors.md) lists
the codes. An argument in parentheses is optional; `null` is accepted where the schema allows it. The refusal of an
unknown argument or verb lists the known ones.

- `once`: the same `op` of the same agent takes effect once and always gets the same answer. Repeat
  it after an unknown outcome. (The steward remembers an agent's last 1,024 that wrote a record.)
- answer: the fields besides `ok`; one in parentheses may be missing. Their types are in `control.schema.json`.
- `waits`: the longest time that a request may ask the steward to wait, with `wait`.
- `host`: programs may also send it through the host of their machine ([its API](host-api.md)).

`health describe` returns the operations for agents, and `control.schema.json` in the package has this table as JSON
Schema. `admin` is for administrators of a space; an agent's credential does not reach it.
"""

LINK_WORKER_HEAD = """
## Link worker

The link worker of a space serves these on `run/links.sock` in the home of the space, a unix socket for this user only.
A connection carries one request: a line of strict JSON with `"do": "<service> <verb>"`. `follow` answers with one line
per event; each event has `event`, `link` and `at`.
"""

HTTP_HEAD = """# The HTTP API of the host

`make docs` writes this page from the declarations in `contract/`. The host listens on `run/host.sock` in its home, a
unix socket for this user only. An operation is `POST /v1/<service>/<verb>` with its fields as a JSON object
(`Content-Type: application/json`); the answer is a JSON object. Python programs use `tidings.connect(via="host")`.

First open a session. `POST /v1/session/challenge` returns a nonce. The program signs this text, five lines joined by
line feeds, with the agent's key (Ed25519; the nkey seed is in its credential):

    "tidings host session 1\\n<space id>\\n<agent id>\\n<path of the host's socket, without symbolic links>\\n<nonce>"

It sends the signature (URL-safe base64 without padding) with `POST /v1/session/open`. `source` tells the host where to
find the same identity: `["home", <home>, <space>, <agent name>]`, or `["bundle", <path of an exported bundle>]`. Send
the token in the answer as a Bearer in the `Authorization` header of every request marked *session*. A session sees only
its own agent.

A refusal is `{"error": {"code", "message", "retryable"}}`; [errors](errors.md) lists the codes. The refusal of an
unknown field lists the known ones. A request has at most 128 KiB unless another limit is given. The host reduces a
`wait` of more than 60 seconds to 60. A field in parentheses is optional.

*changes*: without an answer it is unknown whether the request took effect. Other requests can be repeated safely.
"""

TYPES: dict[type[msgspec.inspect.Type], str] = {
    msgspec.inspect.StrType: "string",
    msgspec.inspect.IntType: "integer",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "boolean",
    msgspec.inspect.NoneType: "null",
    msgspec.inspect.DictType: "object",
    msgspec.inspect.AnyType: "any value",
}
EVENTS_TEXT = """### GET /v1/events

Server-Sent Events: rows of the inbox after the one in the header `Last-Event-ID`, then new rows, as `message` or
`notice`; `state` when the connection changes. *session*
"""
FORWARDED_TEXT = """### Forwarded to the steward

[control](control.md) lists their arguments and answers. `op`: the id under which the request takes effect once;
`wait`: seconds that the steward may take, in addition to the usual five. *session*
"""


def tree() -> list[tuple[type[TidingsError], int, str]]:
    """Every error in the order of the tree, with its depth and its meaning."""
    found: list[tuple[type[TidingsError], int, str]] = [(TidingsError, 0, "everything Tidings raises on purpose")]
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([│├└─ ]+)(\w+) {2,}(.+)", line)
        if match:
            found.append((getattr(errors, match[2]), len(match[1]) // 4, match[3]))
    return found


def remedy(error: type[TidingsError]) -> str:
    return next(REMEDIES[cls.__name__] for cls in error.__mro__ if cls.__name__ in REMEDIES)


def error_page() -> str:
    """docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Written by `make docs` from the tree in `errors.py`. A command that fails says one sentence on standard error",
        "and ends with the code of its error; the library raises the class; answers on the wire carry the word.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
        "",
        "| error | word | exit code | it means | do |",
        "|---|---|---|---|---|",
    ]
    for error, depth, meaning in tree():
        name = f"{'· ' * depth}`{error.__name__}`"
        lines.append(f"| {name} | {error.code} | {error.exit_code} | {meaning} | {remedy(error)} |")
    return "\n".join(lines) + "\n"


def operation_page() -> str:
    """docs/control.md."""
    lines = [
        CONTROL_HEAD,
        "| service | verb | arguments | answer | | |",
        "|---|---|---|---|---|---|",
        *map(_operation_row, OPERATIONS.values()),
        LINK_WORKER_HEAD,
        "| service | verb | arguments | answer | | |",
        "|---|---|---|---|---|---|",
        *map(_operation_row, core.DECLARED["link worker"].values()),
    ]
    return "\n".join(lines) + "\n"


def _operation_row(operation: core.Operation) -> str:
    arguments = ", ".join(_field_text(field) for field in operation.fields.values())
    marks = ["once"] if operation.once else []
    if operation.waits:
        marks += ["waits without limit" if math.isinf(operation.waits) else f"waits {operation.waits:.0f} s"]
    marks += ["host"] if operation.host else []
    if operation.stream:
        answer = ", ".join(f"`{each.__struct_config__.tag}`" for each in get_args(operation.answer))
    else:
        answer = ", ".join(map(_field_text, _fields_of(operation.answer)))
    words = (operation.service, f"`{operation.verb}`", arguments, answer, operation.summary, ", ".join(marks))
    return f"| {' | '.join(words)} |"


def _fields_of(struct: Any) -> tuple[msgspec.inspect.Field, ...]:
    described = msgspec.inspect.type_info(struct)
    assert isinstance(described, msgspec.inspect.StructType)
    return described.fields


def _field_text(field: msgspec.inspect.Field) -> str:
    """Returns the name of a field, in parentheses if it may be missing."""
    return f"`{field.encode_name}`" if field.required else f"(`{field.encode_name}`)"


def http_page() -> str:
    """docs/host-api.md."""
    statuses = ", ".join(f"{number} {kind.code}" for kind, number in STATUS)
    forwarded = ", ".join(f"`{each.path}`" for each in OPERATIONS.values() if each.host)
    return "\n".join(
        [
            HTTP_HEAD,
            f"Status by error, the first that fits: {statuses}; any other is 500.",
            "",
            *(line for each in core.DECLARED["host"].values() for line in _operation_lines(each)),
            EVENTS_TEXT,
            FORWARDED_TEXT,
            f"{forwarded}.",
            "",
        ]
    )


def _type_text(kind: msgspec.inspect.Type) -> str:
    """Returns the name of a type in JSON."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return _type_text(inner)
        case msgspec.inspect.UnionType(types=choices):
            return " or ".join(map(_type_text, choices))
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"array of {_type_text(item)}"
        case _:
            return TYPES[type(kind)]


def _operation_lines(operation: core.Operation) -> list[str]:
    fields = ", ".join(f"{_field_text(each)} {_type_text(each.type)}" for each in operation.fields.values())
    answer = ", ".join(map(_field_text, _fields_of(operation.answer)))
    marks = [*(["session"] if operation.caller == "agent" else []), *(["changes"] if operation.changes else [])]
    limit = [f"- limit: {operation.limit // 1024} KiB"] if operation.limit != core.MAX_REQUEST else []
    said = " ".join([operation.summary, *(f"*{mark}*" for mark in marks)])
    lines = [f"- fields: {fields}"] * bool(fields) + [f"- answer: {answer}"] * bool(answer) + limit
    return [f"### POST {operation.path}", "", said, "", *lines, *([""] if lines else [])]


PAGES = {"errors.md": error_page, "control.md": operation_page, "host-api.md": http_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(sys.argv[1]) / name).write_text(page())
