"""One link while a worker carries it: its connection to the peer, its direction, its rounds about people, mail and
tasks, and the credential it stays with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tidings.admin.link_peers import PeerAccess
from tidings.errors import TidingsError
from tidings.links.compare import Comparison
from tidings.links.definition import LinkDefinition
from tidings.links.destination import LocalDestination
from tidings.links.directory_sync import PeopleRound
from tidings.links.events import Listener
from tidings.links.held import HeldRecords, shared_by
from tidings.links.link_store import BookedLink
from tidings.links.mail_sync import MailRound
from tidings.links.ports import Verify
from tidings.links.replicator import LIVE, Direction, Mode
from tidings.links.running import LoopClock, RunningDirection
from tidings.links.side_syncs import Rounds
from tidings.links.source import PeerSource
from tidings.links.spaces import SharedLog, Spaces
from tidings.links.task_sync import TaskRound
from tidings.links.verifying import VerifiedAhead
from tidings.nats import jwt
from tidings.util.private_files import read_private
from tidings.util.task_ends import end_tasks
from tidings.wire.rulings import Link

#: seconds between two looks whether the credential ends before long
LOOK_AT_CREDENTIAL = 30.0
#: seconds after which the other space is told that its last records were handled
TELL_AFTER = 1.0
log = logging.getLogger(__name__)


class CarriedLink:
    """`listener` hears everything its direction tells. It begins with `start`, and begins once."""

    def __init__(
        self,
        definition: LinkDefinition,
        access: PeerAccess,
        creds: Path,
        ledger: BookedLink,
        spaces: Spaces,
        record: Link,
        *,
        verify: Verify,
        mode: Mode = LIVE,
        listener: Listener = lambda _event: None,
    ) -> None:
        self.definition, self.access, self.ledger = definition, access, ledger
        self._creds = creds
        # who looks every so often does not want to be woken
        self._wake: Callable[[], None] = self._woken if mode == LIVE else (lambda: None)
        verified = VerifiedAhead(verify)
        self.source: SharedLog = spaces.source(access, creds, lambda: self._wake(), verified.prepare)
        destination = spaces.destination(definition.link)
        self.direction = Direction(
            definition,
            ledger,
            self.source,
            destination,
            LoopClock(),
            verify=verified,
            comparison=Comparison(HeldRecords(ledger, lambda: shared_by(self.source)), self.source),
            mode=mode,
            tell_after=TELL_AFTER,
        )
        self.direction.listen(listener)
        if mode == LIVE and isinstance(self.source, PeerSource):
            self.source.on_back = self.direction.back
        self._here = destination.space if mode == LIVE and isinstance(destination, LocalDestination) else None
        if self._here is not None:
            self._here.on_back.append(self.direction.back)
        self._running = RunningDirection(self.direction)
        self.rounds: Rounds | None = None
        if record.roster == "on":
            people = PeopleRound(definition.space, record, ledger, self.source, spaces.here)
            mail = MailRound(definition.space, record, ledger, self.source, spaces.here) if record.passes_mail else None
            tasks = (
                TaskRound(definition.space, record, ledger, self.source, spaces.here) if record.passes_tasks else None
            )
            self.rounds = Rounds(definition.link, ledger, people, mail, tasks, every=mode.every)
        self._keeping: asyncio.Task[None] | None = None

    def _woken(self) -> None:
        self.direction.wake()
        if self.rounds is not None:
            self.rounds.wake()

    def ask(self) -> None:
        """An operator does not want to wait."""
        self.direction.ask()
        if self.rounds is not None:
            self.rounds.ask()

    def start(self) -> None:
        self._running.start()
        if self.rounds is not None:
            self.rounds.start()
        self._keeping = asyncio.create_task(self._keep_credential(), name=f"credential of {self.definition.link}")

    def offered(self) -> list[str] | None:
        """What the other space shares with us, as it last said; None if it was not asked yet."""
        said = self.source.said if isinstance(self.source, PeerSource) else None
        return list(said.shares) if said is not None else None

    async def stop(self, deadline: float) -> None:
        """It finishes what it is at, for at most `deadline` seconds. Others go on meanwhile."""
        self._wake = lambda: None
        if self._here is not None:
            self._here.on_back.remove(self.direction.back)
            self._here = None
        if self._keeping is not None:
            await end_tasks([self._keeping])
        if self.rounds is not None:
            await self.rounds.stop()
        try:
            if not await self._running.stop(deadline):
                log.warning("link %s was broken off after %.0f s", self.definition.link, deadline)
        finally:
            await self.source.close()

    async def _keep_credential(self) -> None:
        """The peer answers a newer token when it is greeted. One that ends before long is fetched while it holds."""
        while True:
            await asyncio.sleep(LOOK_AT_CREDENTIAL)
            try:
                if half_is_over(read_private(self._creds), time.time()):
                    await self.source.hello()
            except (TidingsError, OSError) as error:
                log.warning("the credential of link %s could not be renewed: %s", self.definition.link, error)


def half_is_over(creds: str, now: float) -> bool:
    """Of the time a credential holds for; one that does not end is never due."""
    with suppress(TidingsError, ValueError, KeyError, TypeError):
        claims = jwt.decode(jwt.split_credentials(creds)[0])
        begun, ends = int(claims["iat"]), int(claims.get("exp") or 0)
        return bool(ends) and now >= begun + (ends - begun) / 2
    return False
