"""One round about who is in a linked space: what is new there is read and verified, and our own steward is told.

    peer's steward: statements after a sequence -> verified -> ledger, names pinned -> our steward, if it knows others

The key they are signed with is the one in the link record, or one that it names in turn by signed records. A peer
whose log was set back, or whose steward has another key, is read from the beginning, and whoever was known stays so
until that is done. What does not verify is refused
whole, and nothing of that page is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol, TypeVar

import msgspec

from tidings.contract.core import Request
from tidings.contract.link_worker import DirectoryStatus
from tidings.contract.links import DirectoryRow, ImportDirectoryRequest, LinkRosterAnswer, LinkRosterRequest
from tidings.errors import DeniedError, PageRefused, TidingsError
from tidings.links import directory as book
from tidings.links.directory import Passing, PeerPlace, ReadThrough
from tidings.links.link_store import BookedLink
from tidings.server.steward_keys import followed_key
from tidings.wire.link_exchange import PEOPLE_PER_PAGE, Person, read_statement
from tidings.wire.rulings import Link
from tidings.wire.subjects import Subjects

#: pages of one round; a space whose agents change faster than we read is read on in the next one
MOST_PAGES = 64
#: of the rows of one request to our own steward, which takes 128 KiB with whatever else is in it
ROWS_BYTES = 64 * 1024
A = TypeVar("A")


class AskedSteward(Protocol):
    """A steward that answers a worker: ours, or the one of a linked space."""

    async def ask(self, request: Request[A]) -> A: ...


class AskedPeer(AskedSteward, Protocol):
    @property
    def subjects(self) -> Subjects: ...


class PeopleRound:
    """Of one link. `record` is the link record it is carried by."""

    def __init__(self, space: str, record: Link, jobs: BookedLink, peer: AskedPeer, local: AskedSteward) -> None:
        self.place = PeerPlace(space, record.origin)
        self._record, self._jobs, self._peer, self._local = record, jobs, peer, local
        self._taken: tuple[str, ...] = ()

    async def run(self) -> None:
        try:
            await self._read()
        except DeniedError:  # the other space ended the link, or lets nobody be known any more
            await self.withdraw()
            raise
        except TidingsError:  # what was known before still holds, and a new steward of ours does not know it
            await self._hand_over()
            raise
        await self._hand_over()

    async def withdraw(self) -> None:
        """Nobody of that space is to be known here for now. What was written to them waits, as it would for a space
        that is away."""
        await self._hand_over(hidden=True)

    async def passing(self) -> Passing:
        """What the other space lets pass beside channels, as it last said."""
        return await self._jobs.read(lambda c: book.passing(c, self.place))

    async def facts(self) -> DirectoryStatus:
        found = await self._jobs.read(lambda c: book.sorted_people(c, self.place))
        changed = tuple((each.name, each.id) for each in found.refused)
        taken = await self._jobs.read(lambda c: book.taken(c, self.place))
        return DirectoryStatus(
            known=len(found.known), changed=changed, taken=tuple(dict.fromkeys((*self._taken, *taken)))
        )

    # --- reading ---

    async def _read(self) -> None:
        for _ in range(MOST_PAGES):
            read = await self._jobs.read(lambda c: book.read_through(c, self.place))
            page = await self._peer.ask(LinkRosterRequest(after=read.through, key=read.key))
            key = page.key if page.key == read.key else self._followed(page)
            if (page.epoch, key) != (read.epoch, read.key):
                await self._jobs.write(partial(book.begin_again, place=self.place, epoch=page.epoch, key=key))
                if read.through:
                    continue
            people = self._verified(page, read.through, key)
            if people:
                through = ReadThrough(page.epoch, page.through, key)
                await self._jobs.write(partial(book.take, place=self.place, people=people, read=through))
            passes = Passing(page.direct, page.tasks)
            if passes != await self.passing():
                await self._jobs.write(partial(book.note_passing, place=self.place, passes=passes))
            if not page.more:
                if await self._jobs.read(lambda c: book.is_stale(c, self.place)):
                    await self._jobs.write(partial(book.drop_stale, place=self.place))
                return

    def _followed(self, page: LinkRosterAnswer) -> str:
        record = self._record
        if record.steward is None:
            raise PageRefused(
                f"link {record.link} does not say which key its other space is ruled by: agree on it anew"
            )
        found = followed_key(
            self._peer.subjects, record.origin, record.steward, map(msgspec.to_builtins, page.rotations)
        ).key
        if found != page.key:
            whose = record.space or record.origin
            raise PageRefused(
                f"the steward of {whose} signs with {page.key[:60]}, and no record that {record.steward} signed leads "
                "there: ask its operator whether it was made anew"
            )
        return found

    def _verified(self, page: LinkRosterAnswer, after: int, key: str) -> list[Person]:
        record = self._record
        people = [read_statement(each, record.origin, key, record.link) for each in page.people]
        seqs = [after, *(each.seq for each in people)]
        rising = all(one < other for one, other in pairwise(seqs))
        if not rising or page.through != seqs[-1] or (page.more and not people):
            raise PageRefused("the other space tells of its agents out of order, or does not go on")
        return people

    # --- telling our own steward ---

    async def _hand_over(self, *, hidden: bool = False) -> None:
        known = (await self._jobs.read(lambda c: book.sorted_people(c, self.place))).known
        gone = await self._jobs.read(lambda c: book.gone(c, self.place))
        link, passes = self._record.link, await self.passing()
        version = book.version_of(known, gone, hidden=hidden, passes=passes)
        if (await self._local.ask(ImportDirectoryRequest(link, version))).version == version:
            return
        refused: list[str] = []
        after = 0
        for rows in row_pages(known):
            more = after + len(rows) < len(known)
            request = ImportDirectoryRequest(
                link=link,
                version=version,
                people=tuple(rows),
                after=after,
                more=more,
                gone=() if more else tuple(gone),
                hidden=hidden,
                direct=passes.direct,
                tasks=passes.tasks,
            )
            refused += (await self._local.ask(request)).refused
            after += len(rows)
        self._taken = tuple(refused)


def row_pages(known: Sequence[Person]) -> Iterator[list[DirectoryRow]]:
    """Rows for our own steward, as many at once as it takes; one page at least."""
    page: list[DirectoryRow] = []
    size = 0
    for each in known:
        row = DirectoryRow(each.id, each.name, each.roles)
        length = len(msgspec.json.encode(row)) + 1
        if page and (size + length > ROWS_BYTES or len(page) == PEOPLE_PER_PAGE):
            yield page
            page, size = [], 0
        page.append(row)
        size += length
    yield page
