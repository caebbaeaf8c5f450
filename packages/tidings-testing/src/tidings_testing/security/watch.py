"""What an attack would have changed, looked at from inside CORE, before and after.

A space that is being attacked is usually also being used, so totals prove nothing. Compared are the settings of the
streams, the mailboxes and records of the victim, and every record that was stored meanwhile: one that is not signed
by the steward where it should be, that speaks for the victim, that carries the attacker's mark, or that is an
answer of the broker's stored as a record, is a change nobody may cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidings.errors import BrokerUnreachable
from tidings.nats.errors import NO_CONSUMER, NO_STREAM, ApiError
from tidings.nats.jetstream import JetStream, StoredRecord
from tidings.server.log import log_record
from tidings.wire.rulings import verify_ruling
from tidings.wire.signing import SIGNATURE_HEADER
from tidings.wire.subjects import RULING_KINDS, StreamKind, Subjects

#: the steward itself changes these of the log, at the gate and after a regression
_STEWARDS_OWN = ("subjects", "max_bytes", "metadata")
_ANSWERS = (b'{"stream":', b'{"ok":', b'{"type":"io.nats', b'{"error":', b'{"server":')


@dataclass(frozen=True, slots=True)
class Mark:
    """The state before an attack."""

    streams: Mapping[str, tuple[int, Any] | None]
    mailboxes: Mapping[str, Any]
    records: Mapping[str, int]


class Watch:
    def __init__(
        self, js: JetStream, subjects: Subjects, space_id: str, steward_key: str, *, mal: str, vic: str, nonce: str
    ) -> None:
        self.js = js
        self.subjects = subjects
        self.space_id = space_id
        self.steward_key = steward_key
        self.mal = mal
        self.vic = vic
        self.nonce = nonce.encode()
        s = subjects
        self.state_stream = f"KV_{s.state_bucket}"
        self.streams = tuple(s.stream(kind) for kind in StreamKind)
        #: (stream, subject) whose newest record must stay what it is
        self.guarded = (
            (s.log_stream, s.access(vic)),
            (s.log_stream, f"{s.root}.member.{vic}.>"),
            (s.log_stream, s.access(mal)),
            (s.delivery_stream, s.delivery(vic)),
            (s.direct_stream, s.direct(vic, vic)),
        )

    async def mark(self) -> Mark:
        return Mark(
            {name: await self._stream(name) for name in (*self.streams, self.state_stream)},
            {name: await self._consumer(stream, name) for stream, name in self.mailboxes(self.vic)},
            {subject: await self._last(stream, subject) for stream, subject in self.guarded},
        )

    def mailboxes(self, owner: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.subjects.delivery_stream, f"dlv_{owner}"), (self.subjects.direct_stream, f"dm_{owner}")

    async def changes(self, before: Mark) -> list[str]:
        """Everything that is not as it was, in words; empty if nothing changed."""
        after = await self.mark()
        found: list[str] = []
        for name, was in before.streams.items():
            found += await self._stream_changes(name, was, after.streams[name])
        found += _differences(before.records, after.records)
        for name, then in before.mailboxes.items():
            now = after.mailboxes[name]
            if then is None or now is None:
                found += [] if then == now else [f"mailbox {name} is {'gone' if now is None else 'new'}"]
            else:
                found += [f"mailbox {name}: {each}" for each in _differences(then, now)]
        return found

    async def _stream_changes(self, name: str, was: tuple[int, Any] | None, now: tuple[int, Any] | None) -> list[str]:
        if was is None or now is None:
            return [] if was == now else [f"{name} is {'gone' if now is None else 'new'}"]
        found = [f"{name} has other settings or was made anew"] if was[1] != now[1] else []
        if now[0] < was[0]:
            return [*found, f"{name} went back from {was[0]} to {now[0]}"]
        try:
            async for page in self.js.read(name, ">", was[0] + 1, now[0]):
                new = [(each, self.judge(each)) for each in page]
                found += [f"{name} {each.seq} on {each.subject[:120]}: {why}" for each, why in new if why]
        except BrokerUnreachable:
            if await self._stream(name) is not None:
                raise
            found.append(f"{name} is gone")  # an answer that came late took it away while it was read
        return found

    def judge(self, record: StoredRecord) -> str | None:
        """Why nobody but the attacker can have caused this record, or None."""
        tokens = self.subjects.tail(record.subject).split(".")
        if self._is_own(tokens):
            return None
        if self.vic in tokens:
            return "it speaks of the victim"
        if self.nonce in record.payload:
            return "it carries the attacker's mark"
        if record.payload.startswith(_ANSWERS) or not record.payload:
            return "an answer was stored as a record"
        if tokens[0] in RULING_KINDS and not self._is_signed(record):
            return "a ruling the steward did not sign"
        return None

    def _is_own(self, tokens: list[str]) -> bool:
        """Where the attacker may write: its own chats, directs, tasks; and what the suite puts into its mailbox."""
        kind = tokens[0]
        if kind == "chat":
            return tokens[1:2] == [self.mal]
        return kind in ("dm", "task", "dlv") and tokens[-1] == self.mal

    def _is_signed(self, record: StoredRecord) -> bool:
        signature = log_record(record).headers.get(SIGNATURE_HEADER)
        tail = self.subjects.tail(record.subject)
        return verify_ruling(signature, self.space_id, self.steward_key, tail, record.payload)

    async def _stream(self, name: str) -> tuple[int, Any] | None:
        try:
            info = await self.js.info(name)
        except ApiError as error:
            if error.err_code == NO_STREAM:
                return None
            raise
        own = _STEWARDS_OWN if name == self.subjects.log_stream else ()
        settings = {key: value for key, value in info["config"].items() if key not in own}
        return int(info["state"]["last_seq"]), (info["created"], settings)

    async def _consumer(self, stream: str, name: str) -> Any:
        try:
            info = await self.js.api(f"CONSUMER.INFO.{stream}.{name}")
        except ApiError as error:
            if error.err_code in (NO_CONSUMER, NO_STREAM):
                return None
            raise
        kept = ("created", "config", "num_ack_pending", "num_pending", "num_waiting")
        floor = {key: info["ack_floor"][key] for key in ("consumer_seq", "stream_seq")}
        return {key: info[key] for key in kept} | {"ack_floor": floor, "delivered": info["delivered"]["consumer_seq"]}

    async def _last(self, stream: str, subject: str) -> int:
        try:
            found = await self.js.last(stream, subject)
        except ApiError as error:
            if error.err_code == NO_STREAM:
                return -1
            raise
        return found.seq if found else 0


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {was} became {after[name]}" for name, was in before.items() if was != after[name]]
