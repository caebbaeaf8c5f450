"""A space that is linked and lies: it answers in place of its own steward, on a real broker.

What it has to say is a log in memory, of messages that its agents really signed. Told nothing else it shows that log as
a steward would; `lies` are what it answers instead, by operation. It may do whatever the operator of a linked space
could: that one owns the broker, the steward and every key of its space.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tidings.contract.catalogue import OPERATIONS
from tidings.contract.links import LinkPageAnswer
from tidings.errors import WireError
from tidings.links.validation import PAGE_BYTES
from tidings.nats.client import Connection
from tidings.nats.core import Msg
from tidings.nats.errors import NatsError
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.digests import ChannelDigests, RecordIdentity, bucket_of, payload_hash
from tidings.wire.link_exchange import (
    MAIL_PER_PAGE,
    PEOPLE_PER_PAGE,
    TASKS_PER_PAGE,
    LinkedMail,
    LinkedRow,
    LinkedTask,
    Person,
    Statement,
    state,
)
from tidings.wire.links import GapKind, LinkedRecord, LinkGap, LinkPage, Token
from tidings.wire.message import new_id
from tidings.wire.names import is_channel, role_elsewhere
from tidings.wire.records import record_mark
from tidings.wire.seal import seal_task
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import LINK_SERVICE, Subjects

Answer = dict[str, Any]
#: what the link is called on both sides
LINK = "hostilelinks"
#: gets what was asked; answers fields, bytes as they are, or None: nothing ever comes
Lie = Callable[[Answer], Any]


def record_row(record: LinkedRecord) -> Answer:
    return dict(msgspec.to_builtins(LinkedRow.of(record)))


def page_fields(page: LinkPage) -> Answer:
    """Returns a page as plain values, so that a test can falsify them."""
    answer = LinkPageAnswer(
        records=tuple(map(LinkedRow.of, page.records)),
        through=page.through,
        head=page.head,
        floor=page.floor,
        gap=page.gap,
        granted=page.granted,
    )
    return dict(msgspec.to_builtins(answer))


class HostilePeer:
    """`id` is the id of the space it speaks for."""

    def __init__(self, connection: Connection, subjects: Subjects, space_id: str) -> None:
        self.connection, self.subjects, self.id = connection, subjects, space_id
        self.agent = KeyPair.generate()
        self.epoch, self.head = new_id(), 0
        self.log: dict[int, LinkedRecord] = {}
        self.lies: dict[str, Lie] = {}
        self.asked: Counter[str] = Counter()
        #: its steward's key, who is there, and the mail for the other space, in its order
        self.steward = KeyPair.generate()
        self.people: list[Person] = []
        self.mail: list[LinkedMail] = []
        #: tasks for roles of the other space, and what that told of them
        self.tasks: list[LinkedTask] = []
        self.told_tasks: list[Answer] = []
        self.last_task_seq = 0
        self.epoch_of_people, self.epoch_of_mail = new_id(), new_id()

    def begin_anew(self) -> None:
        """Honest, with an empty log."""
        self.lies.clear()
        self.log.clear()
        self.epoch, self.head = new_id(), 0

    # --- what its agents say ---

    def say(
        self, text: str, channel: str = "general", *, key: KeyPair | None = None, space: str = "", **fields: Any
    ) -> LinkedRecord:
        """A message as its sender signs it. It is not in the log yet. `fields` are the message's."""
        signer = key or self.agent
        payload = wire_message.compose(wire_message.Sender(signer.id, "mallory"), text=text, **fields).raw
        return self.sign(payload, channel, key=signer, space=space)

    def sign(
        self, payload: bytes, channel: str = "general", *, key: KeyPair | None = None, space: str = ""
    ) -> LinkedRecord:
        """Any bytes, signed as a chat."""
        signer, origin = key or self.agent, space or self.id
        return LinkedRecord(
            seq=0,
            time_ns=time.time_ns(),
            origin=origin,
            channel=channel,
            sender=signer.id,
            signature=signing.sign(signer, origin, "chat", channel, payload),
            payload=payload,
        )

    def put(self, *records: LinkedRecord) -> list[LinkedRecord]:
        """Into the log, as they are; answers them with their sequences."""
        placed = [self.placed(record, self.head + number) for number, record in enumerate(records, 1)]
        self.log |= {each.seq: each for each in placed}
        self.head += len(placed)
        return placed

    def placed(self, record: LinkedRecord, seq: int) -> LinkedRecord:
        subject = f"{self.subjects.root}.chat.{record.sender}.{record.channel}"
        mark = record_mark(record.time_ns, subject, record.payload)
        return msgspec.structs.replace(record, seq=seq, mark=mark)

    # --- who is there, and mail ---

    def next_person(self) -> int:
        return max((each.seq for each in self.people), default=0) + 1

    def person(self, name: str, *roles: str) -> Person:
        """Somebody under a new key; `mallory` first of all is its agent."""
        key = self.agent if name == "mallory" and not self.people else KeyPair.generate()
        return Person(id=key.id, name=name, roles=roles, seq=self.next_person())

    def write(self, to: str, text: str, *, space: str = "") -> LinkedMail:
        """A direct message of its agent. It is not handed out yet."""
        payload = wire_message.compose(wire_message.Sender(self.agent.id, "mallory"), text=text).raw
        signature = signing.sign(self.agent, space or self.id, "dm", to, payload)
        return LinkedMail(seq=1, sender=self.agent.id, to=to, sig=signature, payload=payload)

    def post(self, *mail: LinkedMail) -> None:
        for each in mail:
            mark = payload_hash(each.payload).hex()[:20]
            self.mail.append(msgspec.structs.replace(each, seq=len(self.mail) + 1, mark=mark))

    def task(
        self, role: str, space: str, readers: Iterable[str], text: str, *, origin: str = "", sealed: bool = True
    ) -> LinkedTask:
        """A task of its agent for a role of a space, by its id. It is not handed out yet."""
        message = wire_message.compose(wire_message.Sender(self.agent.id, "mallory"), text=text)
        payload = wire_message.encode(seal_task(self.agent, readers, message) if sealed else message)
        signature = signing.sign(self.agent, origin or self.id, "task", role_elsewhere(role, space), payload)
        return LinkedTask(seq=1, sender=self.agent.id, role=role, sig=signature, payload=payload)

    def clear_tasks(self) -> None:
        """Empties the task queue. Sequences continue, as in a real queue: the link worker may still report a task that
        was queued before, and that report must not apply to a new task."""
        self.tasks, self.told_tasks = [], []

    def queue(self, *tasks: LinkedTask) -> None:
        for each in tasks:
            self.last_task_seq += 1
            self.tasks.append(msgspec.structs.replace(each, seq=self.last_task_seq))

    def _tasks(self, asked: Answer) -> Answer:
        told = {each["seq"] for each in self.told_tasks}
        due = [each for each in self.tasks if each.seq not in told][: min(asked["room"], TASKS_PER_PAGE)]
        return {"tasks": [msgspec.to_builtins(each) for each in due], "more": False}

    def _progress(self, asked: Answer) -> Answer:
        self.told_tasks += asked["tasks"]
        return {"refused": [], "later": []}

    def roster_of(self, statements: Iterable[Statement], through: int, key: str = "") -> Answer:
        said = [{"text": each.text, "sig": each.sig} for each in statements]
        more = {"epoch": self.epoch_of_people, "key": key or self.steward.id, "rotations": [], "direct": True}
        return {"people": said, "through": through, "more": False, **more, "direct": True, "tasks": True}

    def _roster(self, asked: Answer) -> Answer:
        after = asked.get("after") or 0
        due = [each for each in self.people if each.seq > after][:PEOPLE_PER_PAGE]
        stated = [state(self.steward, self.id, LINK, each) for each in due]
        return self.roster_of(stated, due[-1].seq if due else after)

    @staticmethod
    def mail_row(mail: LinkedMail) -> Answer:
        return dict(msgspec.to_builtins(mail))

    def _mail(self, asked: Answer) -> Answer:
        after = asked["after"] if asked["epoch"] == self.epoch_of_mail else 0
        marks = {each.seq: each.mark for each in self.mail}
        if after and asked.get("marks"):
            after = next((seq for seq, mark, *_ in asked["marks"] if marks.get(seq) == mark), 0)
        due = [each for each in self.mail if each.seq > after]
        rows, through = due[:MAIL_PER_PAGE], len(self.mail)
        through = rows[-1].seq if len(rows) < len(due) else through
        more = len(rows) < len(due)
        said = {"epoch": self.epoch_of_mail, "people": "all", "through": through, "more": more}
        said |= {"after": after, "mark": marks.get(through, ""), "set_back": False, "broker": ""}
        return {"mail": list(map(self.mail_row, rows)), **said}

    def _told(self, asked: Answer) -> Answer:
        return {"new": len(asked["receipts"]), "refused": []}

    async def wake(self, user: str, times: int = 1) -> None:
        for _ in range(times):
            await self.connection.publish(self.subjects.live_link(user))
        await self.connection.flush()

    # --- what it answers ---

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """In place of the steward, for whoever asks."""
        asked = await self.connection.subscribe(f"{self.subjects.root}.ctl.{LINK_SERVICE}.*")
        await self.connection.flush()
        under_way = set[asyncio.Task[None]]()

        async def serve() -> None:
            while True:
                task = asyncio.create_task(self._answer(await asked.next()))
                under_way.add(task)
                task.add_done_callback(under_way.discard)

        serving = asyncio.create_task(serve())
        try:
            yield
        finally:
            for task in (serving, *under_way):
                task.cancel()
            await asyncio.gather(serving, *under_way, return_exceptions=True)

    async def _answer(self, message: Msg) -> None:
        asked = json.loads(message.data)
        fields = OPERATIONS[f"{LINK_SERVICE} {asked['do']}"].fields.values()
        asked = {each.encode_name: msgspec.to_builtins(each.default) for each in fields if not each.required} | asked
        self.asked[asked["do"]] += 1
        lie = self.lies.get(asked["do"])
        answer = lie(asked) if lie is not None else self.honest(asked)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer is None:
            return
        data = answer if isinstance(answer, bytes) else json.dumps({"ok": True, **answer}).encode()
        with suppress(NatsError, OSError):  # whoever asked has gone
            await self.connection.publish(message.reply, data)

    def honest(self, asked: Answer) -> Answer:
        """As a steward would."""
        found: Answer = getattr(self, f"_{asked['do']}")(asked)
        return found

    def _hello(self, asked: Answer) -> Answer:
        del asked
        said = {"name": self.subjects.space, "space": self.id, "steward": self.id, "epoch": self.epoch}
        more = {"head": self.head, "floor": 1, "shares": [">"], "hops": 1, "link": "-", "seq": 1}
        return {**said, **more, "until": None, "direct": "off", "roster": "off", "tasks": "off", "time": "", "jwt": ""}

    def _page(self, asked: Answer) -> Answer:
        return page_fields(self.page_after(asked))

    def page_after(self, asked: Answer) -> LinkPage:
        if (gap := self._gap(asked)) is not None:
            through = Token(space=self.id, epoch=self.epoch, seq=0)
            return LinkPage(records=(), through=through, head=self.head, floor=1, gap=gap)
        found, size = list[LinkedRecord](), 0
        for seq in range(asked["after"] + 1, self.head + 1):
            each = self.log.get(seq)
            size += len(each.payload) if each is not None else 0
            if len(found) == asked["limit"] or (found and size > PAGE_BYTES):
                break
            found += [each] if each is not None else []
        else:
            return self.page(found, asked, self.head)
        return self.page(found, asked, seq - 1)

    def page(self, records: Iterable[LinkedRecord], asked: Answer, through: int, head: int | None = None) -> LinkPage:
        """Of this log, whatever it says."""
        mark = asked["mark"] if through == asked["after"] else self._mark(through)
        token = Token(space=self.id, epoch=self.epoch, seq=through, mark=mark)
        return LinkPage(records=tuple(records), through=token, head=self.head if head is None else head, floor=1)

    def _mark(self, seq: int) -> str:
        return self.log[seq].mark if seq in self.log else ""

    def _gap(self, asked: Answer) -> LinkGap | None:
        seq, mark = asked["after"], asked["mark"]
        if asked["space"] != self.id:
            kind, agreed = GapKind.STREAM, 0
        elif asked["epoch"] != self.epoch:
            kind, agreed = GapKind.EPOCH, 0
        elif seq > self.head:
            kind, agreed = GapKind.TOO_NEW, 0
        elif mark and mark != self._mark(seq):
            kind, agreed = GapKind.RECORD, 0
        else:
            return None
        return LinkGap(kind=kind, oldest=0, head=self.head, epoch=self.epoch, agreed=agreed)

    def _fetch(self, asked: Answer) -> Answer:
        found = [self.log[seq] for seq in asked["seqs"] if seq in self.log]
        missing = [seq for seq in asked["seqs"] if seq not in self.log]
        return {"epoch": self.epoch, "records": [record_row(each) for each in found], "missing": missing}

    # --- digests ---

    def messages(self, through: int) -> list[tuple[str, str, RecordIdentity]]:
        """(channel, day, identity) of what counts in a digest."""
        found = []
        for each in self.log.values():
            with suppress(WireError):
                message = wire_message.decode(each.payload)
                named = RecordIdentity(each.seq, each.sender, message.id, payload_hash(each.payload))
                if each.seq <= through and is_channel(each.channel):
                    found.append((each.channel, message.ts[:10], named))
        return found

    def digests(self, through: int) -> ChannelDigests:
        made = ChannelDigests()
        for channel, day, each in self.messages(through):
            made.add(channel, each.sender, each.id, f"{day}T00:00:00.000Z", each.hash)
        return made

    def _digest(self, asked: Answer) -> Answer:
        through = asked["through"]
        totals = self.digests(through).totals()
        channels = {name: {day: each.encode() for day, each in days.items()} for name, days in totals.items()}
        return {"floor": 1, "through": through, "channels": channels, "more": False}

    def _buckets(self, asked: Answer) -> Answer:
        found = self.digests(asked["through"]).day(asked["channel"], asked["day"]).buckets
        return {"floor": 1, "through": asked["through"], "buckets": [each.encode() for each in found]}

    def _ids(self, asked: Answer) -> Answer:
        wanted = asked["channel"], asked["day"]
        of_day = [each for channel, day, each in self.messages(asked["through"]) if (channel, day) == wanted]
        found = [each for each in of_day if bucket_of(each.item) in asked["buckets"] and each.seq > asked["after"]]
        ids = [each.encode() for each in sorted(found)]
        return {"floor": 1, "through": asked["through"], "ids": ids, "more": False}
