"""What may leave the direct messages: decided per mailbox, executed by purge, and told to senders.

    read and archived     goes, below min(ack floor of the target's consumer, archive floor)
    unread for too long   goes once archived; its sender is told `expired`
    to nobody             target never added: goes after a grace; revoked: at once; its sender is told `undeliverable`
    to a linked space     goes when that says that it has it; unread for too long: `expired`, as above
    to many invented      more targets that never were than anybody has by mistake: goes at once, counted, not told;
                          more are let wait while it is not known yet who is in a linked space

Who was never added is not decided by the log alone: one that was put back has forgotten agents, and the administrator
writes them again from the ledger only after we serve. Mail for whoever the ledger knows as an agent stays.
The archive counts unless the space record switches it off; not starting it is not switching it off. An ack floor is
acted on one round after it was seen. What goes is remembered, so that a late receipt still counts and its sender can
still ask whether it was stored. Telling comes before removing, and each round does a bounded amount.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict

from tidings.admin.agents import LIVE, Ledger
from tidings.contract.core import Caller
from tidings.contract.mail import MailboxRoomAnswer, MailboxRoomRequest
from tidings.errors import ConfigError
from tidings.nats.jetstream import StoredRecord
from tidings.rpc.dispatch import handler
from tidings.steward.context import SpaceContext
from tidings.steward.linked_people import LinkedPeople
from tidings.steward.quotas import MOST_INVENTED
from tidings.steward.receipts import ReceiptStore
from tidings.steward.retention import archive_needs
from tidings.wire.names import check_agent_id
from tidings.wire.states import ReceiptStage
from tidings.wire.subjects import Direct

#: records told of and removed in one round
MOST_TOLD = 5_000
#: targets of one sender that nobody knows, while it is not told yet who is in a linked space
MOST_AWAITED = 1_000
#: small, because most rounds look at one page to see that nothing is old
PAGE = 64
#: made for a pair that is full of what was read; a pair may have 1,000
ROOM = 500
log = logging.getLogger(__name__)


class Mail:
    def __init__(self, space: SpaceContext, receipts: ReceiptStore, people: LinkedPeople) -> None:
        self.space = space
        self.receipts = receipts
        self.people = people
        self.stream = space.subjects.direct_stream
        self._ledger = Ledger(space.home.issued)
        self.removed = 0
        #: of these, to more invented targets than one sender may have
        self.invented = 0
        #: target -> ack floor seen in the round before
        self._floors: dict[str, int] = {}
        #: target -> how far its mailbox was cut
        self._cut: dict[str, int] = {}
        #: target elsewhere -> the newest receipt when its mail was last looked at
        self._told: dict[str, int] = {}

    async def run(self) -> int:
        """One round. Answers how many records went."""
        head = await self.space.head(self.stream)
        mailboxes = await self._mailboxes()
        archived = await self._archive_limit(head)
        removed = await self._remove_undeliverable([t for t in mailboxes if not self._is_reachable(t)], head)
        floors: dict[str, int] = {}
        for target in filter(self._is_reachable, mailboxes):
            if self._is_elsewhere(target):
                floors[target] = 0
                removed += await self._remove_told(target, archived)
                continue
            floors[target] = await self.space.ack_floor(self.stream, f"dm_{target}")
            removed += await self._remove_read(target, min(self._floors.get(target, 0), archived))
        removed += await self._remove_expired(floors, archived)
        self._floors = floors
        self._cut = {target: cut for target, cut in self._cut.items() if target in floors}
        self._told = {target: told for target, told in self._told.items() if target in floors}
        self.removed += removed
        return removed

    @handler(MailboxRoomRequest)
    async def room(self, caller: Caller, request: MailboxRoomRequest) -> MailboxRoomAnswer:
        self.space.access_of(caller.id)
        return MailboxRoomAnswer(made=await self.make_room(caller.id, check_agent_id(request.to)))

    async def make_room(self, sender: str, target: str) -> int:
        """A pair that is full of what was read: the oldest goes now, and not in a round's time. Answers how much.

        What its receipts will speak of is remembered, because they may still be on their way.
        """
        js, subject = self.space.js, self.space.subjects.direct(target, sender)
        head = int((await js.info(self.stream))["state"]["last_seq"])
        through = min(await self.space.ack_floor(self.stream, f"dm_{target}"), await self._archive_limit(head))
        going: list[StoredRecord] = await anext(js.read(self.stream, subject, 1, through, page=ROOM), [])
        if not going:
            return 0
        for record in going:
            self.receipts.remember(record)
        removed = await js.purge(self.stream, subject_filter=subject, below=going[-1].seq + 1)
        self.removed += removed
        return removed

    async def give_back(self, target: str) -> int:
        """Empty the mailbox of a revoked agent now, its senders told. If that is interrupted, a later round does it."""
        inbox = self.space.subjects.direct_inbox(target)
        head = await self.space.head(self.stream)
        removed = 0
        async for page in self.space.js.read(self.stream, inbox, 1, head):
            removed += await self._tell_and_remove(page, ReceiptStage.UNDELIVERABLE)
        self.removed += removed
        return removed

    async def _mailboxes(self) -> list[str]:
        """Targets with mail in the stream. What parses as no mailbox, and what is too much invention, goes here."""
        s = self.space.subjects
        head = await self.space.head(self.stream)
        mailboxes: list[Direct] = []
        for subject in await self.space.js.subjects_of(self.stream, f"{s.root}.dm.>"):
            parsed = s.parse(subject)
            if isinstance(parsed, Direct):
                mailboxes.append(parsed)
            else:
                self.removed += await self.space.js.purge(self.stream, subject_filter=subject, below=head + 1)
        gone = await self._remove_invented(mailboxes, head)
        return list(dict.fromkeys(each.target for each in mailboxes if each not in gone))

    async def _remove_invented(self, mailboxes: list[Direct], head: int) -> set[Direct]:
        """Mail of senders with too many targets that never were. `head` is older than the list of mailboxes, so a
        filter that matches no mailbox of an agent in the list matches no mail for an agent up to there."""
        strange = [each for each in mailboxes if self._is_invented(each.target)]
        most = MOST_AWAITED if self.people.is_awaited else MOST_INVENTED
        counted = Counter(each.sender for each in strange)
        gone = {each for each in strange if counted[each.sender] > most}
        real = {(each.shard, each.sender) for each in mailboxes if not self._is_invented(each.target)}
        s = self.space.subjects
        places = {(each.shard, each.sender) for each in gone}
        filters = [f"{s.root}.dm.{shard}.*.{sender}" for shard, sender in places - real]
        filters += [s.direct(each.target, each.sender) for each in gone if (each.shard, each.sender) in real]
        for each in filters:
            removed = await self.space.js.purge(self.stream, subject_filter=each, below=head + 1)
            self.invented += removed
            self.removed += removed
        return gone

    def _is_invented(self, target: str) -> bool:
        known = self.space.access(target) is not None
        return not known and not self._is_in_ledger(target) and not self.people.is_reached(target)

    def _is_reachable(self, target: str) -> bool:
        here = self.space.active_access(target) is not None or self._is_in_ledger(target)
        return here or self._is_elsewhere(target)

    def _is_elsewhere(self, target: str) -> bool:
        """Is it an agent of a linked space, which comes for its mail?"""
        return self.space.access(target) is None and not self._is_in_ledger(target) and self.people.takes_mail(target)

    def _is_in_ledger(self, target: str) -> bool:
        """Whether a key was issued to it that nobody took back, whatever the log has forgotten."""
        try:
            row = self._ledger.get(target)
        except ConfigError as error:
            log.warning("%s: what is for it is kept", error)
            return True
        return row is not None and row.state in LIVE

    async def _archive_limit(self, head: int) -> int:
        """The last sequence the archive has no more need of."""
        needed = await archive_needs(self.space, "dm")
        return head if needed is None else max(needed - 1, 0)

    async def _remove_read(self, target: str, through: int) -> int:
        if through <= self._cut.get(target, 0):
            return 0
        inbox = self.space.subjects.direct_inbox(target)
        # its reader may not have reported yet, and its sender may ask whether the message was ever stored
        async for page in self.space.js.read(self.stream, inbox, self._cut.get(target, 0) + 1, through):
            for record in page:
                self.receipts.remember(record)
        removed = await self.space.js.purge(self.stream, subject_filter=inbox, below=through + 1)
        self._cut[target] = through
        return removed

    async def _remove_told(self, target: str, through: int) -> int:
        """What an agent of a linked space has by the word of that space goes, from the oldest of each pair on."""
        await self.receipts.ready()
        if self._told.get(target) == self.receipts.newest:
            return 0
        self._told[target] = self.receipts.newest
        done: dict[str, int] = {}
        stopped: set[str] = set()
        async for page in self.space.js.read(self.stream, self.space.subjects.direct_inbox(target), 1, through):
            for record in page:
                key = self.receipts.key_of(record)
                stage = self.receipts.stage_of(key) if key is not None else None
                if stage is None or stage.rank < ReceiptStage.DELIVERED.rank:
                    stopped.add(record.subject)
                elif record.subject not in stopped:
                    done[record.subject] = record.seq
        removed = 0
        for subject, seq in done.items():
            removed += await self.space.js.purge(self.stream, subject_filter=subject, below=seq + 1)
        return removed

    async def _remove_expired(self, floors: dict[str, int], archived: int) -> int:
        """Old mail above its target's ack floor was never acknowledged, whatever the archive has of it."""
        root = self.space.subjects.root
        old = await self._older_than(f"{root}.dm.>", self.space.intervals.mail_ttl, archived)
        unread = [r for r in old if r.seq > floors.get(self._target(r), r.seq)]
        return await self._tell_and_remove(unread, ReceiptStage.EXPIRED)

    async def _remove_undeliverable(self, targets: list[str], head: int) -> int:
        removed = 0
        for target in targets:
            inbox = self.space.subjects.direct_inbox(target)
            # who is known to be elsewhere is not added here a little later
            grace = 0.0 if self.people.find(target) is not None else self.space.intervals.mail_grace
            old = await self._older_than(inbox, grace, head)
            removed += await self._tell_and_remove(old, ReceiptStage.UNDELIVERABLE)
            if removed >= MOST_TOLD:
                break
        return removed

    async def _older_than(self, subject_filter: str, seconds: float, through: int) -> list[StoredRecord]:
        """The oldest records of a filter that are older than that, as many as one round takes."""
        cutoff = time.time_ns() - int(seconds * 1_000_000_000)
        found: list[StoredRecord] = []
        async for page in self.space.js.read(self.stream, subject_filter, 1, through, page=PAGE):
            found += [record for record in page if record.time_ns < cutoff]
            if page[-1].time_ns >= cutoff or len(found) >= MOST_TOLD:
                break
        return found

    async def _tell_and_remove(self, records: list[StoredRecord], stage: ReceiptStage) -> int:
        """Everything older of the same pair goes with the newest of these: it is at least as old."""
        if not records:
            return 0
        await self.receipts.tell_senders(records, stage)
        newest: defaultdict[str, int] = defaultdict(int)
        for record in records:
            newest[record.subject] = max(newest[record.subject], record.seq)
        removed = 0
        for subject, seq in newest.items():
            removed += await self.space.js.purge(self.stream, subject_filter=subject, below=seq + 1)
        log.info("removed %d direct messages: %s", removed, stage)
        return removed

    def _target(self, record: StoredRecord) -> str:
        parsed = self.space.subjects.parse(record.subject)
        return parsed.target if isinstance(parsed, Direct) else ""
