"""Sealed blocks: what a frame names is fetched from where everybody fetches it, opened, and checked.

One request per block, a few at a time, each tried for a moment and not for long: a block may be gone, because the
broker removes the oldest, and then the log has its messages. So nothing here depends on why it did not come. In a
cluster the server that is asked may not have it yet, or stand still, and is asked again; elsewhere what is not there
does not appear. A block that is not what its reference names is counted, and not asked for twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from tidings.client.connection import AgentConnection
from tidings.client.records import RecordOpener
from tidings.errors import MalformedFrame, UnreachableError
from tidings.nats.errors import NatsError, NoResponders, PublishDenied
from tidings.wire.block_refs import open_ref
from tidings.wire.frames import FrameRecord, Ref

#: requests under way
AT_ONCE = 8
#: for one answer; the broker forgets a request after BLOCK_ANSWER
PATIENCE = 2.0
#: pauses before a server of a cluster is asked again
CLUSTER_PAUSES = (0.05, 0.15, 0.5, 1.5)
#: before a connection that is gone is waited for again
RECONNECT_PAUSE = 0.05
CONNECTION_PATIENCE = 30.0
Missing = Literal["not there", "no answer", "refused"]


class BlockReader:
    """Gets blocks for one endpoint."""

    def __init__(self, connection: AgentConnection, opener: RecordOpener) -> None:
        self.connection = connection
        self.opener = opener
        #: requests that were made
        self.asked = 0
        self._under_way = asyncio.Semaphore(AT_ONCE)

    async def records(self, epoch: str, ref: Ref) -> tuple[FrameRecord, ...] | None:
        """The records of a block, verified to be those its reference names; None if they are to be had elsewhere."""
        data = await self._get(ref.name.hex())
        if data is None:
            return None
        try:
            return open_ref(self.opener.space_id, epoch, ref, data)
        except MalformedFrame:
            self.opener.refused["block"] += 1
            return None

    async def _get(self, name: str) -> bytes | None:
        tries = 0
        while True:
            found, pauses = await self._ask(name)
            if isinstance(found, bytes):
                return found
            if tries >= len(pauses):
                return None
            await asyncio.sleep(pauses[tries])
            tries += 1

    async def _ask(self, name: str) -> tuple[bytes | Missing, Sequence[float]]:
        """One request on a connection that stays: what came of it, and when to ask again if it is nothing."""
        while True:
            try:
                async with self._under_way:
                    connection = await self.connection.ready(CONNECTION_PATIENCE)
                    self.asked += 1
                    answer = await connection.request(self.opener.subjects.block_get(name), timeout=PATIENCE)
            except (NoResponders, PublishDenied):  # no such stream, or no right to ask
                return "refused", ()
            except TimeoutError:
                return "no answer", CLUSTER_PAUSES if connection.info.get("cluster") else (0.0,)
            except (NatsError, UnreachableError, OSError):
                await asyncio.sleep(RECONNECT_PAUSE)
                continue
            if answer.status is None:
                return answer.data, ()
            return "not there", CLUSTER_PAUSES if connection.info.get("cluster") else ()
