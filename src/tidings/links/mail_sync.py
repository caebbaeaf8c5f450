"""One round about the direct messages of a linked space: what lies there for our agents comes in, and is told of.

    peer's steward: mail after a token -> signed by whom, for whom, there? -> our steward: may it come in?
      -> published as it was signed -> ledger: what became of each, and the token, in one transaction
    our steward: what became of mail of other spaces -> told to the peer's steward

Killed anywhere, it does the same again: the ledger, the steward and the broker each know what is here already. What has
no room waits, and so does what its sender wrote to the same reader after it; the token stays before it, and what others
wrote comes in meanwhile. What never may come in is told to its sender by the other space.

Either space may be set back, by a power cut or an older copy, and use its sequences again. Of the other one we name
records that we remember, and it answers from the newest that it still has. A broker that is another process than
before may lack what the last one acknowledged: if it is the other space's, all that it hands out is looked at once, and
what it forgot is told again; if it is our own, what we let in is looked for, and fetched again if it is lost.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

from tidings.contract.link_worker import LinkedMailCounts
from tidings.contract.links import (
    ImportedMailRequest,
    ImportMailRequest,
    ImportReceiptsAnswer,
    ImportReceiptsRequest,
    LinkMailAnswer,
    LinkMailRequest,
    LinkReceiptsRequest,
    MailOffer,
)
from tidings.errors import MailboxFull, PageRefused, TidingsError, WireError
from tidings.links import mail_store
from tidings.links.directory import PeerPlace
from tidings.links.directory_sync import AskedSteward
from tidings.links.link_store import BookedLink, milliseconds
from tidings.links.mail_store import HandledMail, MailKey, MailLooked, MailState
from tidings.util.failpoints import reach
from tidings.wire.link_exchange import (
    CLAIMS_AT_ONCE,
    MAIL_PER_PAGE,
    RECEIPTS_AT_ONCE,
    LinkedMail,
    ToldReceipt,
    check_mail,
)
from tidings.wire.links import MailOrigin, mail_origin_field
from tidings.wire.records import Stamp
from tidings.wire.rulings import Link
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.states import ReceiptStage

#: pages of one round, of mail and of receipts
MOST_PAGES = 16
#: seconds after which what has no room is tried again
LOOK_AGAIN = 10.0


class LocalPost(AskedSteward, Protocol):
    """Our own space, as far as mail is put into it."""

    async def put_mail(self, to: str, sender: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Have the broker store it. MailboxFull, LogFull, WireError and UnreachableError say why it did not."""
        ...


@dataclass(slots=True)
class _MailLook:
    """At the mail of the other space, from the token to its end. It may take several rounds."""

    epoch: str
    people: str
    #: how far it came
    through: int
    #: the token stays here, before the first message that waits
    held: int | None = None
    #: senders and readers between whom something waits: what follows comes after it
    late: set[tuple[str, str]] = field(default_factory=set)
    #: why something waits
    words: str = ""
    #: when what waits is tried again; until then it goes on with what is new
    again_at: float = math.inf

    def hold(self, mail: LinkedMail, verdict: str) -> None:
        self.late.add((mail.sender, mail.to))
        self.stop_before(mail)
        self.words = self.words or verdict.removeprefix("wait: ")

    def stop_before(self, mail: LinkedMail) -> None:
        self.held = min(mail.seq - 1, mail.seq if self.held is None else self.held)

    def go_back(self, after: int) -> None:
        """What lies behind a sequence comes again."""
        self.through = after
        if self.held is not None and self.held >= after:
            self.held = None


class MailRound:
    """Of one link. `record` is the link record it is carried by."""

    def __init__(
        self,
        space: str,
        record: Link,
        ledger: BookedLink,
        peer: AskedSteward,
        local: LocalPost,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.place, self._clock = PeerPlace(space, record.origin), clock
        self._record, self._ledger, self._peer, self._local = record, ledger, peer, local
        #: senders and readers of whose mail the steward knows what we published: it looked since we began, or failed
        self._looked_for: set[tuple[str, str]] = set()
        #: which life of the mail here something is let into is written down before it is: another may not have it
        self._knows_life = False
        #: is everything that was let in known to the ledger? Not before the other space's mail was looked at to its end
        self._settled = False
        self._look: _MailLook | None = None
        #: records of the other space's mail that were seen last, ours or not
        self._seen: deque[Stamp] = deque(maxlen=CLAIMS_AT_ONCE // 2)
        self._waits = ""

    async def run(self) -> None:
        """Mail first: what was refused in this round is told in it."""
        try:
            if not self._knows_life:
                await self._receipts()
                self._knows_life = True
            await self._take()
        except TidingsError:
            self._settled, self._look = False, None
            self._looked_for.clear()
            with suppress(TidingsError):  # what failed first is what is said
                await self._tell()  # what became of the mail before is not kept waiting by what comes
            raise
        await self._tell()

    async def _receipts(self) -> tuple[MailState, ImportReceiptsAnswer]:
        """What became of mail here since it was last told. What was let in is known to be here when this returns."""
        known = await self._ledger.read(lambda c: mail_store.state(c, self.place))
        request = ImportReceiptsRequest(epoch=known.told_epoch, after=known.told_through, mark=known.told_mark)
        found = await self._local.ask(request)
        if found.epoch != known.told_epoch:
            await self._ledger.write(partial(mail_store.begin_again, place=self.place, epoch=found.epoch))
            self._settled, self._look = False, None
        if found.broker != known.broker:
            await self._look_for_lost(found.broker)
        if (found.epoch, found.broker) != (known.told_epoch, known.broker):
            self._looked_for.clear()  # the steward was told of what may be lost
        return known, found

    async def _look_for_lost(self, broker: str) -> None:
        """Another process may not have what the one before acknowledged. Only what the other space may still have
        matters: the rest was read here, or cannot be fetched."""
        keys = await self._ledger.read(lambda c: mail_store.let_in(c, self.place))
        lost: list[MailKey] = []
        for start in range(0, len(keys), MAIL_PER_PAGE):
            part = keys[start : start + MAIL_PER_PAGE]
            offers = tuple(MailOffer(*key) for key in part)
            found = await self._local.ask(ImportMailRequest(link=self._record.link, mail=offers, anew=True))
            lost += [key for key, verdict in zip(part, found.verdicts, strict=True) if verdict != "have"]
        await self._ledger.write(partial(mail_store.lose, place=self.place, lost=lost, broker=broker))
        if lost:
            self._settled, self._look = False, None

    async def facts(self) -> LinkedMailCounts:
        counts = await self._ledger.read(lambda c: mail_store.counts(c, self.place))
        known = await self._ledger.read(lambda c: mail_store.state(c, self.place))
        came, refused = counts.get("admitted", 0), counts.get("refused", 0)
        return LinkedMailCounts(came=came, refused=refused, forged=known.forged, waits=self._waits)

    # --- what comes in ---

    async def _take(self) -> None:
        if self._look is not None and self._look.again_at <= self._clock():
            self._look = None
        for _ in range(MOST_PAGES):
            known = await self._ledger.read(lambda c: mail_store.state(c, self.place))
            look = self._look or _MailLook(known.epoch, known.people, known.through)
            page = await self._page(look)
            if look.through and page.broker != known.their_broker:
                await self._ledger.write(partial(mail_store.look_anew, place=self.place, broker=page.broker))
                self._look = None
                self._seen.clear()
                continue
            if (page.epoch, page.people) != (look.epoch, look.people):
                look = _MailLook(page.epoch, page.people, 0)
            look.go_back(page.after)
            self._look = look
            await self._handle(page, look, known)
            look.through = page.through
            if not page.more:
                self._settled, self._waits = True, look.words
                look.again_at = min(look.again_at, self._clock() + LOOK_AGAIN)
                self._look = look if look.words else None
                return

    async def _page(self, look: _MailLook) -> LinkMailAnswer:
        """What follows the newest record that the other space still has of those we remember."""
        claims = await self._claims(look)
        asked = look.through if claims else 0
        request = LinkMailRequest(epoch=look.epoch, people=look.people, after=asked, marks=tuple(claims))
        page = await self._peer.ask(request)
        check_mail(page.mail)
        is_same = page.epoch == look.epoch
        if page.after > asked:
            raise PageRefused("the other space hands out its mail from behind what it was asked for")
        _check(page)
        if look.epoch and (page.set_back or not is_same):
            await self._ledger.write(lambda c: mail_store.set_back(c, self.place, page.after))
            self._seen = deque((each for each in self._seen if is_same and each.seq <= page.after), self._seen.maxlen)
        seen = [Stamp(each.seq, each.mark) for each in page.mail]
        self._seen.extend(each for each in (*seen, Stamp(page.through, page.mark)) if each.mark)
        return page

    async def _claims(self, look: _MailLook) -> list[Stamp]:
        """Records up to where the look came, newest first."""
        seen = [each for each in self._seen if each.seq <= look.through]
        found = await self._ledger.read(lambda c: mail_store.claims(c, self.place, look.through))
        return sorted({*seen, *found}, key=lambda each: each.seq, reverse=True)[:CLAIMS_AT_ONCE]

    async def _handle(self, page: LinkMailAnswer, look: _MailLook, known: MailState) -> None:
        signed = [each for each in page.mail if each.is_signed(self._record.origin)]
        opened = [(each, _handled(each)) for each in signed]
        offered = {found.key: found for _, found in opened if found.outcome == "had"}
        there = await self._ledger.read(lambda c: mail_store.seqs_of(c, self.place, offered))
        if again := await self._ledger.read(lambda c: mail_store.ended(c, self.place, there)):
            await self._ledger.write(lambda c: mail_store.forget_ends(c, self.place))
            # our own space may have forgotten it, too: then it comes in once more, and its reader tells of it
            there = {key: seq for key, seq in there.items() if again.get(key, "refused") == "refused"}
        # a message that was handled may be at another place now, and its receipts name that
        done = [found for _, found in opened if found.outcome == "refused" or found.key in there]
        shown = {found.key for _, found in opened}
        gone = await self._ledger.read(lambda c: mail_store.gone(c, self.place, page.after, page.through, shown))
        known_before = len(done)
        failure: TidingsError | None = None
        try:
            fresh = [each for each in opened if each[1].outcome == "had" and each[1].key not in there]
            await self._offer(fresh, look, done)
        except TidingsError as error:  # what came in before it is written down all the same
            failure = error
        reach("link.mail.admitted")
        if any(each.outcome == "had" for each in done[known_before:]):  # its receipts may have been passed by
            await self._ledger.write(lambda c: mail_store.tell_again(c, self.place))
        token = page.epoch, page.people, page.through if look.held is None else look.held
        moved = failure is None and (*token, page.broker) != (*known[:3], known.their_broker)
        if done or gone or moved:
            # what lies behind the token comes again, and is counted then
            forged = sum(each.seq <= token[2] for each in page.mail) - sum(each.seq <= token[2] for each in signed)
            looked = MailLooked(*token, forged, page.broker)
            commit = partial(mail_store.commit, place=self.place, done=done, looked=looked, gone=gone)
            await self._ledger.write(partial(commit, now=milliseconds()))
            reach("link.mail.committed")
        if failure is not None:
            raise failure
        if let_in := tuple(MailOffer(*each.key) for each in done if each.outcome != "refused"):
            await self._local.ask(ImportedMailRequest(let_in))

    async def _offer(
        self, fresh: Sequence[tuple[LinkedMail, HandledMail]], look: _MailLook, done: list[HandledMail]
    ) -> None:
        """Let in what may come, one after the other; what became of each is added to `done`."""
        if not fresh:
            return
        offers = tuple(MailOffer(*found.key, size=len(mail.payload)) for mail, found in fresh)
        pairs = {(mail.sender, mail.to) for mail, _ in fresh}
        under_way = fresh[0][0]
        try:
            anew = not pairs <= self._looked_for
            answer = await self._local.ask(ImportMailRequest(link=self._record.link, mail=offers, anew=anew))
            self._looked_for |= pairs
            for (mail, found), verdict in zip(fresh, answer.verdicts, strict=True):
                under_way = mail
                if verdict.startswith("wait") or (verdict == "take" and (mail.sender, mail.to) in look.late):
                    look.hold(mail, verdict)
                elif verdict == "have":
                    done.append(found)
                elif verdict == "take":
                    done.append(await self._let_in(mail, found, answer.agreed))
                else:
                    done.append(found.refused(verdict.removeprefix("no: ")))
        except TidingsError:
            look.stop_before(under_way)
            raise

    async def _let_in(self, mail: LinkedMail, found: HandledMail, agreed: int) -> HandledMail:
        origin = MailOrigin(self._record.origin, self._record.link, agreed)
        headers = dict([mail_origin_field(origin)]) | {SIGNATURE_HEADER: mail.sig}
        headers["Nats-Msg-Id"] = await self._message_id(found.key)
        try:
            await self._local.put_mail(mail.to, mail.sender, mail.payload, headers)
        except MailboxFull:
            return found.refused("the mailbox of its reader is full of what its sender sent before")
        except WireError as error:
            return found.refused(str(error))
        return found._replace(outcome="admitted")

    async def _message_id(self, key: MailKey) -> str:
        """Nobody else knows it, so that nobody can have used it before; the same whenever it is tried again, but after
        the mail here was set back or its broker started anew: that may remember what it lost, and the steward looks."""
        known = await self._ledger.read(lambda c: mail_store.state(c, self.place))
        life = f"{known.told_epoch} {known.broker} {known.losses}"
        return await self._ledger.message_id(self.place.space, "mail", life, self._record.origin, *key)

    # --- what is told ---

    async def _tell(self) -> None:
        await self._tell_refused()
        for _ in range(MOST_PAGES):
            known, said = await self._receipts()
            keys = [(each.sender, each.id, each.to) for each in said.receipts]
            seqs = await self._ledger.read(partial(mail_store.seqs_of, place=self.place, keys=keys))
            rows = list(zip(said.receipts, keys, strict=True))
            await self._say([ToldReceipt(*key, it.stage, seqs[key], it.why) for it, key in rows if key in seqs])
            epoch, told = said.epoch, Stamp(said.through, said.mark)
            # what is told of a message without a row may be of one that came in and was not written down yet
            unknown = next((n for n, (_, key) in enumerate(rows) if key not in seqs and not self._settled), None)
            if unknown is not None:
                from_there = Stamp(known.told_through, known.told_mark) if said.after else Stamp(0, "")
                last = rows[unknown - 1][0]
                told = Stamp(last.n, last.mark) if unknown else from_there
            if (epoch, told.seq, told.mark) != known[3:6] or seqs:
                moved = partial(mail_store.move_told, place=self.place, epoch=epoch, told=told, ended=list(seqs))
                await self._ledger.write(moved)
            if unknown is not None or not said.more:
                return

    async def _tell_refused(self) -> None:
        due = await self._ledger.read(lambda c: mail_store.refused(c, self.place, RECEIPTS_AT_ONCE))
        stage = ReceiptStage.UNDELIVERABLE
        await self._say([ToldReceipt(*each.key, stage, each.seq, each.why) for each in due])
        if due:
            await self._ledger.write(lambda c: mail_store.note_told(c, self.place, [each.key for each in due]))

    async def _say(self, told: Sequence[ToldReceipt]) -> None:
        """It answers by number what it does not believe; that is over. It fails while it cannot know: that is not."""
        for start in range(0, len(told), RECEIPTS_AT_ONCE):
            await self._peer.ask(LinkReceiptsRequest(tuple(told[start : start + RECEIPTS_AT_ONCE])))


def _check(page: LinkMailAnswer) -> None:
    """It goes on from where it says, in order."""
    seqs = [page.after, *(each.seq for each in page.mail)]
    rising = all(one < other for one, other in pairwise(seqs))
    stands = page.more and page.through <= page.after
    if not rising or page.through < seqs[-1] or stands:
        raise PageRefused("the other space hands out its mail out of order, or does not go on")


def _handled(mail: LinkedMail) -> HandledMail:
    """A message, as if it were here; what was signed and is no message is refused under a name of its own."""
    try:
        return HandledMail(mail.sender, mail.id, mail.to, mail.seq, "had", mark=mail.mark)
    except WireError as error:
        name = hashlib.sha256(mail.payload).hexdigest()[:32]
        return HandledMail(mail.sender, name, mail.to, mail.seq, "had", mark=mail.mark).refused(str(error))
