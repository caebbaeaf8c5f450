"""Golden vectors of what is spelled: names, patterns, tags, shards, subjects and header blocks."""

from __future__ import annotations

from typing import Any

from golden.cast import ADA, BOB, MESSAGE_ID, SECRET, SPACE, SPACE_NAME, key_of
from tidings.wire import subjects
from tidings.wire.records import CONTROL_HEADERS, DIRECT_GET_HEADERS, REPUBLISH_HEADERS, record_mark

_LONG_CHANNEL = ".".join(["abcdefghi"] * 20)  # 199 characters
_LONG_TOKENS = ".".join(["x" * 64] * 3)  # 194

NAMES: dict[str, dict[str, list[str]]] = {
    "token": {
        "valid": ["a", "A-Z_09", "-", "x" * 64],
        "invalid": ["", "x" * 65, "a.b", "a b", "*", ">", "ü", "a\n", "a/b", "٣"],
    },
    "channel": {
        "valid": [
            "general",
            "team.backend.db",
            "x" * 64,
            _LONG_CHANNEL,
            _LONG_CHANNEL + "j",
            _LONG_TOKENS + ".abcde",
            ".".join("a" * 100),
        ],
        "invalid": [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a.*",
            ">",
            "a b",
            "a\n",
            "#general",
            _LONG_CHANNEL + ".a",
            _LONG_CHANNEL + "jk",
            _LONG_TOKENS + ".abcdef",
            ".".join("a" * 101),
            "x" * 65,
            "a." + "x" * 65,
        ],
    },
    "pattern": {
        "valid": ["general", "*", ">", "team.*", "team.>", "*.db.>", "*.*", _LONG_CHANNEL + "j", _LONG_TOKENS + ".*.>"],
        "invalid": ["", ">.a", "a.>.b", "a*", "team.>>", "a..*", "**", "a.>\n", _LONG_CHANNEL + ".>", "x" * 65],
    },
    "agent_id": {
        "valid": [ADA.id, BOB.id],
        "invalid": ["", "ada", SPACE.id, ADA.id.lower(), ADA.id[:-1], ADA.id + "A", "U" + "1" * 55, ADA.id + "\n"],
    },
    "message_id": {
        "valid": [MESSAGE_ID, "00000000-0000-7000-8000-000000000000"],
        "invalid": [
            "",
            MESSAGE_ID.upper(),
            MESSAGE_ID.replace("-7", "-4"),
            MESSAGE_ID.replace("-8", "-c"),
            MESSAGE_ID.replace("-", ""),
            "{" + MESSAGE_ID + "}",
            MESSAGE_ID + "\n",
        ],
    },
}

#: wide, narrow (a channel or a pattern), whether every channel of the narrow one is covered
COVERS: list[tuple[str, str, bool]] = [
    ("general", "general", True),
    ("general", "General", False),
    ("general", "generals", False),
    ("team.>", "team", False),
    ("team.>", "team.a", True),
    ("team.>", "team.a.b", True),
    ("team.*", "team.a", True),
    ("team.*", "team.a.b", False),
    ("*.a", "team.a", True),
    (">", "a.b.c", True),
    ("*", "a.b", False),
    (">", "team.>", True),
    ("team.>", "team.*", True),
    ("team.>", "team.*.>", True),
    ("team.*", "team.>", False),
    ("team.a", "team.*", False),
    ("*.*", "team.*", True),
    ("*", ">", False),
    ("a.>", "a..b", False),
    ("a.>.b", "a.x.b", False),
]

TAGGED = ["general", "team.>", "*.db"]
#: seeds of one repeated byte: enough of them that every shard occurs
SHARDED = range(1, 49)


def vectors() -> dict[str, Any]:
    owners = [key_of(byte).id for byte in SHARDED]
    return {
        "names": NAMES,
        "covers": [{"wide": wide, "narrow": narrow, "covers": verdict} for wide, narrow, verdict in COVERS],
        "tags": [{"secret": SECRET.hex(), "text": text, "tag": subjects.tag(SECRET, text)} for text in TAGGED],
        "shards": [{"owner": owner, "shard": subjects.shard_of(owner)} for owner in owners],
        "subjects": {"space": SPACE_NAME, "valid": _valid_subjects(), "invalid": _invalid_subjects()},
        "headers": _header_blocks(),
        "marks": [_mark(seq) for seq in (1, 2)],
    }


def _mark(seq: int) -> dict[str, str]:
    """What tells a record from another one at its sequence; the time is text because it is above 2^53."""
    when, subject, payload = 1_763_208_000_000_000_000 + seq, f"td.{SPACE_NAME}.chat.{ADA.id}.general", "{}" * seq
    return {
        "time_ns": str(when),
        "subject": subject,
        "payload": payload,
        "mark": record_mark(when, subject, payload.encode()),
    }


def _valid_subjects() -> list[dict[str, Any]]:
    spelled, tag = subjects.Subjects(SPACE_NAME), subjects.tag(SECRET, "general")
    ada, bob = ADA.id, BOB.id
    return [
        {"builder": builder, "arguments": arguments, "subject": getattr(spelled, builder)(*arguments), "type": type_}
        for builder, arguments, type_ in [
            ("chat", [ada, "team.backend"], "Chat"),
            ("via", ["west", ada, "general"], "Via"),
            ("member", [bob, tag], "MemberSubject"),
            ("access", [bob], "AccessSubject"),
            ("channel", [tag], "ChannelSubject"),
            ("link", ["west"], "LinkSubject"),
            ("direct", [bob, ada], "Direct"),
            ("task", ["reviewer", ada], "Task"),
            ("delivery", [bob], "Delivery"),
            ("audit", ["receipt", ada], "Audit"),
            ("dead", ["task", "k1"], "Dead"),
            ("control", ["health", ada], "Control"),
        ]
    ] + [
        {"subject": spelled.steward_lease, "type": "StewardLeaseSubject"},
        {"subject": spelled.space_record, "type": "SpaceSubject"},
        {"subject": spelled.delivery_lease, "type": "DeliveryLease"},
    ]


def _invalid_subjects() -> list[str]:
    ada, bob = ADA.id, BOB.id
    wrong = (subjects.shard_of(bob) + 1) % subjects.SHARDS
    return [
        "",
        "td",
        "td.main",
        "td.main.",
        f"td.main2.chat.{ada}.general",
        f"td.Main.chat.{ada}.general",
        f"xtd.main.chat.{ada}.general",
        f"td.main.chat.{ada}",
        f"td.main.chat.{ada}.",
        f"td.main.chat.{ada}..general",
        f"td.main.chat.{ada}.*",
        f"td.main.chat.{ada}.>",
        "td.main.chat.ada.general",
        f"td.main.chat.{SPACE.id}.general",
        f"td.main.live.chat.{ada}.general",
        f"td.main.dm.{wrong}.{bob}.{ada}",
        f"td.main.dm.0{subjects.shard_of(bob)}.{bob}.{ada}",
        f"td.main.dlv.{wrong}.{bob}",
        f"td.main.dlv.lease.{bob}",
        f"td.main.member.{bob}.general",
        "td.main.channel.general",
        "td.main.lease.deliver",
        "td.main.space.x",
        f"td.main.ctl.nosuch.{ada}",
        f"td.main.task.a.b.{ada}",
        f"$JS.API.STREAM.DELETE.{ada}",
    ]


def _header_blocks() -> list[dict[str, Any]]:
    appended = [
        ["Nats-Stream", "LOG_main"],
        ["Nats-Subject", f"td.main.chat.{ADA.id}.general"],
        ["Nats-Sequence", "7"],
        ["Nats-Time-Stamp", "2025-11-15T12:00:00.000000001Z"],
    ]
    page, copy = (
        [*appended, ["Nats-Num-Pending", "3"], ["Nats-Last-Sequence", "6"]],
        [*appended, ["Nats-Last-Sequence", "6"]],
    )
    shadow = [["Nats-Subject", "td.main.space"], ["Nats-Sequence", "999"], ["Status", "204"]]
    near = [["Nats-UpTo-Sequence", "9"]]
    info = [["Nats-Request-Info", '{"acc":"AGENTS"}']]
    return [
        _block("a page", "direct_get", [["Td-Sig", "s"], ["Nats-Msg-Id", "i"]], page, []),
        _block("a live copy", "republish", [["td-sig", "s"]], copy, []),
        _block("no headers of the sender's", "republish", [], copy, []),
        _block("shadowed metadata", "direct_get", shadow, page, ["Nats-Subject", "Nats-Sequence", "Status"]),
        _block("a shadow right before the tail", "direct_get", near, page, ["Nats-UpTo-Sequence"]),
        _block(
            "reserved in any case",
            "republish",
            [["nats-ttl", "1"], ["KV-Operation", "DEL"]],
            copy,
            ["nats-ttl", "KV-Operation"],
        ),
        _block(
            "only this spelling of Nats-Msg-Id is the sender's",
            "republish",
            [["Nats-Msg-Id", "i"], ["NATS-MSG-ID", "i"], ["nats-msg-id", "i"], ["Nats-Msg-Idx", "i"]],
            copy,
            ["NATS-MSG-ID", "nats-msg-id", "Nats-Msg-Idx"],
        ),
        _block(
            "what only begins like a reserved name is the sender's",
            "republish",
            [
                ["Nats", "1"],
                ["NatsStream", "1"],
                ["KV", "1"],
                ["KVOperation", "1"],
                ["Status-Code", "1"],
                ["X-Nats-TTL", "1"],
            ],
            copy,
            [],
        ),
        _block(
            "every reserved prefix, in any case, with nothing after it",
            "republish",
            [["NATS-", "1"], ["kv-", "1"], ["STATUS", "1"], ["Nats-Request-Info", "{}"]],
            copy,
            ["NATS-", "kv-", "STATUS", "Nats-Request-Info"],
        ),
        _block(
            "the whole tail of a broker before the broker's own", "republish", copy, copy, [name for name, _ in copy]
        ),
        _block(
            "a sender's Nats-Stream right before the broker's",
            "republish",
            [["Nats-Stream", "x"]],
            copy,
            ["Nats-Stream"],
        ),
        _block(
            "names of the broker in another case are no tail",
            "republish",
            [["nats-stream", "x"], ["NATS-SUBJECT", "y"]],
            copy,
            ["nats-stream", "NATS-SUBJECT"],
        ),
        _block("an empty value, and blanks around one", "republish", [["A", ""], ["B", "c d"]], copy, []),
        _block("a control request", "control", [["A", "b"]], info, []),
        {
            "why": "end of a page",
            "block": "NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\n\r\n",
            "policy": "direct_get",
            "status": 204,
            "own": [],
            "refused": [],
        },
        *({"why": why, "block": block, "malformed": True} for why, block in _BAD_BLOCKS),
    ]


def _block(
    why: str, policy: str, own: list[list[str]], appended: list[list[str]], refused: list[str]
) -> dict[str, Any]:
    lines = ["NATS/1.0", *(f"{name}: {value}" for name, value in own + appended)]
    block = "\r\n".join(lines) + "\r\n\r\n"
    return {"why": why, "block": block, "policy": policy, "status": None, "own": own, "refused": refused}


_BAD_BLOCKS = [
    ("empty", ""),
    ("no empty line at the end", "NATS/1.0\r\nA: b\r\n"),
    ("another protocol", "HTTP/1.1\r\nA: b\r\n\r\n"),
    ("a line without a colon", "NATS/1.0\r\nA\r\n\r\n"),
    ("a folded line", "NATS/1.0\r\nA: b\r\n c: d\r\n\r\n"),
    ("a bare line feed", "NATS/1.0\r\nA: b\nNats-Subject: z\r\n\r\n"),
    ("an empty line inside", "NATS/1.0\r\n\r\nA: b\r\n\r\n"),
    ("a space before the colon", "NATS/1.0\r\nA : b\r\n\r\n"),
]

POLICIES = {"direct_get": DIRECT_GET_HEADERS, "republish": REPUBLISH_HEADERS, "control": CONTROL_HEADERS}
