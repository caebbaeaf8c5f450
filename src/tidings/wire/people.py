"""Who is in a space, as it tells a linked one: one signed statement for each agent, and nothing it does not need; pure.

An access record says more than another space may know: what the agent may read and post, and its token. So it is not
sent; the steward states id, name, roles and what key came before, and signs that for one link. The receiver knows the
key of that steward from its link record, and follows rotations of it (`server/steward_keys.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import names, signing, strict_json
from tidings.wire.keys import KeyPair
from tidings.wire.operations import MOST

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
    return Statement(text, signing.sign(key, space_id, _KIND, link, text.encode()))


def read_statement(said: Statement, space_id: str, steward_key: str, link: str) -> Person:
    """The agent a statement is about; MalformedRecord if that steward did not say this for this link."""
    payload = said.text.encode(errors="replace")
    if not signing.verifies(said.sig, space_id, _KIND, steward_key, link, payload):
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
