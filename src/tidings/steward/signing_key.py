"""The key the steward signs rulings with, and its rotation.

    steward.key            the one in use
    steward.key.next       made by `tidings space rotate-key`, not yet named by the log
    steward.keys.retired   those before it

Which key counts is the log's word: a rotation is a record signed by the key before it. A rotation that was interrupted
is finished, and one that a log lost by going backwards is written again; a retired key is kept for that alone.
"""

from __future__ import annotations

import logging

import msgspec

from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.errors import TidingsError, UsageError
from tidings.model.projection import Table
from tidings.nats.jetstream import JetStream
from tidings.server.log import log_record
from tidings.steward.context import now
from tidings.steward.writer import RulingWriter
from tidings.util.private_files import read_private, write_private
from tidings.wire.message import new_id
from tidings.wire.signing import KeyPair

log = logging.getLogger(__name__)


class SigningKey:
    """The signing keys of one steward, on its disk."""

    def __init__(self, home: SpaceHome, info: SpaceInfo) -> None:
        self._info = info
        self._path = home.creds / "steward.key"
        self._next_path = home.creds / "steward.key.next"
        self._retired_path = home.creds / "steward.keys.retired"

    async def that_rules(self, js: JetStream) -> KeyPair:
        """The key that rules by the word of the log: ours, or the next one if a rotation was interrupted after its
        record, or a retired one if the log went back to before a rotation."""
        ruler, key = await self._named_by_the_log(js), self._current()
        if key.id == ruler:
            return key
        following = self._following()
        if following is not None and following.id == ruler:
            self._keep(following)
            return following
        for retired in self._retired():
            if retired.id == ruler:
                return retired
        raise TidingsError(
            f"the log of {self._info.name} is ruled by {ruler}, but {self._path.name} is {key.id}: "
            "restore the steward's key from a backup"
        )

    async def _named_by_the_log(self, js: JetStream) -> str:
        s, info = self._info.subjects, self._info
        rotations = Table(s, info.id, info.steward_key)
        head = int((await js.info(s.log_stream))["state"]["last_seq"])
        async for page in js.read(s.log_stream, s.space_record, 1, head):
            rotations.apply_all(map(log_record, page))
        return rotations.steward_key

    async def rotate(self, writer: RulingWriter, op: str) -> int:
        """Write the record that names the key in `steward.key.next`, and rule with it from then on."""
        following = self._following()
        if following is None:
            raise UsageError("there is no steward.key.next to rotate to: `tidings space rotate-key` makes one")
        seq = await self._hand_over_to(writer, following, op)
        self._keep(following)
        return seq

    async def rotate_again(self, writer: RulingWriter) -> None:
        """If the log went back to before a rotation, a retired key rules once, to name the one in use."""
        current = self._current()
        if current.id != writer.key.id:
            log.warning("the log had lost the rotation to %s; writing it again", current.id)
            await self._hand_over_to(writer, current, new_id())

    async def _hand_over_to(self, writer: RulingWriter, following: KeyPair, op: str) -> int:
        table = writer.table
        current = table.space_at(max(table.head, table.floor))
        record = msgspec.structs.replace(current, op=op, at=now(), steward_key=following.id)
        seq = await writer.write(table.subjects.space_record, record)
        writer.key = writer.lease.key = following
        return seq

    # --- files ---

    def _current(self) -> KeyPair:
        return KeyPair(read_private(self._path).strip())

    def _following(self) -> KeyPair | None:
        return KeyPair(read_private(self._next_path).strip()) if self._next_path.exists() else None

    def _retired(self) -> list[KeyPair]:
        if not self._retired_path.exists():
            return []
        return [KeyPair(seed) for seed in read_private(self._retired_path).split()]

    def _keep(self, key: KeyPair) -> None:
        """Make `key` ours. The one before signs nothing that counts, unless the log goes back; then it must."""
        retired = dict.fromkeys([*(each.seed for each in self._retired()), self._current().seed])
        write_private(self._retired_path, "\n".join(seed for seed in retired if seed != key.seed) + "\n")
        write_private(self._path, key.seed + "\n")
        self._next_path.unlink(missing_ok=True)
