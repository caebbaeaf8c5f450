"""A small broker for the model of the outbox: it acknowledges, deduplicates, restarts and forgets its tail.

Time is the model's. What was stored longer than `SYNC` ago is on disk and is never lost; the rest may go with a
restart, from the end. Deduplication is rebuilt from what is left, as nats-server does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SYNC = 2_000
HORIZON = 2 * SYNC
WINDOW = 120_000


@dataclass(frozen=True)
class Stored:
    seq: int
    id: str
    sender: str
    subject: str
    payload: bytes
    signature: str
    at: int


@dataclass
class ForgetfulBroker:
    space: str
    runs: int = 1
    log: list[Stored] = field(default_factory=list)
    last: int = 0

    @property
    def incarnation(self) -> str:
        return f"{self.space}#{self.runs}"

    def publish(self, sender: str, id: str, subject: str, payload: bytes, signature: str, now: int) -> int:  # noqa: A002
        """The sequence it is stored at, or was within the window."""
        for record in reversed(self.log):
            if record.id == id and record.sender == sender and now - record.at < WINDOW:
                return record.seq
        self.last += 1
        self.log.append(Stored(self.last, id, sender, subject, payload, signature, now))
        return self.last

    def restart(self, forget: int, now: int) -> None:
        """A new run; up to `forget` of the newest records not on disk are gone, their sequences used again."""
        self.runs += 1
        while forget and self.log and now - self.log[-1].at < SYNC:
            self.log.pop()
            forget -= 1
        self.last = self.log[-1].seq if self.log else 0

    def at(self, seq: int) -> Stored | None:
        return next((record for record in self.log if record.seq == seq), None)

    def holds(self, sender: str, id: str) -> list[Stored]:  # noqa: A002
        return [record for record in self.log if (record.sender, record.id) == (sender, id)]
