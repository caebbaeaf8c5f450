"""The small state of a space that is not in the log: beats and floors, in the bucket `td_state_<space>`.

Every write is a compare-and-set on the key's own revision, so two writers never overwrite each other unseen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tidings.broker.answers import EXPECT_SEQUENCE, WRONG_LAST_SEQUENCE, ApiError
from tidings.broker.jetstream import JetStream
from tidings.errors import ConflictError
from tidings.wire.names import check_token
from tidings.wire.subjects import Subjects

#: owner -> DLV sequence through which it had acknowledged everything when its mailbox was emptied: the pipeline
#: delivers again what lay above, as far as it is still allowed, and takes the note away
EMPTIED_KEY = "emptied"


@dataclass(frozen=True, slots=True)
class Entry:
    revision: int
    value: dict[str, Any]
    time_ns: int


class StateBucket:
    def __init__(self, js: JetStream, subjects: Subjects) -> None:
        self.js = js
        self.bucket = subjects.state_bucket

    def _subject(self, key: str) -> str:
        return ".".join((f"$KV.{self.bucket}", *(check_token(token, "state key") for token in key.split("."))))

    async def get(self, key: str) -> Entry | None:
        stored = await self.js.last(f"KV_{self.bucket}", self._subject(key))
        return Entry(stored.seq, dict(json.loads(stored.payload)), stored.time_ns) if stored else None

    async def under(self, prefix: str) -> dict[str, Entry]:
        """Every key `<prefix>.<token>` with its value; one round trip for each, so for few keys."""
        found: dict[str, Entry] = {}
        position = 1
        while stored := await self.js.following(f"KV_{self.bucket}", f"{self._subject(prefix)}.*", position):
            key = stored.subject.removeprefix(f"$KV.{self.bucket}.")
            found[key] = Entry(stored.seq, dict(json.loads(stored.payload)), stored.time_ns)
            position = stored.seq + 1
        return found

    async def put(self, key: str, value: dict[str, Any], revision: int) -> int:
        """Write if the key is still at `revision` (0: does not exist). Answers the new revision."""
        try:
            return await self.js.publish(
                self._subject(key), json.dumps(value).encode(), {EXPECT_SEQUENCE: str(revision)}
            )
        except ApiError as error:
            if error.err_code == WRONG_LAST_SEQUENCE:
                raise ConflictError(f"{key} of {self.bucket} changed meanwhile: {error.description}") from error
            raise
