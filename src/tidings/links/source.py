"""The log of a linked space, as its steward shows it to us: pages, single records, digests, and wakes.

The other space is not trusted. What it answers is read strictly; an error that it names is taken for what such an
answer can be, never for one of our own; its words are cut to a line before anybody reads them. What a page may be after
our token, and whether a record in it is true, is the engine's to judge.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tidings.contract.core import Request
from tidings.contract.links import (
    LinkBucketsRequest,
    LinkDigestRequest,
    LinkFetchRequest,
    LinkHelloRequest,
    LinkIdsRequest,
    LinkPageAnswer,
    LinkPageRequest,
)
from tidings.errors import (
    AuthRevoked,
    ConflictError,
    DeniedError,
    EndedThere,
    MalformedDigest,
    MalformedRecord,
    OutcomeUnknown,
    PageRefused,
    StewardUnreachable,
    TidingsError,
    UnreachableError,
    WireError,
)
from tidings.links.compare import ComparisonLimits
from tidings.links.connection import LinkConnection
from tidings.links.ports import Fetched, PeerFacts, Prepare
from tidings.nats import jwt
from tidings.nats.client import Connection
from tidings.rpc.control import encode_request
from tidings.util.private_files import read_private, write_private
from tidings.util.task_ends import end_tasks
from tidings.wire.digests import BucketsAnswer, Digest, DigestAnswer, IdsAnswer, RecordIdentity
from tidings.wire.link_exchange import LinkedRow
from tidings.wire.links import LinkedRecord, LinkPage, Token
from tidings.wire.subjects import Subjects

#: seconds for an answer; a page of a busy space may wait for another one's
PATIENCE = 15.0
#: for how long a digest is asked for again while it is being made, and the pause between
DIGEST_WITHIN, DIGEST_PAUSE = 900.0, 0.5
#: how often a digest is begun again, and days of channels that are taken of one
DIGEST_TRIES, MOST_PAIRS = 3, ComparisonLimits().days
#: how often it asks for a newer token: where nobody can be cut they hold for 15 minutes
RENEW_EVERY = 240.0
#: seconds for which a page that was asked for ahead is what the other space would say
AHEAD_FOR = 10.0
_MOST_WORDS = 300
A = TypeVar("A")
log = logging.getLogger(__name__)


class _PeerRefusal(msgspec.Struct):
    code: str = ""
    message: str = ""


class _PeerAnswer(msgspec.Struct):
    ok: bool
    error: _PeerRefusal = msgspec.field(default_factory=_PeerRefusal)


class _Ahead(NamedTuple):
    """A page that is asked for before it is wanted."""

    token: Token
    at: float
    asking: asyncio.Task[LinkPage]


async def _as_it_is(records: Sequence[LinkedRecord]) -> None:
    del records


class PeerSource:
    """`space` is what the other space calls itself; `on_wake` hears that there may be something new. What is asked for
    before it is wanted is given to `prepare`."""

    def __init__(
        self,
        url: str | Callable[[], str],
        creds: Path,
        space: str,
        *,
        on_wake: Callable[[], None] = lambda: None,
        prepare: Prepare = _as_it_is,
        patience: float = PATIENCE,
    ) -> None:
        self.subjects = Subjects(space)
        self.patience = patience
        self._on_wake, self._prepare = on_wake, prepare
        self.connection = LinkConnection(
            url,
            creds,
            name="link",
            on_open=self._hear_wakes,
            on_reconnected=self._reconnected,
            on_closed=lambda: self._on_wake(),  # a user that was cut is told so when it asks
        )
        #: hears that the connection came back
        self.on_back: Callable[[], None] = lambda: None
        #: what it last said, and when
        self.said: PeerFacts | None = None
        self._said_at = time.monotonic()
        self._ahead: _Ahead | None = None
        #: the record by which it shared the last page
        self._granted = 0

    def _reconnected(self) -> None:
        self._on_wake()
        self.on_back()

    async def _hear_wakes(self, connection: Connection) -> None:
        await connection.listen(self.subjects.live_link(self.connection.user), lambda _message: self._on_wake())
        await connection.flush()

    async def close(self) -> None:
        if self._ahead is not None:
            await end_tasks([self._ahead.asking])
        await self.connection.close()

    # --- what the engine asks ---

    async def hello(self) -> PeerFacts:
        answer = await self.ask(LinkHelloRequest())
        said = self.said = msgspec.convert(answer, PeerFacts, from_attributes=True)
        self._said_at = time.monotonic()
        self._renew(said.jwt)
        return said

    async def page(self, token: Token, limit: int) -> LinkPage:
        """What follows is asked for while this page is handled."""
        if time.monotonic() - self._said_at > RENEW_EVERY:
            await self.hello()
        page = await self._asked_ahead(token) or await self._page(token, limit, token.seq)
        if self._granted not in (0, page.granted):
            self._said_at = -RENEW_EVERY  # it shares something else now
        self._granted = page.granted or self._granted
        if page.more and page.through.seq > token.seq:
            asking = asyncio.create_task(self._page_behind(page.through, limit, token.seq), name="the page behind")
            self._ahead = _Ahead(page.through, time.monotonic(), asking)
        return page

    async def _page(self, token: Token, limit: int, handled: int) -> LinkPage:
        request = LinkPageRequest(
            space=token.space, epoch=token.epoch, after=token.seq, mark=token.mark, limit=limit, handled=handled
        )
        return read_page(await self.ask(request))

    async def _page_behind(self, token: Token, limit: int, handled: int) -> LinkPage:
        page = await self._page(token, limit, handled)
        await self._prepare(page.records)
        return page

    async def _asked_ahead(self, token: Token) -> LinkPage | None:
        """The page behind a token, if it was asked for just now. What failed is asked for again, and tells why then."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        await asyncio.wait({ahead.asking})  # the other space answers one question at a time
        if ahead.asking.cancelled() or ahead.asking.exception() is not None:
            return None
        fresh = time.monotonic() - ahead.at < AHEAD_FOR
        return ahead.asking.result() if fresh and ahead.token == token else None

    async def fetch(self, seqs: Sequence[int]) -> Fetched:
        if self._ahead is not None:
            await asyncio.wait({self._ahead.asking})
        found = await self.ask(LinkFetchRequest(tuple(seqs)))
        if not all(each in seqs for each in found.missing):
            raise MalformedRecord("the other space lists records as missing that it was not asked for")
        return Fetched(epoch=found.epoch, records=read_records(found.records), missing=found.missing)

    # --- what comparing asks (`links/compare.py`) ---

    async def digest(self, through: int) -> DigestAnswer:
        """The whole, of as many answers as it takes. One that was begun again from another floor is asked for anew."""
        for _ in range(DIGEST_TRIES):
            found = await self._digest_pages(through)
            if found is not None:
                return found
        raise StewardUnreachable("the floor of the other log rose time and again while its digest was read: ask again")

    async def _digest_pages(self, through: int) -> DigestAnswer | None:
        channels: dict[str, dict[str, Digest]] = {}
        after, floor, pairs = ("", ""), None, 0
        while True:
            page = await self._ask_until_made(LinkDigestRequest(through, after))
            if floor not in (None, page.floor):
                return None
            floor = page.floor
            for channel, days in sorted(page.channels.items()):
                for day, row in sorted(days.items()):
                    if (channel, day) <= after:
                        raise MalformedDigest(f"the digest comes to {channel[:80]!r} on {day[:80]!r} a second time")
                    after, pairs = (channel, day), pairs + 1
                    channels.setdefault(channel, {})[day] = Digest.decode(row)
            if pairs > MOST_PAIRS or (page.more and not page.channels):
                raise MalformedDigest(f"the digest has more than {MOST_PAIRS:,} days of channels, or does not go on")
            if not page.more:
                return DigestAnswer(page.floor, page.through, channels)

    async def buckets(self, channel: str, day: str, through: int) -> BucketsAnswer:
        found = await self._ask_until_made(LinkBucketsRequest(channel, day, through))
        return BucketsAnswer(found.floor, found.through, tuple(map(Digest.decode, found.buckets)))

    async def ids(self, channel: str, day: str, buckets: Sequence[int], through: int, after: int) -> IdsAnswer:
        request = LinkIdsRequest(channel=channel, day=day, buckets=tuple(buckets), through=through, after=after)
        found = await self._ask_until_made(request)
        return IdsAnswer(found.floor, found.through, tuple(map(RecordIdentity.decode, found.ids)), found.more)

    # --- asking ---

    async def _ask_until_made(self, request: Request[A]) -> A:
        """A digest of much takes several questions: each goes on where the one before ended."""
        deadline = time.monotonic() + DIGEST_WITHIN
        while True:
            try:
                return await self.ask(request)
            except _Busy as error:
                if time.monotonic() >= deadline:
                    raise StewardUnreachable(f"the digest was not made in time ({error})") from error
            await asyncio.sleep(DIGEST_PAUSE)

    async def ask(self, request: Request[A]) -> A:
        """Returns the answer of the linked space. Raises a WireError if it is not one that stewards give."""
        who, do = f"space {self.subjects.space}", request.operation.verb
        subject = self.subjects.control(request.operation.service, self.connection.user)
        try:
            message = await self.connection.ask(subject, encode_request(request, None), who, self.patience)
        except AuthRevoked as error:
            raise self._cut_off(who) from error
        try:
            said = msgspec.json.decode(message.data, type=_PeerAnswer)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PageRefused(f"the answer of {who} to `{do}` is not one that stewards give") from error
        if not said.ok:
            raise _refused(said.error, who, do)
        try:
            return request.operation.read_answer(message.data)  # type: ignore[no-any-return]
        except (WireError, RecursionError) as error:
            raise _MALFORMED.get(do, MalformedRecord)(f"{who}: {_printable(str(error))}") from error

    # --- its credential ---

    def _cut_off(self, who: str) -> DeniedError:
        """Why their broker does not take our key: they cut it, unless it was not renewed in time."""
        with suppress(TidingsError, ValueError, KeyError, TypeError):
            ends = int(jwt.decode(jwt.split_credentials(read_private(self.connection.creds))[0]).get("exp") or 0)
            if ends and ends <= time.time():
                until = f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M} UTC"
                return AuthRevoked(
                    f"the key of this space at {who} held until {until}, and was not renewed in time: `tidings link "
                    "renew` on one side, and accept the line that it prints on the other"
                )
        return EndedThere(
            f"{who} does not take the key of this space any more: its operator ended the link, or its guard against "
            "floods did"
        )

    def _renew(self, token: str) -> None:
        """Keep a newer token of our user. It opens nothing without the key beside it, and is theirs to take back."""
        if not token:
            return
        held, key = jwt.split_credentials(read_private(self.connection.creds))
        try:
            new, old = jwt.decode(token), jwt.decode(held)
            newer = new["sub"] == key.id and int(new["iat"]) > int(old["iat"])
        except (TidingsError, ValueError, KeyError, TypeError) as error:
            log.warning("a token of space %s cannot be read: %s", self.subjects.space, error)
            return
        if newer:
            write_private(self.connection.creds, jwt.credentials(token, key))


class _Busy(StewardUnreachable):
    """Asked again, it may be answered."""


def _refused(said: _PeerRefusal, who: str, do: str) -> TidingsError:
    """What a refusal means to us, whatever it calls itself."""
    text = f"{who} refuses `{do}`: {_printable(said.message)}"
    if said.code in _CODES_OF_DENIAL:
        return EndedThere(text) if do in _OF_THE_LOG else DeniedError(text)
    if said.code == ConflictError.code:
        return _Busy(text)
    if said.code == OutcomeUnknown.code:
        return OutcomeUnknown(text)
    if said.code in _CODES_OF_ABSENCE:
        return StewardUnreachable(text)
    return PageRefused(f"{text} ({said.code[:40]})")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_WORDS])


def read_page(answer: LinkPageAnswer) -> LinkPage:
    """Returns the page in an answer. Raises MalformedRecord if a record in it cannot be kept."""
    return LinkPage(
        records=read_records(answer.records),
        through=answer.through,
        head=answer.head,
        floor=answer.floor,
        gap=answer.gap,
        granted=answer.granted,
    )


def read_records(rows: Iterable[LinkedRow]) -> tuple[LinkedRecord, ...]:
    return tuple(each.record for each in rows)


def _codes_below(root: type[TidingsError]) -> frozenset[str]:
    return frozenset([root.code, *(code for each in root.__subclasses__() for code in _codes_below(each))])


_CODES_OF_DENIAL = _codes_below(DeniedError)
#: what an invalid answer is to callers; of other operations it is a MalformedRecord
_MALFORMED: Mapping[str, type[WireError]] = {
    "hello": PageRefused,
    "digest": MalformedDigest,
    "buckets": MalformedDigest,
    "ids": MalformedDigest,
}
#: whoever is denied these has no link there that is on
_OF_THE_LOG = frozenset({"hello", "page", "fetch", "digest", "buckets", "ids"})
#: also what failed there for no reason that concerns us
_CODES_OF_ABSENCE = _codes_below(UnreachableError) | {TidingsError.code}
