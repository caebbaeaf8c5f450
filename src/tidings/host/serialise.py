"""Rows of the outbox and the inbox as JSON, for programs and for files that are read without a host.

What a message says is written as everywhere (`client/message_json.py`); here are the fields that only rows have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidings.client.message_json import content_json, moment, sender_json
from tidings.errors import WireError
from tidings.host.inbox import Aside, InboxRow
from tidings.host.outbox_views import OutboxRow
from tidings.wire import message as wire
from tidings.wire.keys import KeyPair
from tidings.wire.message import Mention
from tidings.wire.names import short_id
from tidings.wire.seal import is_sealed, open_sealed
from tidings.wire.states import ReceiptStage

Json = dict[str, Any]
#: bytes that are shown of what could not be opened
BEGINNING = 200


def mail(row: InboxRow, key: KeyPair | None, names: Mapping[str, str]) -> Json:
    """A row of the inbox. `key`: its recipient's, to open what is sealed; without it only the text is shown.

    `names`: of agents, by id. Whoever is mentioned and not among them is shown as the beginning of an id: what the
    message calls them is its sender's word.

    A notice has the fields of a message, and `notice` with what it tells of.
    """
    return {
        "row": row.row,
        "id": row.id,
        "kind": row.kind,
        "channel": row.channel,
        "from": {"id": row.sender, "name": row.sender_name},
        "text": row.text,
        "priority": row.priority,
        "reply_to": row.reply_to,
        "context": row.context,
        **(_notice(row) if row.kind == "notice" else _content(row, key, names)),
        "mentions_me": bool(row.mentions_me),
        "wakes": bool(row.wakes),
        "historical": bool(row.historical),
        "sealed": bool(row.sealed),
        "origin": row.origin or None,
        "origin_id": row.origin_id or None,
        "seq": row.seq,
        "time": moment(row.logged_at),
        "received": moment(row.received_at),
        "read": moment(row.read_at),
    }


def aside(found: Aside) -> Json:
    """Something that could not be opened. It is nobody's word, so only its beginning is shown, in ASCII."""
    return {
        "row": found.row,
        "reason": found.reason,
        "bytes": len(found.raw),
        "begins": found.raw[:BEGINNING].decode("ascii", "backslashreplace"),
        "received": moment(found.received_at),
    }


def _content(row: InboxRow, key: KeyPair | None, names: Mapping[str, str]) -> Json:
    by: Json = {}
    try:
        message = wire.decode(row.raw)
        # of another space's agent it is the name it signed, with that space behind it
        claimed = None if row.origin_id else message.sender.name
        by = {"from": sender_json(message.sender.id, row.sender_name, claimed)}
        if is_sealed(message):
            message = open_sealed(key, row.sender, message) if key else message
        if is_sealed(message):
            return by | _JUST_TEXT
        mentioned = (Mention(each.id, names.get(each.id) or short_id(each.id)) for each in message.mentions)
        return by | content_json(message, mentioned)
    except WireError:  # it cannot be opened: its text is shown
        return by | _JUST_TEXT


def held_back(space: str, reason: str | None) -> str:
    """Why nothing leaves for a space that its user paused, and what ends that."""
    return f"{space} is held back here{f' ({reason})' if reason else ''}: `tidings outbox resume`"


_JUST_TEXT: Json = {"parts": [], "mentions": [], "mention_ids": [], "ts": None, "role": None}


def _notice(row: InboxRow) -> Json:
    try:
        facts = dict(json.loads(row.raw))
    except (ValueError, TypeError):  # a disk that changed a bit of it; the text is there
        return _JUST_TEXT | {"notice": {}}
    return _JUST_TEXT | {"notice": {name: value for name, value in facts.items() if name != "text"}}


def owed(row: OutboxRow) -> Json:
    """A row of the outbox, without what it says."""
    return {
        "row": row.row,
        "id": row.id,
        "kind": row.kind,
        "to": row.destination,
        "state": row.state,
        "stage": ReceiptStage.CONFIRMED if row.seq is not None else "stored",
        "seq": row.seq,
        "attempts": row.attempts,
        "accepted": moment(row.accepted_at),
        "gives_up": moment(row.accepted_at + row.max_age),
        "ended": moment(row.ended_at),
        "code": row.code,
        "words": row.words,
        "cancel_asked": bool(row.cancel_asked),
        "late_seq": row.late_seq,
        "supersedes": row.supersedes,
        "superseded_by": row.superseded_by,
    }


def owed_with_chain(row: OutboxRow, chain: list[OutboxRow]) -> Json:
    """The same, and what it replaced and what replaced it, as far as that is of the same agent."""
    mine = [each for each in chain if (each.space, each.sender) == (row.space, row.sender)]
    return owed(row) | {"chain": [owed(each) for each in mine]}
