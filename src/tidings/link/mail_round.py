"""One round about the direct messages of a linked space: what lies there for our agents comes in, and is told of.

    peer's steward: mail after a token -> signed by whom, for whom, there? -> our steward: may it come in?
      -> published as it was signed -> ledger: what became of each, and the token, in one transaction
    our steward: what became of mail of other spaces -> told to the peer's steward

Killed anywhere, it does the same again: the ledger, the steward and the broker each know what is here already. What has
no room waits, and so does what its sender wrote to the same reader after it; the token stays before it, and what others
wrote comes in meanwhile. What never may come in is told to its sender by the other space.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from tidings.errors import MailboxFull, PageRefused, TidingsError, WireError
from tidings.failpoints import reach
from tidings.link import ledger as books
from tidings.link import mail_book
from tidings.link.ledger import BookedLink
from tidings.link.mail_book import HandledMail, MailState
from tidings.link.people import PeerPlace
from tidings.link.people_round import AskedSteward
from tidings.wire.link_mail import RECEIPTS_AT_ONCE, LinkedMail, MailPage, read_mail
from tidings.wire.links import MailOrigin, mail_origin_field
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


class _Offered(NamedTuple):
    mail: LinkedMail
    id: str


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
        self.held = mail.seq - 1 if self.held is None else self.held


class MailRound:
    """Of one link. `record` is the link record it is carried by."""

    def __init__(self, space: str, record: Link, ledger: BookedLink, peer: AskedSteward, local: LocalPost) -> None:
        self.place = PeerPlace(space, record.origin)
        self._record, self._ledger, self._peer, self._local = record, ledger, peer, local
        self._secret = b""
        #: what the steward remembers of what lies here may be older than what we published
        self._anew = True
        self._knows_life = False
        #: is everything that was let in known to the ledger? Not before the other space's mail was looked at to its end
        self._settled = False
        self._look: _MailLook | None = None
        self._waits = ""

    async def run(self) -> None:
        """Mail first: what was refused in this round is told in it."""
        try:
            await self._know_life()
            await self._take()
        except TidingsError:
            self._anew, self._settled, self._look = True, False, None
            with suppress(TidingsError):  # what failed first is what is said
                await self._tell()  # what became of the mail before is not kept waiting by what comes
            raise
        await self._tell()

    async def _know_life(self) -> None:
        """Which life of the mail here something is let into is written down before it is: another may not have it."""
        if self._knows_life:
            return
        known = await self._ledger.read(lambda c: mail_book.state(c, self.place))
        epoch = str((await self._local.ask("receipts", epoch=known.told_epoch, after=known.told_through))["epoch"])
        if epoch != known.told_epoch:
            await self._begin_again(epoch)
        self._knows_life = True

    async def _begin_again(self, epoch: str) -> None:
        await self._ledger.write(partial(mail_book.begin_again, place=self.place, epoch=epoch))
        self._settled, self._look = False, None

    async def facts(self) -> dict[str, Any]:
        counts = await self._ledger.read(lambda c: mail_book.counts(c, self.place))
        forged = await self._ledger.read(lambda c: mail_book.forged(c, self.place))
        found = {"came": counts.get("admitted", 0), "refused": counts.get("refused", 0), "forged": forged}
        return {**found, "waits": self._waits}

    # --- what comes in ---

    async def _take(self) -> None:
        if self._look is not None and self._look.again_at <= time.monotonic():
            self._look = None
        for _ in range(MOST_PAGES):
            known = await self._ledger.read(lambda c: mail_book.state(c, self.place))
            look = self._look or _MailLook(known.epoch, known.people, known.through)
            asked = {"epoch": look.epoch, "people": look.people, "after": look.through}
            page = read_mail(await self._peer.ask("mail", **asked))
            # of the same epoch, and ends before the token: it was set back
            lost = page.epoch != look.epoch or (page.people == look.people and page.through < look.through)
            anew = lost or page.people != look.people
            _check(page, 0 if anew else look.through)
            if lost and look.epoch:  # what it was told, too, maybe
                await self._ledger.write(lambda c: mail_book.tell_again(c, self.place))
            if anew:
                look = _MailLook(page.epoch, page.people, 0)
            self._look = look
            await self._handle(page, look, known)
            look.through = page.through
            if not page.more:
                self._settled, self._waits = True, look.words
                look.again_at = min(look.again_at, time.monotonic() + LOOK_AGAIN)
                self._look = look if look.words else None
                return

    async def _handle(self, page: MailPage, look: _MailLook, known: MailState) -> None:
        signed = [each for each in page.mail if each.is_signed(self._record.origin)]
        opened = [_opened(each) for each in signed]
        offered = [each for each in opened if isinstance(each, _Offered)]
        there = await self._ledger.read(lambda c: mail_book.seqs_of(c, self.place, map(_key, offered)))
        # a message that was handled may be at another place now, and its receipts name that
        done = [HandledMail(*_key(each), each.mail.seq, "had") for each in offered if _key(each) in there]
        done += [each for each in opened if isinstance(each, HandledMail)]
        failure: TidingsError | None = None
        try:
            await self._offer([each for each in offered if _key(each) not in there], look, done)
        except TidingsError as error:  # what came in before it is written down all the same
            failure = error
        reach("link.mail.admitted")
        token = page.epoch, page.people, page.through if look.held is None else look.held
        if done or (failure is None and token != known[:3]):
            commit = partial(mail_book.commit, place=self.place, done=done, epoch=page.epoch, people=page.people)
            # what lies behind the token comes again, and is counted then
            forged = sum(each.seq <= token[2] for each in page.mail) - sum(each.seq <= token[2] for each in signed)
            await self._ledger.write(partial(commit, through=token[2], now=_now(), forged=forged))
            reach("link.mail.committed")
        if failure is not None:
            raise failure
        if let_in := [_row(*each.key) for each in done if each.outcome != "refused"]:
            await self._local.ask("took", mail=let_in)

    async def _offer(self, fresh: Sequence[_Offered], look: _MailLook, done: list[HandledMail]) -> None:
        """Let in what may come, one after the other; what became of each is added to `done`."""
        under_way = fresh[0].mail if fresh else None
        try:
            agreed, verdicts = await self._verdicts(fresh)
            for each, verdict in zip(fresh, verdicts, strict=True):
                under_way, pair = each.mail, (each.mail.sender, each.mail.to)
                if verdict.startswith("wait") or (verdict == "take" and pair in look.late):
                    look.hold(each.mail, verdict)
                else:
                    done.append(await self._dispose(each, verdict, agreed))
        except TidingsError:
            if under_way is not None:
                look.stop_before(under_way)
            raise

    async def _verdicts(self, fresh: Sequence[_Offered]) -> tuple[int, list[str]]:
        if not fresh:
            return 0, []
        rows = [_row(each.mail.sender, each.id, each.mail.to) | {"size": len(each.mail.payload)} for each in fresh]
        said = await self._local.ask("mail", link=self._record.link, mail=rows, anew=self._anew)
        self._anew = False
        return int(said["agreed"]), list(said["verdicts"])

    async def _dispose(self, offered: _Offered, verdict: str, agreed: int) -> HandledMail:
        mail = offered.mail
        became = partial(HandledMail, mail.sender, offered.id, mail.to, mail.seq)
        if verdict == "have":
            return became("had")
        if verdict != "take":
            return became("refused", verdict.removeprefix("no: ")[:200])
        origin = MailOrigin(self._record.origin, self._record.link, agreed)
        headers = dict([mail_origin_field(origin)]) | {SIGNATURE_HEADER: mail.sig}
        headers["Nats-Msg-Id"] = await self._message_id(offered)
        try:
            await self._local.put_mail(mail.to, mail.sender, mail.payload, headers)
        except MailboxFull:
            return became("refused", "the mailbox of its reader is full of what its sender sent before")
        except WireError as error:
            return became("refused", str(error)[:200])
        return became("admitted")

    async def _message_id(self, offered: _Offered) -> str:
        """Nobody else knows it, so that nobody can have used it before; the same whenever it is tried again, but after
        the mail here was set back: the broker may remember what it lost."""
        if not self._secret:
            self._secret = await self._ledger.read(lambda c: books.secret(c, self.place.space))
        life = (await self._ledger.read(lambda c: mail_book.state(c, self.place))).told_epoch
        text = "\n".join(("mail", life, self._record.origin, *_key(offered))).encode()
        return hmac.digest(self._secret, text, hashlib.sha256).hex()[:32]

    # --- what is told ---

    async def _tell(self) -> None:
        await self._tell_refused()
        for _ in range(MOST_PAGES):
            known = await self._ledger.read(lambda c: mail_book.state(c, self.place))
            said = await self._local.ask("receipts", epoch=known.told_epoch, after=known.told_through)
            if said["epoch"] != known.told_epoch:
                await self._begin_again(str(said["epoch"]))
            keys = [(each["sender"], each["id"], each["to"]) for each in said["receipts"]]
            seqs = await self._ledger.read(partial(mail_book.seqs_of, place=self.place, keys=keys))
            rows = list(zip(said["receipts"], keys, strict=True))
            await self._say([_receipt(each, seqs[key]) for each, key in rows if key in seqs])
            epoch, through = str(said["epoch"]), int(said["through"])
            # what is told of a message without a row may be of one that came in and was not written down yet
            unknown = [] if self._settled else [int(each.get("n", 1)) for each, key in rows if key not in seqs]
            through = min([through, *(n - 1 for n in unknown)])
            if (epoch, through) != (known.told_epoch, known.told_through):
                await self._ledger.write(partial(mail_book.move_told, place=self.place, epoch=epoch, through=through))
            if unknown or not said["more"]:
                return

    async def _tell_refused(self) -> None:
        due = await self._ledger.read(lambda c: mail_book.refused(c, self.place, RECEIPTS_AT_ONCE))
        stage = ReceiptStage.UNDELIVERABLE
        await self._say([{**_row(*each.key), "stage": stage, "seq": each.seq, "why": each.why} for each in due])
        if due:
            await self._ledger.write(lambda c: mail_book.note_told(c, self.place, [each.key for each in due]))

    async def _say(self, told: list[dict[str, Any]]) -> None:
        """It answers by number what it does not believe; that is over. It fails while it cannot know: that is not."""
        for start in range(0, len(told), RECEIPTS_AT_ONCE):
            await self._peer.ask("told", receipts=told[start : start + RECEIPTS_AT_ONCE])


def _check(page: MailPage, after: int) -> None:
    """It goes on from there, in order."""
    seqs = [after, *(each.seq for each in page.mail)]
    rising = all(one < other for one, other in pairwise(seqs))
    stands = page.more and page.through <= after
    if not rising or page.through < seqs[-1] or stands:
        raise PageRefused("the other space hands out its mail out of order, or does not go on")


def _opened(mail: LinkedMail) -> _Offered | HandledMail:
    """A message, or that what was signed is none: it is refused under a name of its own."""
    try:
        return _Offered(mail, mail.id)
    except WireError as error:
        name = hashlib.sha256(mail.payload).hexdigest()[:32]
        return HandledMail(mail.sender, name, mail.to, mail.seq, "refused", str(error)[:200])


def _key(offered: _Offered) -> tuple[str, str, str]:
    return offered.mail.sender, offered.id, offered.mail.to


def _receipt(told: Mapping[str, Any], seq: int) -> dict[str, Any]:
    return {**{name: told[name] for name in ("sender", "id", "to", "stage", "why")}, "seq": seq}


def _row(sender: str, mid: str, to: str) -> dict[str, Any]:
    return {"sender": sender, "id": mid, "to": to}


def _now() -> int:
    return int(time.time() * 1000)
