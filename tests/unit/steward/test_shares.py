"""Who holds too much of a shared stream, decided over a stream in memory."""

import fnmatch
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from tidings.nats.errors import NO_CONSUMER, ApiError
from tidings.nats.jetstream import StoredRecord
from tidings.steward.context import Intervals, SpaceContext
from tidings.steward.damage import Removed
from tidings.steward.receipts import ReceiptStore
from tidings.steward.retention import stored_size
from tidings.steward.shares import LARGEST_RECORD, Shares, suspects
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

MB = 1_000_000
LIMIT = 20 * MB
TARGET = KeyPair.generate().id


class Stream:
    """Direct messages in memory, read and cut as the broker does it."""

    def __init__(self) -> None:
        self.subjects = Subjects("main")
        self.records: dict[int, StoredRecord] = {}
        self.head = 0
        #: target -> what it is done with
        self.floors: dict[str, int] = {}
        self.bytes_read = 0

    def put(self, sender: str, size: int, target: str = TARGET) -> None:
        self.head += 1
        subject = self.subjects.direct(target, sender)
        self.records[self.head] = StoredRecord(self.head, 0, subject, b"", b"x" * size)

    def _of(self, subject_filter: str) -> list[StoredRecord]:
        pattern = subject_filter.replace(">", "*")
        return [record for record in self.records.values() if fnmatch.fnmatchcase(record.subject, pattern)]

    async def info(self, stream: str) -> dict[str, Any]:
        mine = self.records.values() if stream.startswith("DM_") else ()
        used = sum(map(stored_size, mine))
        state = {"last_seq": self.head, "first_seq": min(self.records, default=1), "bytes": used}
        return {"state": state, "config": {"max_bytes": LIMIT}}

    async def counts_of(self, _: str, subject_filter: str) -> dict[str, int]:
        return Counter(record.subject for record in self._of(subject_filter))

    async def api(self, operation: str) -> dict[str, Any]:
        target = operation.rpartition("_")[2]
        if target not in self.floors:
            raise ApiError(operation, {"err_code": NO_CONSUMER})
        return {"ack_floor": {"stream_seq": self.floors[target]}}

    async def read(
        self, _: str, subject_filter: str, start: int, end: int, *, page: int = 1_000, max_bytes: int = 1024 * 1024
    ) -> AsyncIterator[list[StoredRecord]]:
        found: list[StoredRecord] = []
        for record in self._of(subject_filter):
            if not start <= record.seq <= end:
                continue
            if found and (len(found) == page or sum(len(each.payload) for each in found) >= max_bytes):
                yield found
                found = []
            found.append(record)
            self.bytes_read += len(record.payload)
        if found:
            yield found

    async def purge(self, _: str, *, subject_filter: str, below: int) -> int:
        going = [record for record in self._of(subject_filter) if record.seq < below]
        for record in going:
            del self.records[record.seq]
        return len(going)


class Told:
    """The receipts of a steward that knows no envelope."""

    def __init__(self) -> None:
        self.seqs: list[int] = []

    tell_senders = ReceiptStore.tell_senders

    def key_of(self, record: StoredRecord) -> tuple[str, str, str]:
        return ("", str(record.seq), "")

    def stage_of(self, _: tuple[str, str, str]) -> str:
        return "confirmed"

    async def write(self, told: list[tuple[Any, int, str]]) -> None:
        self.seqs += [seq for _, seq, _ in told]


class Case:
    def __init__(self) -> None:
        self.stream = Stream()
        self.withheld: dict[str, str] = {}
        self.told = Told()
        self.removed: list[Removed] = []
        floods = SimpleNamespace(
            withhold=self.withheld.__setitem__, bar=self.withheld.__setitem__, sender_of=lambda _: None
        )
        store = SimpleNamespace(note_removed=self._note_removed)
        table = SimpleNamespace(subjects=self.stream.subjects, head=0, floor=0)
        table.access_at = lambda owner, _: SimpleNamespace(name=owner, revoked=False)
        fakes: dict[str, Any] = {"home": None, "info": None, "js": self.stream, "state": None, "table": table}
        space = SpaceContext(**fakes, intervals=Intervals(), secret=b"")
        self.shares = Shares(space, cast("Any", floods), cast("Any", self.told), cast("Any", store))

    async def _note_removed(self, removed: list[Removed]) -> None:
        self.removed += removed

    async def look(self) -> None:
        self.shares._fills[self.stream.subjects.direct_stream].counted = float("-inf")
        await self.shares.run()


async def test_many_small_messages_with_a_large_one_after_a_long_gap_are_not_over_a_share() -> None:
    case, ada = Case(), KeyPair.generate().id
    for _ in range(400):
        case.stream.put(ada, 100)
    for _ in range(3_000):
        case.stream.put(KeyPair.generate().id, 6_000)
    case.stream.put(ada, 250_000)
    for _ in range(3):
        await case.look()
    assert case.withheld == {}
    assert sum(record.subject.endswith(ada) for record in case.stream.records.values()) == 401


async def test_few_large_messages_are_found_behind_many_agents_with_more_small_ones() -> None:
    case, mal = Case(), KeyPair.generate().id
    others = [KeyPair.generate().id for _ in range(20)]
    for other in others:
        for _ in range(100):
            case.stream.put(other, 100)
    for _ in range(70):
        case.stream.put(mal, 250_000)
    await case.look()
    assert list(case.withheld) == [mal]
    assert "MB of direct messages" in case.withheld[mal]
    assert {record.subject.rpartition(".")[2] for record in case.stream.records.values()} == set(others)


async def test_what_was_read_and_waits_only_for_the_archive_is_not_held_against_its_sender() -> None:
    case, ada = Case(), KeyPair.generate().id
    for _ in range(70):
        case.stream.put(ada, 250_000)
    case.stream.floors[TARGET] = 30
    await case.look()
    assert case.withheld == {}
    for _ in range(29):
        case.stream.put(ada, 250_000)
    await case.look()
    assert list(case.withheld) == [ada]
    assert min(case.told.seqs) == 31, "what was read is not undeliverable"
    assert [(each.target, each.count) for each in case.removed] == [(TARGET, 69)]


async def test_what_was_counted_once_is_not_read_at_every_look() -> None:
    case, ada = Case(), KeyPair.generate().id
    for _ in range(65):
        case.stream.put(ada, 250_000)
    case.stream.floors[TARGET] = 60
    await case.look()
    before = case.stream.bytes_read
    for _ in range(5):
        await case.look()
    assert case.stream.bytes_read == before
    assert case.withheld == {}


def test_only_who_put_in_more_than_it_may_and_can_still_hold_it_is_summed_up() -> None:
    put = {"ada": 9 * MB, "bob": 20 * MB, "cy": 30 * MB}
    assert suspects(put, {"ada": 1_000, "bob": 60, "cy": 60}, 10 * MB) == ["cy", "bob"]
    assert suspects(put, {"bob": 10 * MB // LARGEST_RECORD, "cy": 38}, 10 * MB) == ["cy"]
