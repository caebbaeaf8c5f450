"""What may leave the direct messages: decided per mailbox, executed by purge, and told to senders.

    read and archived     goes, below min(ack floor of the target's consumer, archive floor)
    unread for too long   goes once archived; its sender is told `expired`
    to nobody             target never added: goes after a grace; revoked: at once; its sender is told `undeliverable`

The archive counts unless the space record switches it off; not starting it is not switching it off. An ack floor is
acted on one round after it was seen, so that a receipt which speaks of the record still finds it. Telling comes before
removing, and each round does a bounded amount.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from tidings.broker.jetstream import NO_CONSUMER, ApiError, StoredRecord
from tidings.steward.receipts import tell_senders
from tidings.wire.subjects import Direct

if TYPE_CHECKING:
    from tidings.steward.service import Steward

ARCHIVE_FLOOR = "floor.archive.dm"
#: records told of and removed in one round
MOST_TOLD = 5_000
#: small, because most rounds look at one page to see that nothing is old
PAGE = 64
log = logging.getLogger(__name__)


class Mail:
    def __init__(self, steward: Steward) -> None:
        self.steward = steward
        self.stream = steward.subjects.direct_stream
        self.removed = 0
        #: target -> ack floor seen in the round before
        self._floors: dict[str, int] = {}
        #: target -> how far its mailbox was cut
        self._cut: dict[str, int] = {}

    async def run(self) -> int:
        """One round. Answers how many records went."""
        head = int((await self.steward.js.info(self.stream))["state"]["last_seq"])
        mailboxes = await self._mailboxes()
        archived = await self._archive_limit(head)
        removed = await self._remove_undeliverable([t for t in mailboxes if not self._is_reachable(t)], head)
        floors: dict[str, int] = {}
        for target in filter(self._is_reachable, mailboxes):
            floors[target] = await self._ack_floor(target)
            removed += await self._remove_read(target, min(self._floors.get(target, 0), archived))
        removed += await self._remove_expired(floors, archived)
        self._floors = floors
        self._cut = {target: cut for target, cut in self._cut.items() if target in floors}
        self.removed += removed
        return removed

    async def give_back(self, target: str) -> int:
        """Empty the mailbox of a revoked agent now, its senders told. If that is interrupted, a later round does it."""
        inbox = self.steward.subjects.direct_inbox(target)
        head = int((await self.steward.js.info(self.stream))["state"]["last_seq"])
        removed = 0
        async for page in self.steward.js.read(self.stream, inbox, 1, head):
            removed += await self._tell_and_remove(page, "undeliverable")
        self.removed += removed
        return removed

    async def _mailboxes(self) -> list[str]:
        """Targets with mail in the stream. A subject that parses as no mailbox at all is removed here."""
        s = self.steward.subjects
        found: dict[str, None] = {}
        for subject in await self.steward.js.subjects_of(self.stream, f"{s.root}.dm.>"):
            parsed = s.parse(subject)
            if isinstance(parsed, Direct):
                found[parsed.target] = None
            else:
                self.removed += await self.steward.js.purge(self.stream, subject_filter=subject)
        return list(found)

    def _is_reachable(self, target: str) -> bool:
        access = self.steward.table.access_at(target, self.steward.position)
        return access is not None and not access.revoked

    async def _archive_limit(self, head: int) -> int:
        """The last sequence the archive has no more need of."""
        if self.steward.table.space_at(self.steward.position).parts.archive != "on":
            return head
        entry = await self.steward.state.get(ARCHIVE_FLOOR)
        return int(entry.value["seq"]) - 1 if entry else 0

    async def _ack_floor(self, target: str) -> int:
        try:
            info = await self.steward.js.api(f"CONSUMER.INFO.{self.stream}.dm_{target}")
        except ApiError as error:
            if error.err_code != NO_CONSUMER:
                raise
            return 0
        return int(info["ack_floor"]["stream_seq"])

    async def _remove_read(self, target: str, through: int) -> int:
        if through <= self._cut.get(target, 0):
            return 0
        inbox = self.steward.subjects.direct_inbox(target)
        removed = await self.steward.js.purge(self.stream, subject_filter=inbox, below=through + 1)
        self._cut[target] = through
        return removed

    async def _remove_expired(self, floors: dict[str, int], archived: int) -> int:
        """Old mail above its target's ack floor was never settled, whatever the archive has of it."""
        root = self.steward.subjects.root
        old = await self._older_than(f"{root}.dm.>", self.steward.pace.mail_ttl, archived)
        unread = [r for r in old if r.seq > floors.get(_target(self.steward, r), r.seq)]
        return await self._tell_and_remove(unread, "expired")

    async def _remove_undeliverable(self, targets: list[str], head: int) -> int:
        removed = 0
        for target in targets:
            inbox = self.steward.subjects.direct_inbox(target)
            old = await self._older_than(inbox, self.steward.pace.mail_grace, head)
            removed += await self._tell_and_remove(old, "undeliverable")
            if removed >= MOST_TOLD:
                break
        return removed

    async def _older_than(self, subject_filter: str, seconds: float, through: int) -> list[StoredRecord]:
        """The oldest records of a filter that are older than that, as many as one round takes."""
        cutoff = time.time_ns() - int(seconds * 1_000_000_000)
        found: list[StoredRecord] = []
        async for page in self.steward.js.read(self.stream, subject_filter, 1, through, page=PAGE):
            found += [record for record in page if record.time_ns < cutoff]
            if page[-1].time_ns >= cutoff or len(found) >= MOST_TOLD:
                break
        return found

    async def _tell_and_remove(self, records: list[StoredRecord], stage: str) -> int:
        """Everything older of the same pair goes with the newest of these: it is at least as old."""
        if not records:
            return 0
        await tell_senders(self.steward, records, stage)
        newest: defaultdict[str, int] = defaultdict(int)
        for record in records:
            newest[record.subject] = max(newest[record.subject], record.seq)
        removed = 0
        for subject, seq in newest.items():
            removed += await self.steward.js.purge(self.stream, subject_filter=subject, below=seq + 1)
        log.info("removed %d direct messages: %s", removed, stage)
        return removed


def _target(steward: Steward, record: StoredRecord) -> str:
    parsed = steward.subjects.parse(record.subject)
    return parsed.target if isinstance(parsed, Direct) else ""
