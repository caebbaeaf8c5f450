"""Agents of linked spaces: our own are stated to a space that may know them, and theirs are kept for ours to reach.

Statements are made when they are asked for, by the link record in force then, and signed for that link alone
(`wire/link_exchange.py`). What our own worker verified of another space is in memory here, and it hands it over again
when a steward starts. It shows as rows `bob@acme` of the roster, while the link is on and shares its roster. A key
belongs to one space: one that is an agent of ours, or of a space that stated it before, is nobody of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tidings.contract.channels import RawRecord
from tidings.contract.core import Caller
from tidings.contract.links import (
    DirectoryRow,
    ImportDirectoryAnswer,
    ImportDirectoryRequest,
    LinkRosterAnswer,
    LinkRosterRequest,
)
from tidings.errors import DeniedError, UsageError
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.link_handlers import GrantedLink, LinkHandlers
from tidings.steward.link_records import links_on
from tidings.steward.roster_service import RosterService
from tidings.wire.link_exchange import (
    MOST_PEOPLE,
    MOST_ROLES,
    PEOPLE_PER_PAGE,
    STATED_CHARACTERS,
    Person,
    Statement,
    state,
)
from tidings.wire.names import check_agent_id, check_agent_name, check_role, covers_any, foreign_name, shown_space
from tidings.wire.roster import AgentEntry
from tidings.wire.rulings import Link
from tidings.wire.signing import KeyPair

#: questions for statements that are answered at the same time: of one link, and of all
EACH, AT_ONCE = 1, 2
#: seconds from when a steward starts or a link is agreed on, for which mail to unknown keys waits for a worker's word
AWAITED = 24 * 3600.0


class Foreigner(NamedTuple):
    """An agent of a linked space."""

    link: str
    row: AgentEntry


@dataclass(slots=True)
class _Kept:
    """What was handed over of one link."""

    version: str = ""
    people: dict[str, AgentEntry] = field(default_factory=dict)
    #: keys that were agents there
    gone: frozenset[str] = frozenset()
    #: they get their mail, and nobody is shown them: the link is paused, or the other space tells nothing any more
    hidden: bool = False
    #: the other space lets direct messages pass, too, and tasks
    direct: bool = True
    tasks: bool = False
    #: a version that is being handed over, and how many of it were told; not all of them are taken
    staged: str = ""
    told: int = 0
    rows: dict[str, AgentEntry] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.people, *self.gone)


class LinkedPeople:
    """Agents of linked spaces, as our own worker told them in this term. `admit` hears whose rows changed."""

    def __init__(self, space: SpaceContext, admit: Callable[[Iterable[str]], None] = lambda _ids: None) -> None:
        self.space = space
        self.admit = admit
        self._kept: dict[str, _Kept] = {}
        #: key -> the one link it belongs to
        self._owners: dict[str, str] = {}
        #: link -> since when it is on and shares its roster, as far as this steward saw it
        self._since: dict[str, float] = {}
        #: links, and whether mail and tasks passed at the last look: rows say whether they do
        self._passing: set[tuple[str, bool, bool]] = set()

    # --- questions ---

    def find(self, agent_id: str) -> Foreigner | None:
        """The agent of another space that has this key, as long as that space lets it be known."""
        link = self._owner(agent_id)
        record = self._sharing().get(link) if link is not None else None
        if link is None or record is None or (row := self._kept[link].people.get(agent_id)) is None:
            return None
        kept = self._kept[link]
        direct, tasks = record.passes_mail and kept.direct, record.passes_tasks and kept.tasks
        name = foreign_name(row.name, row.id, record.space, record.origin)
        shown = AgentEntry(id=row.id, name=name, roles=row.roles, direct=direct, space=record.origin, tasks=tasks)
        return Foreigner(link, shown)

    def row(self, agent_id: str) -> AgentEntry | None:
        """As agents here are shown it."""
        found = self.find(agent_id)
        return found.row if found is not None and not self._kept[found.link].hidden else None

    def of_link(self, link: str) -> frozenset[str]:
        """The keys of the agents at its other end, and of those who were."""
        kept = self._kept.get(link) if link in self._sharing() else None
        if kept is None:
            return frozenset()
        return frozenset(each for each in kept.keys if self._owner(each) == link)

    def takes_mail(self, agent_id: str) -> bool:
        """Is or was it an agent of a space that direct messages may go to? While that is not known yet, anybody is."""
        return self.is_awaited or self.is_reached(agent_id)

    def is_reached(self, agent_id: str) -> bool:
        """Is or was it, by what is known, an agent of a space that direct messages may go to?"""
        record = self._sharing().get(self._owner(agent_id) or "")
        return record is not None and record.passes_mail

    @property
    def is_awaited(self) -> bool:
        """Is there a link over which mail passes, of which nobody has told yet who is at its other end? Not for ever:
        a link that no worker carries would keep all mail to nobody."""
        late = time.monotonic() - AWAITED
        untold = (link for link, record in self._sharing().items() if record.passes_mail and not self.version(link))
        return any(link not in self._since or self._since[link] > late for link in untold)

    def hears(self, agent_id: str, channel: str) -> bool:
        """Is a channel shared with the space of this agent?"""
        found = self.find(agent_id)
        if found is None or self._kept[found.link].hidden:
            return False
        return covers_any(self._sharing()[found.link].shares, channel)

    def version(self, link: str) -> str:
        """Names who is known at its other end; empty if nobody has told it in this term."""
        kept = self._kept.get(link)
        return kept.version if kept else ""

    def unheard(self) -> dict[str, str]:
        """Linked spaces whose agents are not shown now, and why: nobody has told yet in this term who they are, or they
        are hidden. Whoever knew them does not take them for nobody."""
        found: dict[str, str] = {}
        for link, record in self._sharing().items():
            if not self.version(link) or self._kept[link].hidden:
                found[shown_space(record.space, record.origin)] = "paused" if self.version(link) else "starting"
        return found

    def _owner(self, agent_id: str) -> str | None:
        """The link whose other space has or had this key. Whom it was handed over for first has it: which space stated
        it first is what our worker's ledger knows, across restarts."""
        return self._owners.get(agent_id) if self.space.access(agent_id) is None else None

    def _sharing(self) -> dict[str, Link]:
        return {link: record for link, _, record in links_on(self.space) if record.roster == "on"}

    # --- changes ---

    async def run(self) -> None:
        """Forget whoever is at the end of a link that is off, or does not share its roster any more."""
        sharing, moment = self._sharing(), time.monotonic()
        self._since = {link: self._since.get(link, moment) for link in sharing}
        for link in self._kept.keys() - sharing.keys():
            kept = self._kept.pop(link)
            self._disown(kept)
            self.admit(kept.people)
        passing = {(link, record.passes_mail, record.passes_tasks) for link, record in sharing.items()}
        for link in {each[0] for each in passing ^ self._passing} & self._kept.keys():
            self.admit(self._kept[link].people)
        self._passing = passing

    @handler(ImportDirectoryRequest)
    async def hand_over(self, _caller: Caller, request: ImportDirectoryRequest) -> ImportDirectoryAnswer:
        """Who is in a linked space, in pages: `people` from number `after` on, and whether there are `more`; with the
        last of them, who has `gone`, and whether they are `hidden`: they keep their mail, and are shown to nobody;
        and whether their space lets `direct` messages and `tasks` pass: if not, what was written to them waits.
        Asked without people it answers which `version` is known. Who is one of ours, or of another space, is
        refused."""
        link, version, rows, after = request.link, request.version, request.people, request.after
        if link not in self._sharing():
            raise DeniedError(f"link {link} is not on, or does not share its roster")
        kept = self._kept.setdefault(link, _Kept())
        if rows is None:
            return ImportDirectoryAnswer(version=kept.version, refused=())
        _check_rows(rows)
        if after == 0:
            kept.staged, kept.rows, kept.told = version, {}, 0
        if kept.staged != version or kept.told != after or after + len(rows) > MOST_PEOPLE:
            raise UsageError(f"admission people: {kept.told} of this version are known; begin again from 0")
        refused = tuple(each.id for each in rows if self._is_elsewhere(each.id, link))
        kept.rows |= {each.id: AgentEntry(id=each.id, name=each.name, roles=each.roles) for each in rows}
        kept.told += len(rows)
        if not request.more:
            kept.hidden, kept.direct, kept.tasks = request.hidden, request.direct, request.tasks
            self._replace(link, kept, frozenset(request.gone))
        return ImportDirectoryAnswer(version=kept.version, refused=refused)

    def _replace(self, link: str, kept: _Kept, gone: frozenset[str]) -> None:
        """What was handed over takes the place of what was known, but for keys that belong to somebody else."""
        before = kept.people
        self._disown(kept)
        kept.people = {key: row for key, row in kept.rows.items() if not self._is_elsewhere(key, link)}
        kept.gone = frozenset(key for key in gone if not self._is_elsewhere(key, link))
        self._owners.update(dict.fromkeys(kept.keys, link))
        kept.version, kept.rows, kept.staged = kept.staged, {}, ""
        self.admit([*before, *kept.people])

    def _disown(self, kept: _Kept) -> None:
        for key in kept.keys:
            self._owners.pop(key, None)

    def _is_elsewhere(self, agent_id: str, link: str) -> bool:
        return self.space.access(agent_id) is not None or self._owners.get(agent_id, link) != link


def _check_rows(rows: Sequence[DirectoryRow]) -> None:
    if len({each.id for each in rows}) != len(rows):
        raise UsageError("admission people: `people` names an agent twice")
    for each in rows:
        check_agent_id(each.id)
        check_agent_name(each.name)
        for role in each.roles:
            check_role(role)


class RosterStatements:
    """`link roster`: the agents of this space, stated for the worker of a linked one."""

    def __init__(self, linked: LinkHandlers, roster: RosterService) -> None:
        self.space, self.writer = linked.space, linked.writer
        self.linked, self.roster = linked, roster
        self.turns = ConcurrencyLimit(AT_ONCE, EACH, "a roster of this link is being told already: wait for it")

    @handler(LinkRosterRequest)
    async def people(self, caller: Caller, request: LinkRosterRequest) -> LinkRosterAnswer:
        """Agents whose access records lie after a sequence, revoked ones too. `key`: the steward's, as it is known
        there; if it is another one now, the records that named it come too."""
        after, link = request.after, self._granted(caller.id).link
        async with self.turns.turn(link):
            told = request.key == self.writer.key.id
            rotations = [] if told else await self.roster.rotations()
            granted, key = self._granted(caller.id), self.writer.key  # as they are when the answer is made
            owned = ((self.writer.access_seq(owner), owner) for owner in self.space.table.owners())
            due = sorted(each for each in owned if each[0] > after)
            people: list[Statement] = []
            through = after
            for seq, owner in due[:PEOPLE_PER_PAGE]:
                people.append(self._stated(key, owner, seq, granted.link))
                through = seq
                if sum(len(each.text) for each in people) > STATED_CHARACTERS:
                    break
        return LinkRosterAnswer(
            people=tuple(people),
            through=through,
            more=len(due) > len(people),
            epoch=self.linked.marks.file.epoch,
            key=key.id,
            rotations=msgspec.convert(rotations, tuple[RawRecord, ...]),
            direct=granted.record.passes_mail,
            tasks=granted.record.passes_tasks,
        )

    def _granted(self, user: str) -> GrantedLink:
        granted = self.linked.granted(user)
        if granted.record.roster != "on":
            raise DeniedError(f"link {granted.link} does not share who is in space {self.space.info.name}")
        return granted

    def _stated(self, key: KeyPair, owner: str, seq: int, link: str) -> Statement:
        access = self.space.access(owner)
        assert access is not None
        person = Person(
            id=owner,
            name=access.name,
            roles=access.roles[:MOST_ROLES],
            seq=seq,
            revoked=access.revoked,
            succeeds=access.succeeds,
        )
        return state(key, self.space.info.id, link, person)
