"""Dead letters of agents: messages that a program gave back so often that it stopped trying, with the error it had.

The owner of a mailbox says which message, and the steward keeps it in DEAD: a direct message byte for byte, because its
record goes once it is acknowledged; a channel message as its sequence, because the log has it. One that is to be
retried is `wanted`: the owner's receiving program is told by its row of the roster. Beyond its share of DEAD an agent's
own oldest letters go, and it hears of it first: a letter is often the only copy. None goes before there is an eighth
too much, so that many go together and are told in one sentence. Who may ask for what is in `dead_handlers.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from tidings.errors import TidingsError
from tidings.nats.jetstream import StoredRecord
from tidings.server.grants import MAX_MESSAGE
from tidings.steward.context import SpaceContext
from tidings.steward.retention import RECORD_OVERHEAD, stored_size
from tidings.steward.shares import share_of
from tidings.steward.store_watch import StoreWatch
from tidings.wire.records import values_of

HEADER = "Td-Dead"
#: of a small stream, for one agent: well below where a full one loses the oldest of everybody
MOST_OF_SMALL = 0.25
#: bytes of letters of messages of one agent, however large the stream
MOST_BYTES_OF_MAIL = 8 * 1024 * 1024
BEYOND_BOUND = "because you had more than one agent may keep"
KINDS = ("direct", "channel")
#: letters kept for one agent; its oldest go
MOST_EACH = 1_000
#: room for the header in a record's own accounting
MARGIN = 4_096


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


class DeadLetters:
    def __init__(self, space: SpaceContext, store: StoreWatch, changed: Callable[[Iterable[str]], None]) -> None:
        """`changed`: hears whose letters changed, so that their programs are told."""
        self.space = space
        self.store = store
        self._changed = changed
        self.stream = space.subjects.dead_stream
        #: bytes all letters may take
        self.limit = 0
        #: owner -> ref -> letter, oldest first
        self.letters: defaultdict[str, dict[str, Letter]] = defaultdict(dict)

    async def load(self) -> None:
        info = await self.space.js.info(self.stream)
        head, self.limit = int(info["state"]["last_seq"]), int(info["config"]["max_bytes"])
        for kind in KINDS:
            async for page in self.space.js.read(self.stream, f"{self.space.subjects.root}.dead.{kind}.*", 1, head):
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
        number = await self.space.js.publish(subject, payload, {HEADER: fact})
        await self.space.js.purge(self.stream, subject_filter=subject, keep=1)
        letter = msgspec.structs.replace(letter, size=size, record=number)
        held = self.letters[letter.owner]
        held.pop(letter.ref, None)
        held[letter.ref] = letter
        with suppress(TidingsError):  # it is kept; the next one tries again to make room
            await self._make_room(letter.owner)
        self._changed([letter.owner])
        return letter

    async def _make_room(self, owner: str) -> None:
        held = self.of(owner)
        gone = held[: excess([each.size for each in held], MOST_EACH, bytes_of_mail(self.limit))]
        await self.store.note_letters_gone({owner: Counter(each.kind for each in gone)}, BEYOND_BOUND)
        for each in gone:
            await self.drop(each)

    async def drop(self, letter: Letter) -> None:
        await self.space.js.purge(self.stream, subject_filter=self._subject(letter), below=letter.record + 1)
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
        self._changed([letter.owner])

    async def message(self, letter: Letter) -> StoredRecord | None:
        """The message's record as it was stored; None if it was too large to keep, or has left the log."""
        js, s = self.space.js, self.space.subjects
        if letter.kind == "channel":
            found = await js.at(s.log_stream, letter.seq)
            return found if found is not None and found.time_ns == letter.time_ns else None
        kept = await js.at(self.stream, letter.record)
        if kept is None or letter.cut:
            return None
        block = base64.b64decode(letter.headers)
        return StoredRecord(letter.seq, letter.time_ns, letter.subject, block, kept.payload)

    def _subject(self, letter: Letter) -> str:
        return self.space.subjects.dead(letter.kind, f"{letter.owner}-{letter.seq}")


def _read(record: StoredRecord) -> Letter | None:
    with suppress(IndexError, ValueError, msgspec.ValidationError):  # boundary: written by another version of us
        facts = json.loads(values_of(record.own_fields() or (), HEADER)[-1])
        return msgspec.convert({**facts, "size": stored_size(record), "record": record.seq}, Letter)
    return None


def bytes_of_mail(limit: int) -> int:
    """What letters of messages of one agent may take of a stream with this limit."""
    return min(MOST_BYTES_OF_MAIL, share_of(limit, of_small=MOST_OF_SMALL) // 2)


def bytes_of_tasks(limit: int) -> int:
    """What dead tasks of one asker may take: the rest of its share."""
    return share_of(limit, of_small=MOST_OF_SMALL) - bytes_of_mail(limit)


def with_slack(most: int) -> int:
    return most + most // 8


def excess(sizes: Sequence[int], most: int, most_bytes: int) -> int:
    """How many of these letters, the oldest first, are to go. The newest stays however large it is."""
    size = sum(sizes)
    if len(sizes) <= with_slack(most) and size <= with_slack(most_bytes):
        return 0
    gone = 0
    while len(sizes) - gone > 1 and (len(sizes) - gone > most or size > most_bytes):
        size -= sizes[gone]
        gone += 1
    return gone
