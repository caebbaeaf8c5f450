"""The small state of a space that is not in the log: beats and floors, in the bucket `td_state_<space>`.

Every write is a compare-and-set on the key's own revision, so two writers never overwrite each other unseen. `StateApi`
has the rules without I/O, for the steward's event loop (`StateBucket`) and for the pipeline's driver alike. Its keys
are in `wire/subjects.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidings.nats import jetstream_api as api
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import Steps
from tidings.wire.names import check_token
from tidings.wire.records import StoredRecord
from tidings.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class Entry:
    revision: int
    value: dict[str, Any]
    time_ns: int

    @classmethod
    def of(cls, stored: StoredRecord) -> Entry:
        return cls(stored.seq, dict(json.loads(stored.payload)), stored.time_ns)


class StateApi:
    """Reads and writes as steps. `direct`: with direct get, for those whose credential has nothing else."""

    def __init__(self, subjects: Subjects, *, direct: bool = False) -> None:
        self.stream, self._root = f"KV_{subjects.state_bucket}", f"$KV.{subjects.state_bucket}"
        self._last = api.direct_last if direct else api.last

    def _subject(self, key: str) -> str:
        return ".".join((self._root, *(check_token(token, "state key") for token in key.split("."))))

    def get(self, key: str) -> Steps[Entry | None]:
        stored = yield from self._last(self.stream, self._subject(key))
        return Entry.of(stored) if stored else None

    def under(self, prefix: str) -> Steps[dict[str, Entry]]:
        """Every key `<prefix>.<token>` with its value; one round trip for each, so for few keys."""
        found: dict[str, Entry] = {}
        position = 1
        while stored := (yield from api.following(self.stream, f"{self._subject(prefix)}.*", position)):
            found[stored.subject.removeprefix(f"{self._root}.")] = Entry.of(stored)
            position = stored.seq + 1
        return found

    def put(self, key: str, value: Mapping[str, Any], revision: int) -> Steps[int]:
        """Write if the key is still at `revision` (0: does not exist), else `ConflictError`. Answers the new one."""
        return api.publish_if(self._subject(key), json.dumps(value).encode(), revision)


class StateBucket:
    """The same on an event loop."""

    def __init__(self, js: JetStream, subjects: Subjects) -> None:
        self.js = js
        self._api = StateApi(subjects)

    async def get(self, key: str) -> Entry | None:
        return await self.js.run(self._api.get(key))

    async def under(self, prefix: str) -> dict[str, Entry]:
        return await self.js.run(self._api.under(prefix))

    async def put(self, key: str, value: Mapping[str, Any], revision: int) -> int:
        return await self.js.run(self._api.put(key, value, revision))
