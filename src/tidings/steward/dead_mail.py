"""Dead letters of agents: messages that a program gave back so often that it stopped trying, with the error it had.

The owner of a mailbox says which message (`dead put`), and the steward keeps it in DEAD: a direct message byte for
byte, because its record goes once it is settled; a channel message as its sequence, because the log has it. Only the
owner sees its letters, retries or drops them. One that is to be retried is `wanted`: the owner's receiving program is
told by its row of the roster, fetches it (`dead wanted`), and settles it by dropping it, or puts it again. How many are
kept of one owner is in `dead_room.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tidings.broker.grants import MAX_MESSAGE
from tidings.broker.jetstream import StoredRecord
from tidings.errors import TidingsError, UsageError
from tidings.steward.agent_handlers import Answer, Handler, access_of, name_of
from tidings.steward.dead_room import BEYOND_BOUND, bytes_of_mail, excess
from tidings.steward.history import encoded
from tidings.steward.replay import replay_of
from tidings.steward.requests import Request
from tidings.steward.retention import RECORD_OVERHEAD, stored_size
from tidings.wire.envelope import Received, open_record
from tidings.wire.headers import values_of
from tidings.wire.patterns import covers_any

if TYPE_CHECKING:
    from tidings.steward.service import Steward

HEADER = "Td-Dead"
KINDS = ("direct", "channel")
#: letters kept for one agent; its oldest go
MOST_EACH = 1_000
LONGEST_ERROR = 500
#: room for the header in a record's own accounting
MARGIN = 4_096
#: letters, and bytes of their messages, in one answer to a program that fetches what is wanted
FETCHED, FETCHED_BYTES = 64, 256 * 1024
LISTED = 200
log = logging.getLogger(__name__)


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One message of one agent's that its program gave up on."""

    owner: str
    kind: Literal["direct", "channel"]
    #: sequence of the message among the direct messages, or in the log
    seq: int
    time_ns: int
    subject: str
    sender: str
    id: str
    channel: str | None
    error: str
    attempts: int
    at: float
    state: Literal["dead", "wanted"] = "dead"
    #: the sender's header block of a direct message
    headers: str = ""
    #: it was too large to keep beside its error: its digest
    cut: str = ""
    #: bytes its record takes
    size: int = 0
    #: where DEAD has this version of it
    record: int = 0

    @property
    def ref(self) -> str:
        return f"{self.kind}-{self.seq}"


class DeadMail:
    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.stream = steward.subjects.dead_stream
        #: bytes all letters may take
        self.limit = 0
        #: owner -> ref -> letter, oldest first
        self.letters: defaultdict[str, dict[str, Letter]] = defaultdict(dict)

    async def load(self) -> None:
        info = await self.steward.js.info(self.stream)
        head, self.limit = int(info["state"]["last_seq"]), int(info["config"]["max_bytes"])
        for kind in KINDS:
            async for page in self.steward.js.read(self.stream, f"{self.steward.subjects.root}.dead.{kind}.*", 1, head):
                for record in page:
                    if (letter := _read(record)) is not None:
                        self.letters[letter.owner][letter.ref] = letter

    @property
    def count(self) -> int:
        return sum(map(len, self.letters.values()))

    def of(self, owner: str) -> list[Letter]:
        return list(self.letters[owner].values()) if owner in self.letters else []

    def wanted(self, owner: str) -> int:
        """Where the newest letter lies that its owner wants again; 0 if it wants none."""
        return max((each.record for each in self.of(owner) if each.state == "wanted"), default=0)

    async def keep(self, letter: Letter, payload: bytes = b"") -> Letter:
        """Write a letter, or a new version of it, and tell its owner's programs."""
        size = len(payload) + len(letter.headers) + len(letter.error.encode()) + MARGIN
        if size > MAX_MESSAGE:
            letter = msgspec.structs.replace(letter, cut=hashlib.sha256(payload).hexdigest(), headers="")
            payload = b""
        fact = json.dumps({**msgspec.to_builtins(letter), "size": 0, "record": 0}, separators=(",", ":"))
        subject = self._subject(letter)
        size = RECORD_OVERHEAD + len(subject) + len(HEADER) + len(fact) + len(payload)
        number = await self.steward.js.publish(subject, payload, {HEADER: fact})
        await self.steward.js.purge(self.stream, subject_filter=subject, keep=1)
        letter = msgspec.structs.replace(letter, size=size, record=number)
        held = self.letters[letter.owner]
        held.pop(letter.ref, None)
        held[letter.ref] = letter
        with suppress(TidingsError):  # it is kept; the next one tries again to make room
            await self._make_room(letter.owner)
        self.steward.roster.table.admit([letter.owner])
        return letter

    async def _make_room(self, owner: str) -> None:
        held = self.of(owner)
        gone = held[: excess([each.size for each in held], MOST_EACH, bytes_of_mail(self.limit))]
        await self.steward.store.note_letters_gone({owner: kinds_of(gone)}, BEYOND_BOUND)
        for each in gone:
            await self.drop(each)

    async def drop(self, letter: Letter) -> None:
        await self.steward.js.purge(self.stream, subject_filter=self._subject(letter))
        self._forget(letter)

    def below(self, record: int) -> list[Letter]:
        """Letters below a sequence of their stream."""
        return [each for held in self.letters.values() for each in held.values() if each.record < record]

    def forget_below(self, record: int) -> None:
        """Letters below a sequence of their stream were removed."""
        for letter in self.below(record):
            self._forget(letter)

    def _forget(self, letter: Letter) -> None:
        self.letters[letter.owner].pop(letter.ref, None)
        if not self.letters[letter.owner]:
            del self.letters[letter.owner]
        self.steward.roster.table.admit([letter.owner])

    async def message(self, letter: Letter) -> StoredRecord | None:
        """The message's record as it was stored; None if it was too large to keep, or has left the log."""
        js, s = self.steward.js, self.steward.subjects
        if letter.kind == "channel":
            found = await js.at(s.log_stream, letter.seq)
            return found if found is not None and found.time_ns == letter.time_ns else None
        kept = await js.at(self.stream, letter.record)
        if kept is None or letter.cut:
            return None
        block = base64.b64decode(letter.headers)
        return StoredRecord(letter.seq, letter.time_ns, letter.subject, block, kept.payload)

    def _subject(self, letter: Letter) -> str:
        return self.steward.subjects.dead(letter.kind, f"{letter.owner}-{letter.seq}")


def _read(record: StoredRecord) -> Letter | None:
    with suppress(IndexError, ValueError, msgspec.ValidationError):  # boundary: written by another version of us
        facts = json.loads(values_of(record.own_fields() or (), HEADER)[-1])
        return msgspec.convert({**facts, "size": stored_size(record), "record": record.seq}, Letter)
    return None


def kinds_of(letters: Iterable[Letter]) -> Counter[str]:
    return Counter(each.kind for each in letters)


# --- services ---


async def put(steward: Steward, request: Request) -> Answer:
    """Keep a message that was for the caller: `kind` (direct or channel), `seq`, `error`, `attempts`."""
    access = access_of(steward, request.sender)
    kind, seq = request.text("kind"), request.optional("seq", int) or 0
    if kind not in KINDS or seq < 1:
        raise UsageError(f"dead put needs `kind`, one of {', '.join(KINDS)}, and `seq`")
    known = next((each for each in steward.dead_mail.of(request.sender) if each.ref == f"{kind}-{seq}"), None)
    stream = steward.subjects.direct_stream if kind == "direct" else steward.subjects.log_stream
    record = await steward.js.at(stream, seq) or (await steward.dead_mail.message(known) if known else None)
    opened = _opened(steward, record)
    if record is None or opened is None or not _is_for(steward, request.sender, kind, record, opened, known):
        raise UsageError(f"there is no {kind} message {seq} of yours: it is gone, or it was never for you")
    letter = Letter(
        owner=request.sender,
        kind="direct" if kind == "direct" else "channel",
        seq=seq,
        time_ns=record.time_ns,
        subject=record.subject,
        sender=opened.sender,
        id=opened.message.id,
        channel=opened.destination if kind == "channel" else None,
        error=(request.optional("error", str) or "")[:LONGEST_ERROR],
        attempts=max(1, request.optional("attempts", int) or 1),
        at=time.time(),
        headers=base64.b64encode(record.own_block).decode() if kind == "direct" else "",
    )
    kept = await steward.dead_mail.keep(letter, record.payload if kind == "direct" else b"")
    log.warning("%s of %s is a dead letter after %d tries", kept.ref, access.name, kept.attempts)
    return {"letter": kept.ref, "state": kept.state}


def _is_for(
    steward: Steward, owner: str, kind: str, record: StoredRecord, opened: Received, known: Letter | None
) -> bool:
    """Was this message for the owner? Of a channel's past, what it may be shown in any other way, and no more."""
    if kind == "direct":
        return opened.kind == "dm" and opened.destination == owner
    channel = opened.destination
    if opened.kind != "chat" or not covers_any(access_of(steward, owner).read, channel):
        return False
    is_known = known is not None and known.time_ns == record.time_ns
    return is_known or replay_of(steward, owner, channel).shows(record.seq, record.time_ns)


def _opened(steward: Steward, record: StoredRecord | None) -> Received | None:
    fields = record.own_fields() if record is not None else None
    if record is None or fields is None:
        return None
    opened = open_record(steward.subjects, steward.info.id, record.subject, fields, record.payload)
    return opened if isinstance(opened, Received) else None


async def wanted(steward: Steward, request: Request) -> Answer:
    """The caller's letters that are to be retried, oldest first, with their messages, as far as those are there."""
    access_of(steward, request.sender)
    found: list[dict[str, Any]] = []
    size = 0
    letters = [each for each in steward.dead_mail.of(request.sender) if each.state == "wanted"]
    for letter in letters[:FETCHED]:
        record = await steward.dead_mail.message(letter)
        size += len(record.payload) * 4 // 3 if record else 0
        if found and size > FETCHED_BYTES:
            break
        found.append({**line(steward, letter), "record": encoded(record) if record else None})
    return {"letters": found, "more": len(found) < len(letters)}


def find(steward: Steward, request: Request) -> Letter:
    ref = request.text("letter")
    for letter in steward.dead_mail.of(request.sender):
        if letter.ref == ref:
            return letter
    raise UsageError(f"there is no dead letter {ref[:64]!r} of yours: `tidings dead list` shows them")


def line(steward: Steward, letter: Letter) -> dict[str, Any]:
    return {
        "letter": letter.ref,
        "kind": letter.kind,
        "seq": letter.seq,
        "id": letter.id,
        "sender": letter.sender,
        "sender_name": name_of(steward, letter.sender),
        "channel": letter.channel,
        "error": letter.error,
        "attempts": letter.attempts,
        "state": letter.state,
        "at": letter.at,
    }


def lines(steward: Steward, owner: str) -> list[dict[str, Any]]:
    return [line(steward, each) for each in reversed(steward.dead_mail.of(owner)[-LISTED:])]


async def show(steward: Steward, request: Request) -> Answer:
    letter = find(steward, request)
    record = await steward.dead_mail.message(letter)
    return {**line(steward, letter), "record": encoded(record) if record else None}


async def retry(steward: Steward, request: Request) -> Answer:
    """Hand it out again, to the program that receives for the caller now or later."""
    letter = find(steward, request)
    record = await steward.dead_mail.message(letter)
    if record is None:
        raise UsageError(f"{letter.ref} was too large to keep, or has left the log: drop it")
    if letter.state != "wanted":
        payload = record.payload if letter.kind == "direct" else b""
        await steward.dead_mail.keep(msgspec.structs.replace(letter, state="wanted"), payload)
    return {"letter": letter.ref, "state": "wanted"}


async def drop(steward: Steward, request: Request) -> Answer:
    """For good. What is dropped already is dropped: whoever settles a retried letter may ask twice."""
    ref = request.text("letter")
    for letter in steward.dead_mail.of(request.sender):
        if letter.ref == ref:
            await steward.dead_mail.drop(letter)
    return {"letter": ref, "state": "dropped"}


DEAD_MAIL_HANDLERS: dict[tuple[str, str], Handler] = {("dead", "put"): put, ("dead", "wanted"): wanted}
