"""Golden vectors of what agents and steward say to each other: bundle, requests, beats, roster, rulings, results.

Answers have the fields that a real steward gives (a test on a real space holds the two together); their values are made
up here, from fixed keys.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from golden.cast import (
    ADA,
    AGENTS,
    BOB,
    MESSAGE_ID,
    NEXT_STEWARD,
    OTHER_SPACE,
    SECRET,
    SPACE,
    SPACE_NAME,
    STEWARD,
)
from golden.frames import EPOCH, RECORDS
from golden.messages import base
from tidings.wire import roster, rulings, signing
from tidings.wire.records import encode_headers, record_time
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects, tag

_SUBJECTS = Subjects(SPACE_NAME)
_OP = "019a8a3c-6000-7abc-8def-0123456789ab"
_BOOT = "019a8a3c-0000-7abc-8def-0123456789ab"
_SESSION = "019a8a3c-6100-7abc-8def-0123456789ab"
_TOKEN_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


def vectors() -> dict[str, Any]:
    return {
        "bundles": {"valid": [_bundle()], "invalid": _bad_bundles()},
        "beats": {"valid": _beats(), "invalid": _bad_beats()},
        "exchanges": _exchanges(),
        "deltas": _deltas(),
        "rulings": _rulings(),
        "results": _results(),
    }


# --- the bundle ---


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _token() -> str:
    """A user token of NATS, with one right: enough to see its spelling."""
    nats = {"type": "user", "subs": 1000, "data": -1, "payload": 270336, "pub": {}, "sub": {}, "version": 2}
    body = {"iat": 1763208000, "iss": AGENTS.id, "name": "ada", "sub": ADA.id, "nats": nats, "jti": "golden"}
    signed = ".".join(_b64(json.dumps(each, separators=(",", ":")).encode()) for each in (_TOKEN_HEADER, body))
    return f"{signed}.{_b64(AGENTS.sign(signed.encode()))}"


def _bundle(**changes: Any) -> dict[str, Any]:
    """What `tidings agent export` writes; the file is a secret, this one is not."""
    creds = (
        f"-----BEGIN NATS USER JWT-----\n{_token()}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{ADA.seed}\n------END USER NKEY SEED------\n"
    )
    return {
        "tidings": 1,
        "space": SPACE_NAME,
        "space_id": SPACE.id,
        "steward_key": STEWARD.id,
        "url": "nats://127.0.0.1:4222",
        "agent": {"name": "ada", "id": ADA.id},
        "creds": creds,
    } | changes


def _bad_bundles() -> list[dict[str, Any]]:
    whole = _bundle()
    missing = [
        {"why": f"no {name}", "bundle": {key: value for key, value in whole.items() if key != name}}
        for name in ("space", "space_id", "steward_key", "url", "agent", "creds")
    ]
    return [
        *missing,
        {"why": "the id of another agent than the key's", "bundle": _bundle(agent={"name": "ada", "id": BOB.id})},
        {"why": "a name that is no token", "bundle": _bundle(agent={"name": "../ada", "id": ADA.id})},
        {"why": "a space that is no token", "bundle": _bundle(space="a.b")},
        {"why": "credentials without a seed", "bundle": _bundle(creds=whole["creds"].partition("-----BEGIN USER")[0])},
    ]


# --- requests and answers ---


def _beat(**changes: Any) -> dict[str, Any]:
    return {"session": _SESSION, "status": "working"} | changes


def _beats() -> list[dict[str, Any]]:
    quiet = {"mode": "focus", "channels": {"general": "muted", "team.>": "quiet"}}
    full = _beat(activity="reviews the plan", attention=quiet, model="m-1")
    return [
        {"why": "the least", "beat": _beat()},
        {"why": "everything", "beat": full},
        {"why": "a graceful end", "beat": _beat(status="offline", activity=None)},
        {"why": "200 characters of activity", "beat": _beat(activity="ü" * 200)},
    ]


def _bad_beats() -> list[dict[str, Any]]:
    return [
        {"why": why, "beat": beat}
        for why, beat in [
            ("no session", {"status": "idle"}),
            ("a session of 7 characters", _beat(session="1234567")),
            ("a session with a dot", _beat(session="12345678.9")),
            ("no status", {"session": _SESSION}),
            ("an unknown status", _beat(status="busy")),
            ("201 characters of activity", _beat(activity="x" * 201)),
            ("a line break in activity", _beat(activity="a\u2028b")),
            ("an unknown mode", _beat(attention={"mode": "loud"})),
            ("an unknown level", _beat(attention={"channels": {"general": "loud"}})),
            ("a level for what is no pattern", _beat(attention={"channels": {"a..b": "muted"}})),
            ("65 levels", _beat(attention={"channels": {f"c{n}": "muted" for n in range(65)}})),
        ]
    ]


def _exchange(
    why: str, sender: KeyPair, service: str, do: str, arguments: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    return {
        "why": why,
        "subject": _SUBJECTS.control(service, sender.id),
        "request": {"op": _OP, "do": do, **arguments},
        "answer": answer,
    }


def _refused(code: str, message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": code, "message": message}}


def _stored(tail: str, seq: int, kind: str, destination: str, payload: bytes) -> dict[str, Any]:
    """A record as answers carry it."""
    signature = signing.sign(ADA, SPACE.id, kind, destination, payload)
    block = encode_headers([("Td-Sig", signature), ("Nats-Msg-Id", MESSAGE_ID)])
    return {
        "seq": seq,
        "time": record_time(1_763_208_000_000_000_000 + seq),
        "subject": f"{_SUBJECTS.root}.{tail}",
        "headers": base64.b64encode(block).decode(),
        "payload": base64.b64encode(payload).decode(),
    }


def _exchanges() -> list[dict[str, Any]]:
    backstop = {"running": True, "behind": 0, "floor": 9, "late_s": 0.0, "starting": False}
    channel = {"channel": "general", "class": "durable", "replay": True, "own": [], "replay_window": None}
    stamp = [9, "c147276908bcee851ce4", EPOCH, "P7VIU3X2PTPNVWYPDKOXKHSM3F"]
    payload = RECORDS[0].payload
    said, task = _stored(RECORDS[0].tail, 7, "chat", "general", payload), f"task.reviewer.{ADA.id}"
    joined = {"ok": True, "state": "opened", "seq": 5, "left": None, "head": 9, "backstop": backstop, **channel}
    held = {"deadline": "2025-11-15T13:00:00.000Z", "claimed_at": "2025-11-15T12:00:00.000Z", "beat_every": 5.0}
    worked = {"seq": 3, "attempt": 1, "reasons": [], "worker": BOB.id, "worker_name": "bob", "asker": ADA.id}
    done = _result()
    return [
        _exchange(
            "a join",
            ADA,
            "member",
            "join",
            {"pattern": "general"},
            joined | {"epoch": EPOCH, "agreed": None, "stamp": stamp},
        ),
        _exchange(
            "a leave",
            ADA,
            "member",
            "leave",
            {"pattern": "general", "joined": 5},
            {"ok": True, "state": "left", "seq": 10, "open": None, "still_covered_by": []},
        ),
        _exchange(
            "a join of what it may not read",
            ADA,
            "member",
            "join",
            {"pattern": "secret"},
            _refused("denied", "ada may not read secret; it may read general"),
        ),
        _exchange(
            "a verb that nobody knows",
            ADA,
            "member",
            "jion",
            {"pattern": "general"},
            _refused("usage", "the service member has no 'jion': its verbs are deaf, join, leave, list, members"),
        ),
        _exchange(
            "an argument that nobody knows",
            ADA,
            "member",
            "join",
            {"patern": "general"},
            _refused("usage", "member join: unknown field 'patern'; it has pattern, epoch, marks"),
        ),
        _exchange(
            "a page of history",
            ADA,
            "history",
            "page",
            {"channel": "general", "limit": 1, "since": "2025-11-15T00:00:00.000Z"},
            {
                "ok": True,
                "records": [said],
                "more": False,
                "next": 7,
                "head": 9,
                "stamp": stamp,
                "floor": 0,
                "links": 0,
                "void": 0,
                "hidden": False,
            },
        ),
        _exchange(
            "a record that is the asker's",
            ADA,
            "confirm",
            "record",
            {"seq": 7, "stream": "log"},
            {"ok": True, "yours": True, "subject": said["subject"], "payload": said["payload"]},
        ),
        _exchange("a record that is not", ADA, "confirm", "record", {"seq": 8}, {"ok": True, "yours": False}),
        _exchange(
            "to receive",
            ADA,
            "session",
            "take",
            {"session": _SESSION},
            {"ok": True, "number": 1763208000000, "superseded": False, "boot": _BOOT, "unsettled": 0},
        ),
        _exchange("a beat", ADA, "presence", "beat", _beat(), {"ok": True, "boot": _BOOT}),
        _exchange(
            "a task",
            BOB,
            "task",
            "claim",
            {"role": "reviewer", "wait": 20, "session": _SESSION},
            {
                "ok": True,
                "task": _stored(task, 3, "task", "reviewer", payload),
                "role": "reviewer",
                "attempt": 1,
                **held,
            },
        ),
        _exchange("no task", BOB, "task", "claim", {"role": "reviewer", "wait": 0}, {"ok": True, "task": None}),
        _exchange(
            "a result",
            BOB,
            "task",
            "done",
            {"seq": 3, "session": _SESSION, "result": done["result"], "sig": done["sig"]},
            {"ok": True, "state": "done", "record": 4},
        ),
        _exchange(
            "what became of a task",
            ADA,
            "task",
            "result",
            {"id": MESSAGE_ID, "wait": 20},
            {"ok": True, **worked, "state": "done", **done},
        ),
    ]


# --- signed by the steward ---


def _deltas() -> list[dict[str, Any]]:
    row = roster.AgentEntry(
        id=BOB.id,
        name="bob",
        roles=("reviewer",),
        status="working",
        activity="reviews the plan",
        attention="open",
        last_seen="2025-11-15T12:00:00.000Z",
        session=1763208000000,
        access=4,
        moved=6,
    )
    backstop = roster.Backstop(running=True, behind=0, floor=9)
    delta = roster.Delta(boot=_BOOT, n=12, rows=(row,), gone=(ADA.id,), head=9, backstop=backstop)
    payload, headers = roster.sign_delta(STEWARD, SPACE.id, delta)
    signature = headers[signing.SIGNATURE_HEADER]
    heartbeat = roster.sign_delta(STEWARD, SPACE.id, roster.Delta(boot=_BOOT, n=13, head=9))
    of_ada = signing.sign(ADA, SPACE.id, "ruling", roster.DESTINATION, payload)
    junk = b'{"boot":"x","boot":"y","n":1}'
    good = {"subject": _SUBJECTS.live_roster, "payload": payload.decode(), "signature": signature, "refused": None}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("what changed", {}),
        ("a heartbeat", {"payload": heartbeat[0].decode(), "signature": heartbeat[1]["Td-Sig"]}),
        (
            "on another subject",
            {"subject": f"{_SUBJECTS.root}.live.chat.{ADA.id}.general", "refused": "wrong_subject"},
        ),
        ("not signed", {"signature": None, "refused": "unsigned"}),
        ("signed by an agent", {"signature": of_ada, "refused": "signature"}),
        ("another payload", {"payload": payload.decode() + " ", "refused": "signature"}),
        (
            "a key twice",
            {
                "payload": junk.decode(),
                "signature": rulings.sign_ruling(STEWARD, SPACE.id, roster.DESTINATION, junk),
                "refused": "malformed",
            },
        ),
    ]
    return [good | {"why": why} | changes for why, changes in cases]


def _rulings() -> list[dict[str, Any]]:
    member = rulings.Member(op=_OP, at="2025-11-15T12:00:00.000Z", state="in", pattern="team.>")
    access = rulings.Access(op=_OP, name="bob", roles=("reviewer",), read=("general", "team.>"), post=("general",))
    channel = rulings.Channel(op=_OP, name="general", cls="live", replay=False, by=ADA.id)
    rotation = rulings.Space(op=_OP, steward_key=NEXT_STEWARD.id)
    of_bob = _SUBJECTS.access(BOB.id)
    granted = rulings.encode(access)
    later = json.dumps(json.loads(granted) | {"v": 2}).encode()
    unfit = json.dumps(json.loads(granted) | {"name": "b b"}).encode()

    def ruling(why: str, subject: str, payload: bytes, refused: str | None, **by: Any) -> dict[str, Any]:
        key, space, tail = by.get("key", STEWARD), by.get("space", SPACE), by.get("tail", _SUBJECTS.tail(subject))
        signature = rulings.sign_ruling(key, space.id, tail, payload)
        return {"why": why, "subject": subject, "payload": payload.decode(), "signature": signature, "refused": refused}

    return [
        ruling("a membership opens", _SUBJECTS.member(BOB.id, tag(SECRET, "team.>")), rulings.encode(member), None),
        ruling("what an agent may do", of_bob, granted, None),
        ruling("a channel", _SUBJECTS.channel(tag(SECRET, "general")), rulings.encode(channel), None),
        ruling("the steward's key changes after this", _SUBJECTS.space_record, rulings.encode(rotation), None),
        ruling("signed by an agent", of_bob, granted, "signature", key=ADA),
        ruling("signed by the key that is not in force yet", of_bob, granted, "signature", key=NEXT_STEWARD),
        ruling("signed for another agent", of_bob, granted, "signature", tail=f"acl.{ADA.id}"),
        ruling("signed for another space", of_bob, granted, "signature", space=OTHER_SPACE),
        ruling("a version that we cannot read", of_bob, later, "malformed"),
        ruling("a name that does not fit", of_bob, unfit, "malformed"),
        ruling("another kind of record than its subject says", of_bob, rulings.encode(member), "malformed"),
    ]


# --- results ---


def _result(**changes: Any) -> dict[str, str]:
    """Bob's result of Ada's task, as `task done` carries it and `task result` answers it."""
    sender = {"id": BOB.id, "name": "bob"}
    said = base(id=_OP, parts=[{"kind": "text", "text": "fine"}], reply_to=MESSAGE_ID, **{"from": sender})
    payload = json.dumps(said | changes.get("message", {})).encode()
    destination = changes.get("destination", f"{ADA.id}.{MESSAGE_ID}")
    signature = signing.sign(changes.get("key", BOB), SPACE.id, "result", destination, payload)
    return {"result": base64.b64encode(payload).decode(), "sig": signature}


def _results() -> list[dict[str, Any]]:
    about = {"asker": ADA.id, "id": MESSAGE_ID, "worker": BOB.id}
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("a result", {}, None),
        ("of another task", {"destination": f"{ADA.id}.{_OP}"}, "signature"),
        ("for another asker", {"destination": f"{BOB.id}.{MESSAGE_ID}"}, "signature"),
        ("signed by somebody else", {"key": ADA}, "signature"),
        (
            "that says it is from somebody else",
            {"message": {"from": {"id": ADA.id, "name": "ada"}}},
            "sender_mismatch",
        ),
        ("that is no message", {"message": {"parts": []}}, "malformed"),
    ]
    return [about | {"why": why, **_result(**changes), "refused": refused} for why, changes, refused in cases]
