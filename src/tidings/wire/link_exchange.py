"""What linked spaces exchange over a link, as JSON carries it: log pages, mail, tasks and the directory; pure.

Anything may come from another space. Input that cannot be read raises `MalformedRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import message as wire_message
from tidings.wire import names, strict_json
from tidings.wire.links import LinkedRecord, Seq, ShortText
from tidings.wire.message import MAX_PAYLOAD, Message, is_message_id
from tidings.wire.names import check_agent_id, check_role, role_elsewhere
from tidings.wire.records import Fields, parse_time, record_time, values_of
from tidings.wire.signing import KeyPair, sign, verifies
from tidings.wire.states import ReceiptStage, TaskStatus

# --- link pages ---
# Records of a link as JSON carries them; pure. Times are texts, because nanoseconds are above what every language reads
# exactly, and payloads are base64. Whether a record may be believed is not checked here.


#: what a signed number of 64 bits counts in nanoseconds, as ledgers keep it
_LAST_NS: Final = 2**63 - 1


class LinkedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a link carries: `origin` and `channel` are where it was sent, `sig` is its sender's over both."""

    seq: Seq
    time: ShortText
    origin: ShortText
    channel: ShortText
    sender: ShortText
    sig: ShortText
    payload: bytes
    hops: Seq
    mark: ShortText

    @classmethod
    def of(cls, record: LinkedRecord) -> LinkedRow:
        return cls(
            seq=record.seq,
            time=record_time(record.time_ns),
            origin=record.origin,
            channel=record.channel,
            sender=record.sender,
            sig=record.signature,
            payload=record.payload,
            hops=record.hops,
            mark=record.mark,
        )

    @property
    def record(self) -> LinkedRecord:
        """Raises MalformedRecord if its time is none that a ledger can keep."""
        try:
            time_ns = parse_time(self.time)
        except (ValueError, OverflowError) as error:
            raise MalformedRecord(f"record {self.seq} of a link has no time") from error
        if not 0 <= time_ns <= _LAST_NS:
            raise MalformedRecord(f"record {self.seq} of a link was said at {self.time}, when there were no links")
        return LinkedRecord(
            seq=self.seq,
            time_ns=time_ns,
            origin=self.origin,
            channel=self.channel,
            sender=self.sender,
            signature=self.sig,
            payload=self.payload,
            hops=self.hops,
            mark=self.mark,
        )


# --- link mail ---


#: messages of one page, and receipts of one request
MAIL_PER_PAGE: Final = 64
RECEIPTS_AT_ONCE: Final = 100
#: records that whoever asks for mail remembers, and names
CLAIMS_AT_ONCE: Final = 16
#: what the space of its reader may say of a message
TOLD_STAGES: Final = (
    ReceiptStage.DELIVERED,
    ReceiptStage.READ,
    ReceiptStage.EXPIRED,
    ReceiptStage.UNDELIVERABLE,
    ReceiptStage.VOID,
)


class LinkedMail(msgspec.Struct, frozen=True, kw_only=True):
    """A direct message as the space of its sender has it, at `seq` of its mail."""

    seq: Seq
    sender: ShortText
    to: ShortText
    sig: ShortText
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
    #: tells it from another record at the same sequence of mail that was set back (`record_mark`)
    mark: ShortText = ""

    def is_signed(self, origin: str) -> bool:
        return verifies(self.sig, origin, "dm", self.sender, self.to, self.payload)

    @property
    def id(self) -> str:
        """The id of its message; MalformedRecord if it is none, or says that it is from somebody else."""
        try:
            found = wire_message.decode(self.payload)
        except MalformedMessage as error:
            raise MalformedRecord(f"mail {self.seq} is no message: {error}") from error
        if found.sender.id != self.sender:
            raise MalformedRecord(f"mail {self.seq} is by {self.sender}, and says that it is by {found.sender.id}")
        return found.id


class ToldReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a direct message, as the space of its reader tells the space of its sender."""

    sender: str
    id: str
    to: str
    stage: ReceiptStage
    #: where it is in the mail of its sender's space
    seq: Seq
    why: ShortText = ""


def check_receipts(receipts: Iterable[ToldReceipt]) -> None:
    """Raises MalformedRecord for a receipt that another space cannot give."""
    for each in receipts:
        _check_agents(each.sender, each.to)
        if each.stage not in TOLD_STAGES or not is_message_id(each.id) or each.seq < 0:
            raise MalformedRecord(f"a receipt of a link has an id, and a stage of {', '.join(TOLD_STAGES)}")


def check_mail(mail: Iterable[LinkedMail]) -> None:
    """Raises MalformedRecord if a sender or a reader is not an agent."""
    for each in mail:
        _check_agents(each.sender, each.to)


def _check_agents(*ids: str) -> None:
    try:
        for each in ids:
            check_agent_id(each)
    except InvalidName as error:
        raise MalformedRecord(f"not an agent of a linked space: {str(error)[:200]}") from error


# --- link tasks ---
# Tasks on the way over a link, and how far they are there, as JSON carries them; pure.
#
# A task for `reviewer@acme` lies in the queue of its asker's space, signed for the role and the space it is for, and
# sealed for those who hold that role (`seal.py`). The worker of acme fetches it, and tells how far it is for as
# long as it has no end. What comes from another space may be anything: what cannot be read is `MalformedRecord`.


#: tasks of one answer or request
TASKS_PER_PAGE: Final = 16
#: milliseconds for which a task was in its asker's space before: its deadline counts from when it was asked
AGE_HEADER: Final = "Td-Age"
#: a result is told in parts: a worker says no more at once to another space, and a result has at most so many
PART_BYTES, MOST_PARTS = 32 * 1024, 8
#: how far the space of the role may say that a task is
TOLD_STATES: Final = (TaskStatus.QUEUED, TaskStatus.CLAIMED, TaskStatus.DONE, TaskStatus.DEAD)
#: milliseconds; a deadline is at most 30 days, so that whoever waited longer than this is past it, or has none
LONGEST_AGE: Final = 31 * 86_400_000
_Age = Annotated[int, msgspec.Meta(ge=0, le=LONGEST_AGE)]
#: the largest integer that every language reads exactly
MOST = 2**53 - 1
_TaskSeq = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_TaskText = Annotated[str, msgspec.Meta(max_length=400)]


class LinkedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task as the space of its asker has it, at `seq` of its queue, for a role of the space that fetches it."""

    seq: _TaskSeq
    sender: _TaskText
    role: _TaskText
    sig: _TaskText
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
    #: milliseconds since it was stored, by the clock there
    age: _Age = 0

    def message(self, origin: str, here: str) -> Message:
        """Its message, signed in the space `origin` for this role of the space `here`; MalformedRecord if it is not."""
        if not verifies(self.sig, origin, "task", self.sender, role_elsewhere(self.role, here), self.payload):
            raise MalformedRecord(f"task {self.seq} is not signed by {self.sender} for {self.role} of this space")
        try:
            found = wire_message.decode(self.payload)
        except MalformedMessage as error:
            raise MalformedRecord(f"task {self.seq} is no message: {error}") from error
        if found.sender.id != self.sender:
            raise MalformedRecord(f"task {self.seq} says that it is by {found.sender.id}")
        return found


class TaskPage(NamedTuple):
    tasks: tuple[LinkedTask, ...]
    #: there are others
    more: bool = False
    #: rows that are no tasks
    unread: int = 0


class ToldTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How far a task is, as the space of its role tells the space of its asker."""

    sender: _TaskText
    id: _TaskText
    #: where it is in the queue of its asker's space
    seq: _TaskSeq
    state: TaskStatus
    worker: _TaskText = ""
    attempt: _Count = 0
    #: of one that is dead
    cause: _TaskText = ""
    why: _TaskText = ""
    #: of one that is done: what its worker signed, or one part of it, of so many
    result: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)] = b""
    part: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTS)] = 0
    parts: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARTS)] = 1
    sig: _TaskText = ""


def read_tasks(rows: Sequence[Any], *, more: bool) -> TaskPage:
    """Returns the tasks in an answer of another space. An invalid row is counted and skipped: others do not wait for
    it."""
    found: list[LinkedTask] = []
    for row in rows:
        with suppress(msgspec.ValidationError, InvalidName):
            task = msgspec.convert(row, LinkedTask)
            check_agent_id(task.sender)
            check_role(task.role)
            found.append(task)
    return TaskPage(tuple(found), more, len(rows) - len(found))


def check_told_tasks(tasks: Iterable[ToldTask]) -> None:
    """Raises MalformedRecord for progress that another space cannot report."""
    for each in tasks:
        _check_agents(each.sender, *([each.worker] if each.worker else []))
        if each.state not in TOLD_STATES or not is_message_id(each.id) or each.part >= each.parts:
            raise MalformedRecord(f"a task of a link has an id, and is one of {', '.join(TOLD_STATES)}")


def read_age(fields: Fields) -> int:
    """Milliseconds that a task which came over a link was underway before it was stored here; 0 if it does not say."""
    said = values_of(fields, AGE_HEADER)
    return int(said[0]) if len(said) == 1 and said[0].isascii() and said[0].isdigit() and len(said[0]) < 13 else 0


# --- people ---
# Who is in a space, as it tells a linked one: one signed statement for each agent, and nothing it does not need; pure.
#
# An access record says more than another space may know: what the agent may read and post, and its token. So it is not
# sent; the steward states id, name, roles and what key came before, and signs that for one link. The receiver knows the
# key of that steward from its link record, and follows rotations of it (`server/steward_keys.py`).


#: agents of one linked space that are known here
MOST_PEOPLE: Final = 5_000
#: statements of one answer, and rows of one request to our own steward
PEOPLE_PER_PAGE: Final = 200
#: roles of one agent that are told; and characters of the statements of one answer, one statement may have more
MOST_ROLES: Final = 64
STATED_CHARACTERS: Final = 200_000
#: characters of one statement
LONGEST_STATEMENT: Final = 8_000
_KIND: Final = "person"


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of a space. `seq` is where its access record is: a later one says what holds since."""

    id: str
    name: str
    roles: Annotated[tuple[str, ...], msgspec.Meta(max_length=MOST_ROLES)] = ()
    seq: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    revoked: bool = False
    #: the key that this one took the name over from
    succeeds: str | None = None

    def __post_init__(self) -> None:
        names.check_agent_id(self.id)
        names.check_agent_name(self.name)
        for role in self.roles:
            names.check_role(role)
        if self.succeeds is not None:
            names.check_agent_id(self.succeeds)


class Statement(msgspec.Struct, frozen=True):
    """What a steward says of one agent, and its signature."""

    text: Annotated[str, msgspec.Meta(max_length=LONGEST_STATEMENT)]
    sig: Annotated[str, msgspec.Meta(max_length=200)]


def state(key: KeyPair, space_id: str, link: str, person: Person) -> Statement:
    """The steward's word for one link."""
    text = msgspec.json.encode(person).decode()
    return Statement(text, sign(key, space_id, _KIND, link, text.encode()))


def read_statement(said: Statement, space_id: str, steward_key: str, link: str) -> Person:
    """The agent a statement is about; MalformedRecord if that steward did not say this for this link."""
    payload = said.text.encode(errors="replace")
    if not verifies(said.sig, space_id, _KIND, steward_key, link, payload):
        raise MalformedRecord(f"a statement about an agent is not signed by {steward_key} for link {link}")
    try:
        return msgspec.convert(strict_json.loads(payload), Person, strict=True)
    except (msgspec.ValidationError, MalformedMessage, InvalidName) as error:
        raise MalformedRecord(f"this says of nobody who it is: {str(error)[:200]}") from error


class Sorted(msgspec.Struct, frozen=True):
    """Agents of another space by whether a name of theirs stands for them here."""

    known: tuple[Person, ...]
    #: who has a name that stood for another key before, which the new one does not say it succeeds
    refused: tuple[Person, ...]
    #: name -> id
    pins: dict[str, str]


def sort_people(people: Sequence[Person], pins: dict[str, str]) -> Sorted:
    """Pin names to ids: the first that has a name keeps it, and hands it on only to a key that says it succeeds it. A
    key has one name: one that is called otherwise gives its name up."""
    held = dict(pins)
    names_of = {agent: name for name, agent in held.items()}
    waiting = sorted(people, key=lambda each: each.seq)
    while True:
        left = [each for each in waiting if not _pinned(held, names_of, each)]
        if len(left) == len(waiting):
            break
        waiting = left
    known = tuple(each for each in people if not each.revoked and held.get(each.name) == each.id)
    gone = _succeeded(people, held)
    living = (each for each in people if not each.revoked and each.id not in gone)
    refused = tuple(each for each in living if held.get(each.name) not in (each.id, None))
    return Sorted(known, refused, held)


def _succeeded(people: Sequence[Person], held: dict[str, str]) -> set[str]:
    """Keys that handed their name on to one that has it: they are being taken back."""
    before = {each.id: each.succeeds for each in people if each.succeeds is not None}
    found: set[str] = set()
    for agent in held.values():
        while (agent := before.get(agent, "")) and agent not in found:
            found.add(agent)
    return found - set(held.values())


def _pinned(held: dict[str, str], names_of: dict[str, str], person: Person) -> bool:
    """Give it its name if it is free or handed on; whether that was done."""
    before = held.get(person.name)
    if before == person.id or (before is None and person.revoked):
        return False
    if before is not None and person.succeeds != before:
        return False
    if (old := names_of.get(person.id)) is not None and held.get(old) == person.id:
        del held[old]
    held[person.name], names_of[person.id] = person.id, person.name
    return True
