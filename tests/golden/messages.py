"""Golden vectors of messages: documents, signatures, seals, and whole records with the reason they are refused for."""

from __future__ import annotations

import base64
import json
from typing import Any

from golden.cast import ADA, BOB, MESSAGE_ID, OTHER_SPACE, SPACE, SPACE_NAME
from tidings.wire import seal, signing
from tidings.wire.message import MAX_PAYLOAD, ExtensionPart, decode, encode
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

_NONCE = bytes(range(24))


def vectors() -> dict[str, Any]:
    return {
        "signatures": _signatures(),
        "bad_signatures": _bad_signatures(),
        "sealed": _sealed(),
        "bad_seals": _bad_seals(),
        "sealed_tasks": _sealed_tasks(),
        "messages": {"valid": _valid_messages(), "invalid": _invalid_messages()},
        "records": _records(),
    }


def _signatures() -> list[dict[str, str]]:
    payload = '{"hello":"wörld"}'
    made = []
    for kind, destination in [
        ("chat", "team.backend"),
        ("dm", BOB.id),
        ("task", "reviewer"),
        ("result", f"{BOB.id}.{MESSAGE_ID}"),
    ]:
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
    message = decode(json.dumps(base(context="plan", reply_to=MESSAGE_ID)).encode())
    sealed = seal.seal_message(ADA, BOB.id, message, nonce=_NONCE)
    return [
        {
            "sender": ADA.id,
            "target": BOB.id,
            "shared_hex": ADA.shared_with(BOB.id).hex(),
            "nonce_hex": _NONCE.hex(),
            "message": message.raw.decode(),
            "sealed": sealed.raw.decode(),
        }
    ]


def _sealed_tasks() -> list[dict[str, str]]:
    """Ada asks a role of another space that Bob holds. What is random everywhere else is 0, 1, 2, ... here."""
    terms = {"kind": seal.TASK_PART, "deadline_s": 60}
    message = decode(json.dumps(base(context="plan", parts=[{"kind": "text", "text": "would you?"}, terms])).encode())
    sealed = seal.seal_task(ADA, [BOB.id], message, random=lambda count: bytes(range(count)))
    payload = encode(sealed)
    destination = f"reviewer@{OTHER_SPACE.id}"
    return [
        {
            "space_id": SPACE.id,
            "asker": ADA.id,
            "reader": BOB.id,
            "message": message.raw.decode(),
            "sealed": payload.decode(),
            "subject": Subjects(SPACE_NAME).task(destination, ADA.id),
            "destination": destination,
            "signature": signing.sign(ADA, SPACE.id, "task", destination, payload),
        }
    ]


def _bad_signatures() -> list[dict[str, str]]:
    """Each differs in one thing from what was signed, or is another spelling of the signature."""
    good = {
        "space_id": SPACE.id,
        "kind": "chat",
        "sender": ADA.id,
        "destination": "general",
        "payload": '{"hello":"w\u00f6rld"}',
    }
    signature = signing.sign(ADA, SPACE.id, "chat", "general", good["payload"].encode())
    raw = base64.urlsafe_b64decode(signature + "==")
    larger = (int.from_bytes(raw[32:], "little") + _GROUP_ORDER).to_bytes(32, "little")
    last = signature[-1]
    return [
        good | {"why": why, "signature": signature} | change
        for why, change in [
            ("another space", {"space_id": OTHER_SPACE.id}),
            ("another kind", {"kind": "task"}),
            ("a kind that nobody signs", {"kind": "ctl"}),
            ("another sender", {"sender": BOB.id}),
            ("another channel", {"destination": "General"}),
            ("a destination with a newline", {"destination": "gen\neral"}),
            ("another payload", {"payload": good["payload"] + " "}),
            ("nothing", {"signature": ""}),
            ("padding", {"signature": signature + "=="}),
            ("a newline after it", {"signature": signature + "\n"}),
            ("a blank before it", {"signature": " " + signature}),
            ("hex", {"signature": raw.hex()}),
            ("one character less", {"signature": signature[:-1]}),
            ("bits after the last byte", {"signature": signature[:-1] + _next_letter(last)}),
            ("a scalar above the order of the group", {"signature": _text_of(raw[:32] + larger)}),
            ("all zeros", {"signature": "A" * 86}),
            ("a sender whose checksum is wrong", {"sender": _misspelled(ADA.id)}),
        ]
    ] + [
        good | {"why": "the alphabet of plain base64", **_with_plain_alphabet(good)},
    ]


#: of the group that ed25519 signs in
_GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493


def _text_of(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _next_letter(letter: str) -> str:
    """The letter whose upper two bits are the same: a lax decoder reads the same bytes."""
    return {"A": "B", "Q": "R", "g": "h", "w": "x"}[letter]


def _misspelled(key: str) -> str:
    return key[:-1] + ("A" if key[-1] != "A" else "B")


def _with_plain_alphabet(good: dict[str, str]) -> dict[str, str]:
    """A payload whose signature has a letter in which the two alphabets of base64 differ."""
    for count in range(100):
        payload = good["payload"] + " " * count
        signature = signing.sign(ADA, SPACE.id, "chat", "general", payload.encode())
        if "-" in signature or "_" in signature:
            return {"payload": payload, "signature": signature.replace("-", "+").replace("_", "/")}
    raise AssertionError("none of a hundred signatures has such a letter")


def _bad_seals() -> list[dict[str, str]]:
    """Bob cannot open what says it is from Ada: the seal does not hold (`seal`), or what it is made of (`reader`)."""
    message = decode(json.dumps(base()).encode())
    sealed = seal.seal_message(ADA, BOB.id, message, nonce=_NONCE)
    (part,) = sealed.parts
    assert isinstance(part, ExtensionPart)
    ciphertext = base64.b64decode(part.body["ct"])

    def with_part(**changes: Any) -> str:
        fields = {key: value for key, value in (part.body | changes).items() if value is not None}
        return json.dumps(base(parts=[{"kind": seal.SEALED_KIND, **fields}]))

    def with_inside(plaintext: str) -> str:
        made = seal.encrypt(ADA, BOB.id, MESSAGE_ID, plaintext.encode(), _NONCE)
        return with_part(ct=base64.b64encode(made).decode())

    other_id = MESSAGE_ID[:-1] + "c"
    to_herself = seal.seal_message(ADA, ADA.id, message, nonce=_NONCE)
    turned = seal.encrypt(BOB, ADA.id, MESSAGE_ID, b'{"parts":[{"kind":"text","text":"x"}]}', _NONCE)
    return [
        {"why": why, "sender": ADA.id, "target": BOB.id, "sealed": text, "seen_by": seen_by}
        for why, text, seen_by in [
            (
                "a bit of the ciphertext is another",
                with_part(ct=_b64(bytes([ciphertext[0] ^ 1]) + ciphertext[1:])),
                "seal",
            ),
            ("a bit of its tag is another", with_part(ct=_b64(ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]))), "seal"),
            ("another nonce", with_part(n=_b64(bytes(24))), "seal"),
            ("another message id", json.dumps(json.loads(sealed.raw) | {"id": other_id}), "seal"),
            ("sealed for somebody else", to_herself.raw.decode(), "seal"),
            ("what Bob sealed for Ada, turned around", with_part(ct=_b64(turned)), "seal"),
            ("a nonce of 23 bytes", with_part(n=_b64(bytes(23))), "reader"),
            ("a ciphertext without its tag", with_part(ct=_b64(bytes(15))), "reader"),
            ("no nonce", with_part(n=None), "reader"),
            ("another version", with_part(v=2), "reader"),
            ("the alphabet of URL-safe base64", with_part(n="-_" + part.body["n"][2:]), "reader"),
            ("inside is no JSON", with_inside("hello"), "reader"),
            ("inside is no object", with_inside("[]"), "reader"),
            ("inside has no parts", with_inside("{}"), "reader"),
            ("inside has a key twice", with_inside('{"parts":[{"kind":"text","text":"a"}],"parts":[]}'), "reader"),
        ]
    ]


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _records() -> list[dict[str, Any]]:
    """Whole records: subject, the sender's own header block and payload, and what a reader says of each.

    The first check that fails names the reason, so a record that is wrong in two ways shows the order. `blanks`: so
    many are appended to the payload.
    """
    plain = json.dumps(base())
    lies = json.dumps(base(**{"from": {"id": BOB.id, "name": "ada"}}))
    spelled = Subjects(SPACE_NAME)
    chat, direct = spelled.chat(ADA.id, "general"), spelled.direct(BOB.id, ADA.id)

    def signed(payload: str, kind: str = "chat", destination: str = "general", key: KeyPair = ADA) -> str:
        return signing.sign(key, SPACE.id, kind, destination, payload.encode())

    def record(
        why: str, subject: str, fields: list[tuple[str, str]], payload: str, refused: str | None
    ) -> dict[str, Any]:
        block = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields) + "\r\n"
        return {"why": why, "subject": subject, "block": block, "payload": payload, "refused": refused}

    own = [("Td-Sig", signed(plain)), ("Nats-Msg-Id", MESSAGE_ID)]
    return [
        record("a message to a channel", chat, own, plain, None),
        record("its header in lower case", chat, [("td-sig", own[0][1])], plain, None),
        record("a header of the sender's own", chat, [*own, ("Trace-Id", "1")], plain, None),
        record("a direct message", direct, [("Td-Sig", signed(plain, "dm", BOB.id))], plain, None),
        record(
            "a task", spelled.task("reviewer", ADA.id), [("Td-Sig", signed(plain, "task", "reviewer"))], plain, None
        ),
        record("no subject of this space", chat.replace("main", "west"), own, plain, "malformed_subject"),
        record("the subject of a live copy", chat.replace("main.", "main.live."), own, plain, "malformed_subject"),
        record("the wrong shard", direct.replace(".dm.", ".dm.1"), [], plain, "malformed_subject"),
        record("a ruling record", spelled.space_record, [], plain, "wrong_kind"),
        record("a control request", spelled.control("health", ADA.id), [], plain, "wrong_kind"),
        record("what a link admitted", spelled.via("west", ADA.id, "general"), own, plain, "wrong_kind"),
        record("a header of the broker's", chat, [*own, ("Nats-Subject", chat)], plain, "header"),
        record("a reserved header, and no signature", chat, [("KV-Operation", "DEL")], plain, "header"),
        record("two signatures", chat, [own[0], own[0]], plain, "header"),
        record("two signatures in two cases", chat, [own[0], ("td-sig", own[0][1])], plain, "header"),
        record("no signature", chat, [own[1]], plain, "signature"),
        record("no headers", chat, [], plain, "signature"),
        record("one byte more than a payload may have", chat, own, plain, "too_large")
        | {"blanks": MAX_PAYLOAD + 1 - len(plain)},
        record(
            "signed for another channel", chat, [("Td-Sig", signed(plain, destination="other"))], plain, "signature"
        ),
        record("signed by somebody else", chat, [("Td-Sig", signed(plain, key=BOB))], plain, "signature"),
        record("not JSON, and not signed", chat, own, "hello", "signature"),
        record("not JSON", chat, [("Td-Sig", signed("hello"))], "hello", "malformed"),
        record("not JSON of a message", chat, [("Td-Sig", signed("{}"))], "{}", "malformed"),
        record("from somebody else", chat, [("Td-Sig", signed(lies))], lies, "sender_mismatch"),
    ]


def base(**changes: Any) -> dict[str, Any]:
    return {
        "id": MESSAGE_ID,
        "ts": "2025-11-15T12:00:00.000Z",
        "from": {"id": ADA.id, "name": "ada", "role": "planner"},
        "parts": [{"kind": "text", "text": "hello"}],
    } | changes


def artifact(**changes: Any) -> dict[str, Any]:
    made = {
        "kind": "artifact",
        "name": "plan.pdf",
        "media_type": "application/pdf",
        "digest": "sha256:" + "0" * 64,
        "size": 3,
    }
    return base(parts=[made | changes])


def _valid_messages() -> list[dict[str, Any]]:
    extension = {"kind": "com.example.widget", "anything": [1, {"kind": "nested"}]}
    full = base(
        priority="now",
        mentions=[{"id": BOB.id, "name": "bob"}],
        reply_to="019a8a3c-5bff-7abc-8def-0123456789ab",
        context="release 7",
    )
    return [
        {"why": why, "payload": json.dumps(document, ensure_ascii=False), "text": text}
        for why, document, text in [
            ("the least a message needs", base(), "hello"),
            ("every field", full, "hello"),
            ("no role", base(**{"from": {"id": ADA.id, "name": "ada"}}), "hello"),
            ("unknown fields at any level are ignored", base(x=1, **{"from": base()["from"] | {"y": {}}}), "hello"),
            ("a field of the wire may not set raw", base(raw="forged"), "hello"),
            ("text parts are lines", base(parts=[{"kind": "text", "text": t} for t in ("a", "ü😀")]), "a\nü😀"),
            ("data is any JSON value", base(parts=[{"kind": "data", "data": [None, 1.5, {"a": True}]}]), ""),
            ("an artifact reference", artifact(uri="https://files.example/plan.pdf"), ""),
            ("the largest size", artifact(size=2**53 - 1), ""),
            ("a size spelled with a fraction", artifact(size=3.0), ""),
            ("29 February of a leap year", base(ts="2000-02-29T23:59:59.999Z"), "hello"),
            ("the first moment", base(ts="0001-01-01T00:00:00.000Z"), "hello"),
            ("an unknown reverse-DNS kind is kept and ignored", base(parts=[extension]), ""),
        ]
    ]


def _invalid_messages() -> list[dict[str, str]]:
    def drop(name: str) -> dict[str, Any]:
        return {key: value for key, value in base().items() if key != name}

    shaped: list[tuple[str, Any]] = [
        ("an array", [base()]),
        *((f"no {name}", drop(name)) for name in ("id", "ts", "from", "parts")),
        ("an id that is not UUIDv7", base(id=MESSAGE_ID.replace("-7", "-4"))),
        ("an id in upper case", base(id=MESSAGE_ID.upper())),
        ("ts without milliseconds", base(ts="2025-11-15T12:00:00Z")),
        ("ts with an offset", base(ts="2025-11-15T12:00:00.000+00:00")),
        ("ts as a number", base(ts=1763208000000)),
        ("a day that does not exist", base(ts="2025-02-30T12:00:00.000Z")),
        ("29 February of a year that is no leap year", base(ts="1900-02-29T12:00:00.000Z")),
        ("the year 0", base(ts="0000-01-01T00:00:00.000Z")),
        ("hour 24", base(ts="2025-11-15T24:00:00.000Z")),
        ("a leap second", base(ts="2016-12-31T23:59:60.000Z")),
        ("a size above 2^53 - 1", artifact(size=2**53)),
        ("a size that is not whole", artifact(size=2.5)),
        ("a sender id that is no user key", base(**{"from": {"id": SPACE.id, "name": "ada"}})),
        ("a sender name that is no token", base(**{"from": {"id": ADA.id, "name": "ada\u001b[2J"}})),
        ("a name ending in a newline", base(**{"from": {"id": ADA.id, "name": "ada\n"}})),
        ("an unknown priority", base(priority="urgent")),
        ("no parts", base(parts=[])),
        ("65 parts", base(parts=[{"kind": "text", "text": ""}] * 65)),
        ("a part without a kind", base(parts=[{"text": "x"}])),
        ("an unknown bare kind", base(parts=[{"kind": "widget"}])),
        ("a bare kind that only we use inside", base(parts=[{"kind": "extension", "of": "a.b", "body": {}}])),
        ("33 mentions", base(mentions=[{"id": BOB.id, "name": "bob"}] * 33)),
        ("reply_to that is no message id", base(reply_to="yesterday")),
        ("a control character in context", base(context="a\u0000b")),
        ("a short digest", artifact(digest="sha256:00")),
        ("an artifact name with a path", artifact(name="../plan.pdf")),
        ("a negative size", artifact(size=-1)),
        ("a size that is no number", artifact(size="3")),
    ]
    made = [
        {"why": why, "payload": json.dumps(document, ensure_ascii=False), "seen_by": "schema"}
        for why, document in shaped
    ]
    return made + [{"why": why, "payload": text, "seen_by": "reader"} for why, text in _unreadable()]


def _unreadable() -> list[tuple[str, str]]:
    """What a JSON Schema cannot see: the reader of the bytes has to refuse it."""
    good = json.dumps(base())
    nested = json.dumps(base(parts=[{"kind": "data", "data": 0}])).replace('"data": 0', '"data": %s')
    return [
        ("nothing", ""),
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
