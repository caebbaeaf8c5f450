"""Direct messages to agents of linked spaces, and from them: handed out, let in, and told of.

    ours for them   `link mail`: what lies here for agents of the asking space, until that tells what became of it
    theirs for us   `admission mail`: may our worker put these into the mail here? It publishes them itself, as signed
    receipts        `admission receipts`: what became of theirs here; `link told`: what became of ours there

Everything is decided by the link record in force at that moment: both switches are on, or nothing passes. A space is
believed about messages to its own agents and no others, and hands out what agents wrote whom it stated. What one link
can leave here is bounded, in number and bytes, and so is what one agent of it can: others do not wait for them.

Mail that was read is removed, so a token cannot name the record it stands at. Whoever asks names records that it
remembers instead, and is answered from the newest that is still the same: whatever a stream that was set back has at
sequences that it used before comes behind it.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from tidings.contract.core import Caller, EmptyAnswer
from tidings.contract.links import (
    ImportedMailRequest,
    ImportedReceipt,
    ImportMailRequest,
    ImportReceiptsAnswer,
    ImportReceiptsRequest,
    ImportVerdictsAnswer,
    LinkMailAnswer,
    LinkMailRequest,
    LinkReceiptsAnswer,
    LinkReceiptsRequest,
    MailOffer,
)
from tidings.errors import ConflictError, DeniedError, UsageError
from tidings.nats.errors import NatsError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.fair_queue import ConcurrencyLimit
from tidings.steward.link_handlers import GrantedLink, LinkHandlers
from tidings.steward.link_records import in_a_line, link_on, links_on
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.receipts import Key, ReceiptStore
from tidings.steward.shares import sender_of
from tidings.wire.link_exchange import (
    MAIL_PER_PAGE,
    TOLD_STAGES,
    LinkedMail,
    ToldReceipt,
    check_receipts,
)
from tidings.wire.message import is_message_id
from tidings.wire.names import check_agent_id
from tidings.wire.records import Stamp
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Direct

#: bytes of a page of mail; one message may be larger
PAGE_BYTES = 256 * 1024
#: mailboxes that are read one by one for a page; of more, the mail is read as it lies
MOST_INBOXES = 32
#: records that are looked at for a page then, and their bytes
MOST_SCANNED, SCANNED_BYTES = 1_000, 8 * 1024 * 1024
#: questions for mail that are answered at the same time: of one link, and of all
EACH, AT_ONCE = 1, 2
#: direct messages of one link that may wait here to be read; of one agent of it, a tenth
MOST_WAITING = 5_000
#: of the mail here, for all links together, each the same part; the rest is for agents of this space
MOST_FILLED = 0.5
#: bytes a message takes beside its payload, about
BESIDE = 512
#: pairs of agents of whom it is remembered which ids lie here
PAIRS_KEPT = 1_024
#: receipts of one answer, and records that are looked at for them
RECEIPTS_EACH, RECEIPTS_READ = 100, 1_000
#: new records that are looked at for whom they are, before linked spaces are told that there is something
LOOKED_AT = 64


class _Gathered:
    """Records for a page, from several mailboxes: the first ones, up to one more than fits. All up to `reach` are
    there."""

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.records: list[StoredRecord] = []

    def add(self, page: Iterable[StoredRecord]) -> None:
        found = (each for each in (*self.records, *page) if each.seq <= self.reach)
        self.records, size = [], 0
        for record in sorted(found, key=lambda each: each.seq):
            self.records.append(record)
            size += len(record.payload)
            if len(self.records) > MAIL_PER_PAGE or size > PAGE_BYTES:
                self.reach = record.seq
                return


class _Weight(NamedTuple):
    """Messages from one agent to another, and their bytes, as they were counted last."""

    messages: int
    size: int

    def is_about(self, messages: int) -> bool:
        return abs(messages - self.messages) * 4 <= self.messages


class _Room:
    """What of one link may come in now. Who waits, waits with everything behind it."""

    def __init__(self, waiting: Counter[str], size: int, share: int) -> None:
        self.waiting, self.size, self.share = waiting, size, share
        self._late: dict[str, str] = {}

    def take(self, mail: MailOffer) -> str:
        words = self._late.get(mail.sender) or self._refusal(mail)
        if words:
            self._late[mail.sender] = words
            return f"wait: {words}"
        self.waiting[mail.sender] += 1
        self.size += mail.size + BESIDE
        return "take"

    def _refusal(self, mail: MailOffer) -> str:
        each, total = max(1, MOST_WAITING // 10), self.waiting.total()
        if total >= MOST_WAITING:
            return f"as many messages of this link lie here as may, {MOST_WAITING:,}"
        if total and self.size + mail.size + BESIDE > self.share:
            return f"messages of this link fill their part of the mail here, {self.share:,} bytes"
        if self.waiting[mail.sender] >= each:
            return f"as many messages of {mail.sender} lie here as may, {each:,}"
        return ""


class LinkMail:
    def __init__(self, space: SpaceContext, linked: LinkHandlers, people: LinkedPeople, receipts: ReceiptStore) -> None:
        self.space, self.linked, self.people, self.receipts = space, linked, people, receipts
        self.stream = space.subjects.direct_stream
        self.turns = ConcurrencyLimit(AT_ONCE, EACH, "mail of this link is being handed out already: wait for it")
        #: (target, sender) -> ids of messages that lie here, as far as this steward looked; and under which broker
        self._lying: OrderedDict[tuple[str, str], set[str]] = OrderedDict()
        self._looked_at = ""
        #: senders whose messages were let in, and by which link: they count while they lie here, stated or not
        self._brought: dict[str, str] = {}
        #: of each link, by subject
        self._weights: dict[str, dict[str, _Weight]] = {}
        self._looked: int | None = None

    def _granted(self, user: str) -> GrantedLink:
        granted = self.linked.granted(user)
        if not granted.record.passes_mail:
            raise DeniedError(f"link {granted.link} passes no direct messages")
        return granted

    def _known(self, link: str) -> str:
        """Which people are known at the other end. What is for them cannot be told from the rest before."""
        found = self.people.version(link)
        if not found:
            raise ConflictError(f"who is at the end of link {link} is not known yet: ask again")
        return found

    async def _ends(self) -> tuple[str, int, int]:
        """The epoch of the mail, its first sequence and its last."""
        info = await self.space.js.info(self.stream)
        state = info["state"]
        epoch = f"{self.linked.marks.file.epoch} {info.get('created', '')}"
        return epoch, int(state["first_seq"]), int(state["last_seq"])

    # --- ours for them ---

    @handler(LinkMailRequest)
    async def mail(self, caller: Caller, request: LinkMailRequest) -> LinkMailAnswer:
        """What lies here for agents of the asking space after a sequence; everything, if that was another `epoch` of
        the mail, or other `people` were known: mail to somebody who was not is looked for again. With `marks`, what
        lies after the newest of them that is still the same record."""
        after, granted = request.after, self._granted(caller.id)
        claims = sorted(request.marks, key=lambda each: each.seq, reverse=True)
        async with self.turns.turn(granted.link):
            await self.receipts.ready()
            broker = self.space.js.connection.incarnation
            epoch, first, head = await self._ends()
            people = self._known(granted.link)
            is_same, set_back = request.epoch == epoch, False
            if is_same and claims:
                after, set_back = await self._confirmed(claims, first, head)
            if not is_same or request.people != people or not 0 <= after <= head:
                set_back |= is_same and after > head
                after = 0
            found, through = await self._waiting(granted.link, after + 1, head)
            mark = await self._mark(through, found) if through >= first else ""
            if self._granted(caller.id).link != granted.link or self.people.version(granted.link) != people:
                raise ConflictError("who is known changed while mail was looked for: ask again")
        return LinkMailAnswer(
            mail=tuple(found),
            epoch=epoch,
            people=people,
            through=through,
            more=through < head,
            after=after,
            mark=mark,
            set_back=set_back,
            broker=broker,
        )

    async def _confirmed(self, claims: Iterable[Stamp], first: int, head: int) -> tuple[int, bool]:
        """The newest of these records that is still there, 0 if none is; and whether another one is where one was. One
        that is gone proves nothing: it was read and removed, or what came in its place was."""
        set_back = False
        for claim in claims:
            if claim.seq < max(1, first):
                break
            stored = await self.space.js.at(self.stream, claim.seq, patient=False) if 0 < claim.seq <= head else None
            if stored is not None and stored.mark == claim.mark:
                return claim.seq, set_back
            set_back |= stored is not None or claim.seq > head
        return 0, set_back

    async def _mark(self, seq: int, found: list[LinkedMail]) -> str:
        """Of the record at a sequence, whosever it is; empty if there is none."""
        if found and found[-1].seq == seq:
            return found[-1].mark
        if seq < 1:  # nothing was ever written
            return ""
        stored = await self.space.js.at(self.stream, seq, patient=False)
        return stored.mark if stored is not None else ""

    async def _waiting(self, link: str, start: int, head: int) -> tuple[list[LinkedMail], int]:
        gathered, targets = _Gathered(head), self.people.of_link(link)
        inboxes = await self._inboxes(targets) if start <= head else []
        if len(inboxes) > MOST_INBOXES:
            await self._scan(targets, start, gathered)
            inboxes = []
        for inbox in inboxes:
            async for page in self._pages(inbox, start, gathered.reach):
                gathered.add(page)
                if page[-1].seq >= gathered.reach:
                    break
        return self._fitting(gathered.records, gathered.reach)

    async def _inboxes(self, targets: frozenset[str]) -> list[str]:
        """Those of them that have mail."""
        s = self.space.subjects
        parsed = [s.parse(each) for each in await self.space.js.subjects_of(self.stream, f"{s.root}.dm.>")]
        found = (each.target for each in parsed if isinstance(each, Direct) and each.target in targets)
        return [s.direct_inbox(each) for each in dict.fromkeys(found)]

    async def _scan(self, targets: frozenset[str], start: int, gathered: _Gathered) -> None:
        s, read, size = self.space.subjects, 0, 0
        async for page in self._pages(f"{s.root}.dm.>", start, gathered.reach):
            parsed = ((each, s.parse(each.subject)) for each in page)
            gathered.add([each for each, at in parsed if isinstance(at, Direct) and at.target in targets])
            read, size = read + len(page), size + sum(len(each.payload) for each in page)
            if read >= MOST_SCANNED or size >= SCANNED_BYTES:
                gathered.reach = min(gathered.reach, page[-1].seq)
            if page[-1].seq >= gathered.reach:
                return

    def _pages(self, subjects: str, start: int, end: int) -> AsyncIterator[list[StoredRecord]]:
        """Little more at a time than fits."""
        return self.space.js.read(self.stream, subjects, start, end, page=MAIL_PER_PAGE + 1, max_bytes=2 * PAGE_BYTES)

    def _fitting(self, records: list[StoredRecord], reach: int) -> tuple[list[LinkedMail], int]:
        kept: list[LinkedMail] = []
        size, seen = 0, 0
        for record in records:
            mail = self._handed_out(record)
            if mail is not None:
                size += len(mail.payload)
                if kept and (size > PAGE_BYTES or len(kept) == MAIL_PER_PAGE):
                    return kept, seen
                kept.append(mail)
            seen = record.seq
        return kept, reach

    def _handed_out(self, record: StoredRecord) -> LinkedMail | None:
        """A message of ours that readers take, and of which nothing is known yet."""
        opened = self.space.received(record)
        if opened is None or opened.kind != "dm" or opened.admission is not None:
            return None
        stage = self.receipts.stage_of((opened.sender, opened.message.id, opened.destination))
        if stage is not None and stage.rank > ReceiptStage.CONFIRMED.rank:
            return None
        return LinkedMail(
            seq=record.seq,
            sender=opened.sender,
            to=opened.destination,
            sig=opened.signature,
            payload=record.payload,
            mark=record.mark,
        )

    @handler(LinkReceiptsRequest)
    async def told(self, caller: Caller, request: LinkReceiptsRequest) -> LinkReceiptsAnswer:
        """What became of messages of ours, of which the asking space says it. It is believed about those that are
        addressed to its own agents; the rest is refused, by number. While nobody there is known, nothing is refused."""
        granted = self._granted(caller.id)
        check_receipts(request.receipts)
        await self.receipts.ready()
        self._known(granted.link)
        theirs, refused, new = self.people.of_link(granted.link), [], 0
        if not theirs:  # as long as the worker here withdraws them
            raise ConflictError(f"nobody at the end of link {granted.link} is known now: tell it again later")
        for number, each in enumerate(request.receipts):
            key = (each.sender, each.id, each.to)
            if each.to in theirs and await self._is_ours(key, each.seq):
                new += await self._write(key, each)
            else:
                refused.append(number)
        return LinkReceiptsAnswer(new=new, refused=tuple(refused))

    async def _is_ours(self, key: Key, seq: int) -> bool:
        """Is or was there such a message? One that is gone is known by what was told of it before."""
        if key in self.receipts.lives:
            return self.space.access(key[0]) is not None
        if seq <= 0 or self.space.access(key[0]) is None:
            return False
        # of mail that was set back this steward may remember what was there before
        return await self.receipts.addressed(seq) == key or await self.receipts.addressed(seq, anew=True) == key

    async def _write(self, key: Key, told: ToldReceipt) -> int:
        seq = self.receipts.lives[key].seq if key in self.receipts.lives else told.seq
        if told.stage.rank >= ReceiptStage.EXPIRED.rank and (why := in_a_line(told.why)):
            before = self.receipts.stage_of(key)
            await self.receipts.tell_ended(key, seq, told.stage, why)
            return int(before is not told.stage)
        return await self.receipts.write([(key, seq, told.stage)])

    # --- theirs for us ---

    @handler(ImportMailRequest)
    async def offered(self, _caller: Caller, request: ImportMailRequest) -> ImportVerdictsAnswer:
        """May these come in over a link? For each: `take`, `have` if it lies here or was read, `wait` if there is no
        room now or its sender is not known yet, or why it never may. `size` is what its payload has in bytes. `agreed`
        is the link record that they are to name. `anew`: look what lies here, because more may have been let in than
        we were told."""
        link, offered = request.link, request.mail
        on = link_on(self.space, link)
        if on is None or not on[1].passes_mail:
            raise DeniedError(f"link {link} is not on, or passes no direct messages")
        _check_offers(offered)
        await self.receipts.ready()
        if request.anew:
            for each in offered:
                self._lying.pop((each.to, each.sender), None)
        theirs = self.people.of_link(link)
        verdicts, room = [], await self._room(link, theirs, sum(each.size + BESIDE for each in offered))
        for each in offered:
            verdict = await self._verdict(link, theirs, each) or room.take(each)
            verdicts.append(verdict)
            if verdict == "take":
                self._brought[each.sender] = link
        return ImportVerdictsAnswer(agreed=on[0], verdicts=tuple(verdicts))

    async def _verdict(self, link: str, theirs: frozenset[str], mail: MailOffer) -> str:
        """Why a message is not taken, or that it is here; empty if it may come in."""
        if self.space.active_access(mail.to) is None:
            was = self.space.access(mail.to) is not None
            return "no: its reader was revoked" if was else f"no: there is no such agent in {self.space.info.name}"
        other = self.people.find(mail.sender)
        if self.space.access(mail.sender) is not None or (other is not None and other.link != link):
            return "no: its sender is an agent of another space than it came from"
        key = (mail.sender, mail.id, mail.to)
        if key in self.receipts.lives or mail.id in await self._ids(mail.to, mail.sender):
            return "have"
        return "" if mail.sender in theirs else f"wait: its space has not stated that {mail.sender} is an agent of it"

    async def _ids(self, target: str, sender: str) -> set[str]:
        """Ids of messages that lie here from one to the other; what is let in now counts too."""
        pair = (target, sender)
        if self._looked_at != (broker := self.space.js.connection.incarnation):  # it may have lost some
            self._lying.clear()
            self._looked_at = broker
        if pair not in self._lying:
            head, ids = await self.space.head(self.stream), set[str]()
            subject = self.space.subjects.direct(target, sender)
            async for page in self.space.js.read(self.stream, subject, 1, head):
                ids |= {key[1] for key in map(self.receipts.key_of, page) if key is not None}
            self._lying[pair] = ids
        self._lying.move_to_end(pair)
        while len(self._lying) > PAIRS_KEPT:
            self._lying.popitem(last=False)
        return self._lying[pair]

    @handler(ImportedMailRequest)
    async def took(self, _caller: Caller, request: ImportedMailRequest) -> EmptyAnswer:
        """Remembers what was imported, so that it is not imported again."""
        _check_offers(request.mail)
        for each in request.mail:
            (await self._ids(each.to, each.sender)).add(each.id)
        return EmptyAnswer()

    async def _room(self, link: str, theirs: frozenset[str], wanted: int) -> _Room:
        info = await self.space.js.info(self.stream)
        counts = await self.space.js.counts_of(self.stream, f"{self.space.subjects.root}.dm.>")
        lying = set(map(sender_of, counts))
        self._brought = {each: by for each, by in self._brought.items() if each in lying}
        its = {each: n for each, n in counts.items() if self._is_of(link, theirs, sender_of(each))}
        waiting = Counter[str]()
        for subject, n in its.items():
            waiting[sender_of(subject)] += n
        links = sum(record.passes_mail for _, _, record in links_on(self.space))
        share = int(MOST_FILLED * int(info["config"]["max_bytes"]) / max(1, links))
        fits = int(info["state"]["bytes"]) + wanted <= share  # whoever wrote what lies here
        return _Room(waiting, 0 if fits else await self._size(link, its), share)

    def _is_of(self, link: str, theirs: frozenset[str], sender: str) -> bool:
        if (by := self._brought.get(sender)) is not None:
            return by == link
        return sender in theirs

    async def _size(self, link: str, counts: Mapping[str, int]) -> int:
        """Bytes of these messages, about: what changed little since it was read is not read again."""
        known = self._weights[link] = {
            each: weight for each, weight in self._weights.get(link, {}).items() if each in counts
        }
        head = await self.space.head(self.stream)
        for subject, messages in counts.items():
            if subject not in known or not known[subject].is_about(messages):
                number = size = 0
                async for page in self.space.js.read(self.stream, subject, 1, head):
                    number, size = number + len(page), size + sum(len(each.payload) + BESIDE for each in page)
                known[subject] = _Weight(number, size)
        return sum(weight.size * counts[each] // max(1, weight.messages) for each, weight in known.items())

    @handler(ImportReceiptsRequest)
    async def told_here(self, _caller: Caller, request: ImportReceiptsRequest) -> ImportReceiptsAnswer:
        """What became of messages of other spaces after a sequence of an epoch, oldest first; `n` is the sequence. From
        the beginning, if the record there is not the one with this `mark`. What is removed here is the oldest, so a
        record that is gone, with others before it still there, was lost."""
        at, s = Stamp(request.after, request.mark), self.space.subjects
        broker = self.space.js.connection.incarnation  # before anything is read: it may be another one afterwards
        info = await self.space.js.info(s.audit_stream)
        epoch, head = f"{(await self._ends())[0]} {info.get('created', '')}", int(info["state"]["last_seq"])
        if request.epoch != epoch or not await self._is_told_at(at, info["state"]):
            at = Stamp(0, "")
        found: list[ImportedReceipt] = []
        seen, read, more = at, 0, False
        async for page in self.space.js.read(s.audit_stream, s.audit("receipt") + ".*", at.seq + 1, head, page=200):
            for record in page:
                found += self._foreign(record)
            seen, read = Stamp(page[-1].seq, page[-1].mark), read + len(page)
            if more := seen.seq < head and (len(found) >= RECEIPTS_EACH or read >= RECEIPTS_READ):
                break
        return ImportReceiptsAnswer(
            receipts=tuple(found),
            epoch=epoch,
            broker=broker,
            after=at.seq,
            through=seen.seq,
            mark=seen.mark,
            more=more,
        )

    async def _is_told_at(self, at: Stamp, state: Mapping[str, Any]) -> bool:
        """Is nothing at or before this receipt another one than there was?"""
        if not 0 < at.seq <= int(state["last_seq"]):
            return at.seq == 0
        if at.seq < int(state["first_seq"]):
            return True
        stored = await self.space.js.at(self.space.subjects.audit_stream, at.seq)
        return stored is not None and stored.mark == at.mark

    def _foreign(self, record: StoredRecord) -> Iterable[ImportedReceipt]:
        with suppress(ValueError, KeyError, TypeError):  # boundary: written by another version of us
            said = json.loads(record.payload)
            sender, mid, stage = said["of"]["sender"], said["of"]["id"], said["stage"]
            told = stage in TOLD_STAGES and is_message_id(mid) and not said.get("channel")
            if told and self.space.access(sender) is None:
                to = record.subject.rpartition(".")[2]
                why = in_a_line(said.get("why", ""))
                stage = ReceiptStage(stage)
                return [
                    ImportedReceipt(sender=sender, id=mid, to=to, stage=stage, why=why, n=record.seq, mark=record.mark)
                ]
        return []

    # --- telling that there is something ---

    async def run(self) -> None:
        """Wake the workers of linked spaces for whose agents something was stored since the last look."""
        links = {link: record for link, _, record in links_on(self.space) if record.passes_mail and record.peer}
        if not links:
            self._looked = None
            return
        head = await self.space.head(self.stream)
        before, self._looked = self._looked, head
        if before is None or head <= before:
            return
        s, start = self.space.subjects, max(before + 1, head - LOOKED_AT + 1)
        page: list[StoredRecord] = await anext(self.space.js.read(self.stream, f"{s.root}.dm.>", start, head), [])
        targets = (parsed.target for each in page if isinstance(parsed := s.parse(each.subject), Direct))
        concerned = {found.link for each in targets if (found := self.people.find(each)) is not None}
        for link in concerned & links.keys():
            with suppress(NatsError, OSError):  # it is found by asking, too
                await self.space.js.connection.publish(s.live_link(str(links[link].peer)))


def _check_offers(offers: Iterable[MailOffer]) -> None:
    for each in offers:
        if not is_message_id(each.id):
            raise UsageError(f"{each.id[:64]!r} is not a message id")
        check_agent_id(each.sender)
        check_agent_id(each.to)
