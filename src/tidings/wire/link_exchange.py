"""What linked spaces exchange over a link, as JSON carries it: log pages, mail, tasks and the directory; pure.

Anything may come from another space. Input that cannot be read raises `MalformedRecord`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import message as wire_message
from tidings.wire import names, strict_json
from tidings.wire.links import LinkedRecord, LinkGap, LinkPage, Token
from tidings.wire.message import MAX_PAYLOAD, Message, is_message_id
from tidings.wire.names import check_agent_id, check_role, role_elsewhere
from tidings.wire.operations import MOST
from tidings.wire.records import Fields, Stamp, parse_time, record_time, values_of
from tidings.wire.signing import KeyPair, sign, verifies
from tidings.wire.states import ReceiptStage, TaskStatus

# --- link pages ---
# Pages and records of a link as JSON carries them on the control plane; pure.
#
# Times are texts, because nanoseconds are above what every language reads exactly, and payloads are base64. What comes
# from another space may be anything: what is no page is `MalformedRecord`. Whether a record in it may be believed is
# not asked here.


#: characters of a name, an id, a signature or a time in a page: all that are true are shorter, and what is stored has
#: a bound that way
LONGEST: Final = 256
#: what a signed number of 64 bits counts in nanoseconds, as ledgers keep it
_LAST_NS: Final = 2**63 - 1
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST)]


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    time: _Text
    origin: _Text
    channel: _Text
    sender: _Text
    sig: _Text
    payload: bytes
    hops: int
    mark: _Text


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    records: tuple[_Row, ...]
    through: Token
    head: int
    floor: int
    gap: LinkGap | None
    granted: int = 0


def record_row(record: LinkedRecord) -> dict[str, Any]:
    row = _Row(
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
    return msgspec.to_builtins(row)  # type: ignore[no-any-return]


def page_fields(page: LinkPage) -> dict[str, Any]:
    return {
        "records": [record_row(each) for each in page.records],
        "through": msgspec.to_builtins(page.through),
        "head": page.head,
        "floor": page.floor,
        "gap": msgspec.to_builtins(page.gap) if page.gap else None,
        "granted": page.granted,
    }


def read_page(said: Any) -> LinkPage:
    """The page in an answer."""
    try:
        found = msgspec.convert(said, _Page)
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"this is no page of a link: {str(error)[:300]}") from error
    _check_texts(found.through.space, found.through.epoch, found.through.mark, found.gap.epoch if found.gap else "")
    numbers = [found.head, found.floor, found.through.seq, found.granted]
    numbers += [found.gap.oldest, found.gap.head, found.gap.agreed] if found.gap else []
    _check_counts(numbers)
    records = tuple(map(_record, found.records))
    return LinkPage(
        records=records,
        through=found.through,
        head=found.head,
        floor=found.floor,
        gap=found.gap,
        granted=found.granted,
    )


def read_records(said: Any) -> tuple[LinkedRecord, ...]:
    """The records in an answer."""
    try:
        return tuple(map(_record, msgspec.convert(said, tuple[_Row, ...])))
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"these are no records of a link: {str(error)[:300]}") from error


def _record(row: _Row) -> LinkedRecord:
    _check_counts([row.seq, row.hops])
    try:
        time_ns = parse_time(row.time)
    except (ValueError, OverflowError) as error:
        raise MalformedRecord(f"record {row.seq} of a link has no time") from error
    if not 0 <= time_ns <= _LAST_NS:
        raise MalformedRecord(f"record {row.seq} of a link was said at {row.time}, when there were no links")
    return LinkedRecord(
        seq=row.seq,
        time_ns=time_ns,
        origin=row.origin,
        channel=row.channel,
        sender=row.sender,
        signature=row.sig,
        payload=row.payload,
        hops=row.hops,
        mark=row.mark,
    )


def _check_counts(numbers: Sequence[int]) -> None:
    if any(not 0 <= each <= MOST for each in numbers):
        raise MalformedRecord("a page of a link names a sequence that no log has")


def _check_texts(*texts: str) -> None:
    if any(len(each) > LONGEST for each in texts):
        raise MalformedRecord(f"a page of a link has a name of more than {LONGEST} characters")


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
_Seq = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class LinkedMail(msgspec.Struct, frozen=True, kw_only=True):
    """A direct message as the space of its sender has it, at `seq` of its mail."""

    seq: _Seq
    sender: _Text
    to: _Text
    sig: _Text
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
    #: tells it from another record at the same sequence of mail that was set back (`record_mark`)
    mark: _Text = ""

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


class MailPage(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a sequence of the mail of an epoch, for those who were known; all of it from `after` up to `through`
    is here. `mark` is of the record at `through`, whosever it is; empty if there is none."""

    mail: Annotated[tuple[LinkedMail, ...], msgspec.Meta(max_length=MAIL_PER_PAGE)]
    epoch: _Text
    people: _Text
    through: _Seq
    more: bool
    #: not above what was asked for
    after: _Seq
    mark: _Text = ""
    #: another record is at a sequence that the asker remembers
    set_back: bool = False
    #: its broker, by its process: another one may have forgotten what was told last
    broker: _Text = ""


class ToldReceipt(msgspec.Struct, frozen=True):
    """What became of a direct message, as the space of its reader tells the space of its sender."""

    sender: str
    id: str
    to: str
    stage: ReceiptStage
    #: where it is in the mail of its sender's space
    seq: int
    why: _Text = ""


_Receipts = Annotated[list[ToldReceipt], msgspec.Meta(max_length=RECEIPTS_AT_ONCE)]
_Claims = Annotated[list[Stamp], msgspec.Meta(max_length=CLAIMS_AT_ONCE)]


def read_mail(said: Any) -> MailPage:
    """The page in an answer of another space."""
    try:
        page = msgspec.convert(said, MailPage)
        for each in page.mail:
            check_agent_id(each.sender)
            check_agent_id(each.to)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"this is no page of mail: {str(error)[:200]}") from error
    return page


def read_claims(said: Any) -> list[Stamp]:
    """The records that another space remembers, newest first; MalformedRecord if that cannot be read."""
    try:
        return sorted(msgspec.convert(said, _Claims), key=lambda each: each.seq, reverse=True)
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"`marks` are up to {CLAIMS_AT_ONCE} sequences with marks: {error}") from error


def read_receipts(said: Any) -> list[ToldReceipt]:
    """What another space says of direct messages; MalformedRecord if it cannot be read."""
    try:
        found: list[ToldReceipt] = msgspec.convert(said, _Receipts)
        for each in found:
            check_agent_id(each.sender)
            check_agent_id(each.to)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"these are no receipts: {str(error)[:200]}") from error
    if any(each.stage not in TOLD_STAGES or not is_message_id(each.id) or each.seq < 0 for each in found):
        raise MalformedRecord(f"a receipt of a link has an id, and a stage of {', '.join(TOLD_STAGES)}")
    return found


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


class ToldTask(msgspec.Struct, frozen=True, kw_only=True):
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


_Told = Annotated[list[ToldTask], msgspec.Meta(max_length=TASKS_PER_PAGE)]


def read_tasks(said: Any) -> TaskPage:
    """The tasks in an answer of another space. A row that is none is passed over: others do not wait for it."""
    rows = said.get("tasks") if isinstance(said, dict) else None
    if not isinstance(rows, list) or len(rows) > TASKS_PER_PAGE:
        raise MalformedRecord(f"an answer with tasks is a list of up to {TASKS_PER_PAGE}")
    found: list[LinkedTask] = []
    for row in rows:
        with suppress(msgspec.ValidationError, InvalidName):
            task = msgspec.convert(row, LinkedTask)
            check_agent_id(task.sender)
            check_role(task.role)
            found.append(task)
    return TaskPage(tuple(found), bool(said.get("more")), len(rows) - len(found))


def read_told_tasks(said: Any) -> list[ToldTask]:
    """How far another space says that tasks are; MalformedRecord if it cannot be read."""
    try:
        found: list[ToldTask] = msgspec.convert(said, _Told)
        for each in found:
            check_agent_id(each.sender)
            if each.worker:
                check_agent_id(each.worker)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"this does not say how far tasks are: {str(error)[:200]}") from error
    if any(each.state not in TOLD_STATES or not is_message_id(each.id) or each.part >= each.parts for each in found):
        raise MalformedRecord(f"a task of a link has an id, and is one of {', '.join(TOLD_STATES)}")
    return found


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


class PeoplePage(msgspec.Struct, frozen=True, kw_only=True):
    """Agents whose access records lie after a sequence, in their order. All up to `through` are told."""

    people: Annotated[tuple[Statement, ...], msgspec.Meta(max_length=PEOPLE_PER_PAGE)]
    through: Annotated[int, msgspec.Meta(ge=0, le=MOST)]
    more: bool
    epoch: Annotated[str, msgspec.Meta(max_length=256)]
    #: the steward's key, and the records that named it, if the asker did not know it
    key: Annotated[str, msgspec.Meta(max_length=100)]
    rotations: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=1_000)] = ()
    #: whether direct messages pass the link, and tasks, as far as that space says
    direct: bool = True
    tasks: bool = False


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


def read_people(said: Any) -> PeoplePage:
    """The page in an answer of another space."""
    try:
        return msgspec.convert(said, PeoplePage)
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"this is no page of a roster: {str(error)[:200]}") from error


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
