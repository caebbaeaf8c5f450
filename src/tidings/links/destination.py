"""The log of the space this worker belongs to: what came into it over links, and how more is put into it.

What is put in is published as it is, with where it was said beside it, and the broker acknowledges each record. Nobody
is asked for that; whether it counts is decided by the link record in force at its sequence. An acknowledgement that
does not come says nothing, and is told as that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tidings.contract.core import Request
from tidings.contract.links import (
    ImportChannelsRequest,
    ImportFacts,
    ImportFactsRequest,
    ImportIndexRequest,
    ImportLinksRequest,
    PeerProgress,
)
from tidings.errors import (
    BrokerUnreachable,
    HeaderRefused,
    LogFull,
    MailboxFull,
    NotLookedFor,
    OutcomeUnknown,
    TidingsError,
    TooLarge,
    UnhealthyError,
)
from tidings.links.connection import LinkConnection
from tidings.links.ports import AdmittedAt, IndexPage, IndexRow, LinkAdmission, LocalFacts
from tidings.links.validation import PAGE_RECORDS
from tidings.nats.client import Connection
from tidings.nats.core import header_block
from tidings.nats.errors import ApiError, NatsError, NoResponders, NotConnected, PublishDenied, Refusal, Unwritable
from tidings.nats.jetstream import publish, publish_all
from tidings.nats.jetstream_api import Ack
from tidings.rpc.control import ControlClient
from tidings.wire.links import origin_fields
from tidings.wire.message import MAX_PAYLOAD
from tidings.wire.rulings import Link
from tidings.wire.signing import SIGNATURE_HEADER, is_spelled
from tidings.wire.subjects import Subjects

#: records, and bytes, that wait for their acknowledgement: a page at once
WINDOW, WINDOW_BYTES = PAGE_RECORDS, 4 * 1024 * 1024
#: seconds for an acknowledgement; the broker forgets it then
PATIENCE = 5.0
A = TypeVar("A")


class LinkInForce(NamedTuple):
    """A link record, and how far the other space is with what it shares."""

    record: Link
    push: PeerProgress | None = None


class LocalLinks(NamedTuple):
    """What this space's steward says of its links."""

    facts: LocalFacts
    links: tuple[LinkInForce, ...]


class LocalSpace:
    """This space as its own worker sees it, on one connection for all links."""

    def __init__(self, url: str | Callable[[], str], creds: Path, space: str) -> None:
        self.subjects = Subjects(space)
        #: hear that the connection came back
        self.on_back: list[Callable[[], None]] = []
        self.connection = LinkConnection(
            url, creds, name="link, local", on_open=self._opened, on_reconnected=self._reconnected
        )
        #: the highest sequence that was acknowledged to us
        self.acknowledged = 0

    async def close(self) -> None:
        await self.connection.close()

    async def _opened(self, _connection: Connection) -> None:
        self._reconnected()

    def _reconnected(self) -> None:
        for hear in tuple(self.on_back):
            hear()

    async def ask(self, request: Request[A]) -> A:
        connection = await self.connection.get()
        control = ControlClient(connection, self.subjects, self.connection.user, timeout=15.0)
        return await control.call(request)

    async def links(self) -> LocalLinks:
        """Every link record in force, on or off."""
        found = await self.ask(ImportLinksRequest())
        return LocalLinks(_facts(found), tuple(LinkInForce(row.record, row.push) for row in found.links))

    async def facts(self, link: str | None = None) -> tuple[LocalFacts, bool]:
        """The log as it is, what a link lets in, and whether the log takes messages."""
        found = await self.ask(ImportFactsRequest(after=self.acknowledged, link=link))
        return _facts(found, found.agreed, found.authority or ""), found.open

    async def put_mail(self, to: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Put a direct message of another space into the mail here, as it was signed."""
        await self._put("mail", self.subjects.direct(to, sender), payload, headers)

    async def put_task(self, role: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> int:
        """Queue a task of another space here, as it was signed; answers where it is in the queue."""
        return await self._put("tasks", self.subjects.task(role, sender), payload, headers)

    async def _put(self, what: str, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        connection = await self.connection.get()
        if len(payload) > MAX_PAYLOAD:
            raise TooLarge(f"{what} of {len(payload)} bytes: that is larger than any message may be")
        try:
            return (await publish(connection, subject, payload, headers, timeout=PATIENCE)).seq
        except (PublishDenied, NoResponders) as error:
            raise BrokerUnreachable(f"nobody takes {what} in space {self.subjects.space} now ({error})") from error
        except (ApiError, NatsError, OSError) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> TidingsError:
        """What it means for a message that publishing it raised this: why it is not stored, or that nobody knows."""
        name = self.subjects.space
        match error:
            case ApiError(refusal=Refusal.SUBJECT_FULL):
                return MailboxFull(f"there is no room for more of this sender in space {name}: {error.description}")
            case ApiError(refusal=Refusal.STREAM_FULL):
                return LogFull(f"the log of space {name} is full: {error.description}")
            case ApiError(refusal=Refusal.TOO_LARGE):
                return TooLarge(f"space {name} takes nothing of that size: {error.description}")
            case ApiError():
                return BrokerUnreachable(f"space {name} did not take it: {error.description}")
            case NotConnected():
                return BrokerUnreachable(f"this space's broker is away ({error})")
            case OutcomeUnknown() | PublishDenied() | Unwritable():
                return error
            case TimeoutError():
                return OutcomeUnknown("no acknowledgement came in time: whether it is stored is not known")
        return OutcomeUnknown(f"the connection went: whether it is stored is not known ({error})")


class LocalDestination:
    """What one link puts into the log here."""

    def __init__(self, space: LocalSpace, link: str, *, patience: float = PATIENCE) -> None:
        self.space, self.link, self.patience = space, link, patience
        #: which broker, by its process, answered of which epoch
        self._asked: tuple[str, str] | None = None

    async def facts(self) -> LocalFacts:
        broker = (await self.space.connection.get()).incarnation
        found = (await self.space.facts(self.link))[0]
        self._asked = broker, found.epoch
        return found

    async def index(self, after: int) -> IndexPage:
        found = await self.space.ask(ImportIndexRequest(after=after))
        rows = tuple(IndexRow(*row) for row in found.rows)
        return IndexPage(epoch=found.epoch, rows=rows, through=found.through)

    async def unlisted(self, channels: Collection[str]) -> Collection[str]:
        return frozenset((await self.space.ask(ImportChannelsRequest(tuple(sorted(channels))))).unlisted)

    async def admit(self, batch: Sequence[LinkAdmission], epoch: str) -> list[AdmittedAt | TidingsError]:
        done: list[AdmittedAt | TidingsError] = []
        for window in _windows(batch):
            done += await self._admit(window, epoch)
        return done

    async def _admit(self, window: Sequence[LinkAdmission], epoch: str) -> list[AdmittedAt | TidingsError]:
        """All are on their way before the first answer is waited for."""
        connection = await self.space.connection.get()
        if self._asked is None or self._asked[1] != epoch or self._asked[0] != connection.incarnation:
            other = NotLookedFor(
                f"the broker of space {self.space.subjects.space} is another process than the one that was asked what "
                "it holds: nothing was sent, and it is asked again"
            )
            return [other] * len(window)
        written = [self._written(each) for each in window]
        messages = [each for each in written if not isinstance(each, TidingsError)]
        answers = iter(await publish_all(connection, messages, timeout=self.patience, only=self._asked[0]))
        return [each if isinstance(each, TidingsError) else await self._read(next(answers)) for each in written]

    def _written(self, each: LinkAdmission) -> tuple[str, bytes, bytes] | TidingsError:
        """Subject, header block and payload, or why it can never be written."""
        record = each.record
        if len(record.payload) > MAX_PAYLOAD:
            return TooLarge(f"record {record.seq} has {len(record.payload)} bytes, more than a message may")
        if not is_spelled(record.signature):
            return HeaderRefused(f"record {record.seq} has no signature that can be written")
        headers = dict(origin_fields(record.origin, record.channel, record.hops))
        headers |= {SIGNATURE_HEADER: record.signature, "Nats-Msg-Id": each.message_id}
        try:
            subject = self.space.subjects.via(self.link, record.sender, each.ours)
            return subject, header_block(headers.items()), record.payload
        except TidingsError as error:  # what cannot be written is a WireError, a name that is none a UsageError
            return error

    async def _read(self, answer: Ack | Exception) -> AdmittedAt | TidingsError:
        if isinstance(answer, NoResponders):
            return await self._why_nobody_takes_it()
        if isinstance(answer, Exception):
            return self.space.failure(answer)
        self.space.acknowledged = max(self.space.acknowledged, answer.seq)
        return AdmittedAt(answer.seq, answer.duplicate)

    async def _why_nobody_takes_it(self) -> TidingsError:
        """The gate is closed, or there is no leader just now. Nothing was stored."""
        name = self.space.subjects.space
        try:
            _, is_open = await self.space.facts()
        except UnhealthyError as error:
            return error
        except TidingsError as error:
            return BrokerUnreachable(f"nobody takes what comes into space {name}: {error}")
        if not is_open:
            return LogFull(f"the log of space {name} is full, and takes no messages until there is room")
        return BrokerUnreachable(f"nobody takes what comes into space {name}: its broker is starting")


def _facts(found: ImportFacts, agreed: int | None = None, authority: str = "") -> LocalFacts:
    return LocalFacts(
        space=found.space,
        epoch=found.epoch,
        head=found.head,
        floor=found.floor,
        agreed=agreed,
        authority=authority,
        listing=found.listing,
        share=found.share,
    )


def _windows(batch: Sequence[LinkAdmission]) -> Iterator[Sequence[LinkAdmission]]:
    start = size = 0
    for number, each in enumerate(batch):
        size += len(each.record.payload)
        if number > start and (number - start >= WINDOW or size > WINDOW_BYTES):
            yield batch[start:number]
            start, size = number, len(each.record.payload)
    if batch:
        yield batch[start:]
