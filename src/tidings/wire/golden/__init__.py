"""The cases of the golden vectors: what another language must agree with us on, verdicts written by hand.

`vectors()` adds the values that only code can compute (tags, shards, signatures) from fixed seeds, so the same code
always gives the same file, and a change of any value shows in review. The seeds are public on purpose and must never
own anything.
"""

from __future__ import annotations

import json
from typing import Any

import nkeys

from tidings.wire import keys, seal, signing, subjects, tags
from tidings.wire.headers import CONTROL_HEADERS, DIRECT_GET_HEADERS, REPUBLISH_HEADERS
from tidings.wire.message import MAX_MENTIONS, MAX_PARTS, MAX_PAYLOAD, decode
from tidings.wire.strict_json import MAX_DEPTH


def _key(byte: int, prefix: int) -> keys.KeyPair:
    return keys.KeyPair(nkeys.encode_seed(bytes([byte]) * 32, prefix).decode())


ADA, BOB = _key(1, keys.USER), _key(2, keys.USER)
SPACE, OTHER_SPACE = _key(3, keys.ACCOUNT), _key(4, keys.ACCOUNT)
SECRET = bytes(range(32))
SPACE_NAME = "main"
MESSAGE_ID = "019a8a3c-5c00-7abc-8def-0123456789ab"

_LONG_CHANNEL = ".".join(["abcdefghi"] * 20)

NAMES: dict[str, dict[str, list[str]]] = {
    "token": {
        "valid": ["a", "A-Z_09", "-", "x" * 64],
        "invalid": ["", "x" * 65, "a.b", "a b", "*", ">", "ü", "a\n", "a/b", "٣"],
    },
    "channel": {
        "valid": ["general", "team.backend.db", _LONG_CHANNEL],
        "invalid": ["", ".", "a.", ".a", "a..b", "a.*", ">", "a b", "a\n", _LONG_CHANNEL + ".a", "x" * 65],
    },
    "pattern": {
        "valid": ["general", "*", ">", "team.*", "team.>", "*.db.>", "*.*"],
        "invalid": ["", ">.a", "a.>.b", "a*", "team.>>", "a..*", "**", "a.>\n"],
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


def vectors() -> dict[str, Any]:
    return {
        "about": "Golden vectors of the Tidings wire; regenerate with `python -m tidings.wire.schema`.",
        "limits": {"payload": MAX_PAYLOAD, "mentions": MAX_MENTIONS, "parts": MAX_PARTS, "depth": MAX_DEPTH},
        "keys": _keys(),
        "names": NAMES,
        "covers": [{"wide": wide, "narrow": narrow, "covers": verdict} for wide, narrow, verdict in COVERS],
        "tags": [{"secret": SECRET.hex(), "text": text, "tag": tags.tag(SECRET, text)} for text in TAGGED],
        "shards": [{"owner": key.id, "shard": subjects.shard_of(key.id)} for key in (ADA, BOB)],
        "subjects": {"space": SPACE_NAME, "valid": _valid_subjects(), "invalid": _invalid_subjects()},
        "signatures": _signatures(),
        "sealed": _sealed(),
        "messages": {"valid": _valid_messages(), "invalid": _invalid_messages()},
        "headers": _header_blocks(),
    }


def _keys() -> dict[str, dict[str, str]]:
    named = {"ada": (ADA, 1), "bob": (BOB, 2), "space": (SPACE, 3), "other_space": (OTHER_SPACE, 4)}
    return {name: {"seed_hex": bytes([byte] * 32).hex(), "id": key.id} for name, (key, byte) in named.items()}


def _valid_subjects() -> list[dict[str, Any]]:
    spelled, tag = subjects.Subjects(SPACE_NAME), tags.tag(SECRET, "general")
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


def _signatures() -> list[dict[str, str]]:
    payload = '{"hello":"wörld"}'
    made = []
    for kind, destination in [("chat", "team.backend"), ("dm", BOB.id), ("task", "reviewer"), ("result", "t1")]:
        signed = signing.signed_bytes(SPACE.id, kind, ADA.id, destination, payload.encode())
        made.append(
            {
                "space_id": SPACE.id,
                "kind": kind,
                "sender": ADA.id,
                "destination": destination,
                "payload": payload,
                "signed_bytes_hex": signed.hex(),
                "signature": signing.sign(ADA, SPACE.id, kind, destination, payload.encode()),
            }
        )
    return made


def _sealed() -> list[dict[str, str]]:
    """Ada writes to Bob; `nonce` is fixed here and random everywhere else."""
    nonce = bytes(range(24))
    message = decode(json.dumps(_base(context="plan", reply_to=MESSAGE_ID)).encode())
    sealed = seal.seal_message(ADA, BOB.id, message, nonce=nonce)
    return [
        {
            "sender": ADA.id,
            "target": BOB.id,
            "shared_hex": ADA.shared_with(BOB.id).hex(),
            "nonce_hex": nonce.hex(),
            "message": message.raw.decode(),
            "sealed": sealed.raw.decode(),
        }
    ]


def _base(**changes: Any) -> dict[str, Any]:
    return {
        "id": MESSAGE_ID,
        "ts": "2025-11-15T12:00:00.000Z",
        "from": {"id": ADA.id, "name": "ada", "role": "planner"},
        "parts": [{"kind": "text", "text": "hello"}],
    } | changes


def _artifact(**changes: Any) -> dict[str, Any]:
    made = {
        "kind": "artifact",
        "name": "plan.pdf",
        "media_type": "application/pdf",
        "digest": "sha256:" + "0" * 64,
        "size": 3,
    }
    return _base(parts=[made | changes])


def _valid_messages() -> list[dict[str, Any]]:
    extension = {"kind": "com.example.widget", "anything": [1, {"kind": "nested"}]}
    full = _base(
        priority="now",
        mentions=[{"id": BOB.id, "name": "bob"}],
        reply_to="019a8a3c-5bff-7abc-8def-0123456789ab",
        context="release 7",
    )
    return [
        {"why": why, "payload": json.dumps(document, ensure_ascii=False), "text": text}
        for why, document, text in [
            ("the least a message needs", _base(), "hello"),
            ("every field", full, "hello"),
            ("no role", _base(**{"from": {"id": ADA.id, "name": "ada"}}), "hello"),
            ("unknown fields at any level are ignored", _base(x=1, **{"from": _base()["from"] | {"y": {}}}), "hello"),
            ("a field of the wire may not set raw", _base(raw="forged"), "hello"),
            ("text parts are lines", _base(parts=[{"kind": "text", "text": t} for t in ("a", "ü😀")]), "a\nü😀"),
            ("data is any JSON value", _base(parts=[{"kind": "data", "data": [None, 1.5, {"a": True}]}]), ""),
            ("an artifact reference", _artifact(uri="https://files.example/plan.pdf"), ""),
            ("an unknown reverse-DNS kind is kept and ignored", _base(parts=[extension]), ""),
        ]
    ]


def _invalid_messages() -> list[dict[str, str]]:
    def drop(name: str) -> dict[str, Any]:
        return {key: value for key, value in _base().items() if key != name}

    shaped: list[tuple[str, Any]] = [
        ("an array", [_base()]),
        *((f"no {name}", drop(name)) for name in ("id", "ts", "from", "parts")),
        ("an id that is not UUIDv7", _base(id=MESSAGE_ID.replace("-7", "-4"))),
        ("an id in upper case", _base(id=MESSAGE_ID.upper())),
        ("ts without milliseconds", _base(ts="2025-11-15T12:00:00Z")),
        ("ts with an offset", _base(ts="2025-11-15T12:00:00.000+00:00")),
        ("ts as a number", _base(ts=1763208000000)),
        ("a sender id that is no user key", _base(**{"from": {"id": SPACE.id, "name": "ada"}})),
        ("a sender name that is no token", _base(**{"from": {"id": ADA.id, "name": "ada\u001b[2J"}})),
        ("a name ending in a newline", _base(**{"from": {"id": ADA.id, "name": "ada\n"}})),
        ("an unknown priority", _base(priority="urgent")),
        ("no parts", _base(parts=[])),
        ("65 parts", _base(parts=[{"kind": "text", "text": ""}] * 65)),
        ("a part without a kind", _base(parts=[{"text": "x"}])),
        ("an unknown bare kind", _base(parts=[{"kind": "widget"}])),
        ("a bare kind that only we use inside", _base(parts=[{"kind": "extension", "of": "a.b", "body": {}}])),
        ("33 mentions", _base(mentions=[{"id": BOB.id, "name": "bob"}] * 33)),
        ("reply_to that is no message id", _base(reply_to="yesterday")),
        ("a control character in context", _base(context="a\u0000b")),
        ("a short digest", _artifact(digest="sha256:00")),
        ("an artifact name with a path", _artifact(name="../plan.pdf")),
        ("a negative size", _artifact(size=-1)),
        ("a size that is no number", _artifact(size="3")),
    ]
    made = [
        {"why": why, "payload": json.dumps(document, ensure_ascii=False), "seen_by": "schema"}
        for why, document in shaped
    ]
    return made + [{"why": why, "payload": text, "seen_by": "reader"} for why, text in _unreadable()]


def _unreadable() -> list[tuple[str, str]]:
    """What a JSON Schema cannot see: the reader of the bytes has to refuse it."""
    good = json.dumps(_base())
    nested = json.dumps(_base(parts=[{"kind": "data", "data": 0}])).replace('"data": 0', '"data": %s')
    return [
        ("nothing", ""),
        ("a day that does not exist", json.dumps(_base(ts="2025-02-30T12:00:00.000Z"))),
        ("a key twice", good[:-1] + f', "id": "{MESSAGE_ID}"}}'),
        ("a key twice, spelled differently", good[:-1] + f', "\\u0069d": "{MESSAGE_ID}"}}'),
        ("a key twice inside data", nested % '{"a": 1, "a": 1}'),
        ("NaN", nested % "NaN"),
        ("Infinity", nested % "-Infinity"),
        ("a number that overflows a double", nested % "1e999"),
        ("an integer beyond 64 bits", nested % "9223372036854775808"),
        ("33 levels", nested % ("[" * 30 + "]" * 30)),
        ("a lone surrogate", nested % '"\\ud800"'),
        ("trailing bytes", good + " {}"),
        ("a byte order mark", "\ufeff" + good),
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
