"""`tidings up`: broker, steward, pipeline and link worker as children that live and die with this process.

    lock -> create (once), or recall -> broker -> streams -> steward -> agents -> ready -> pipeline, links,
    watch

It opens no key: what needs one runs in a short-lived child. Ready does not wait for the pipeline, and the space stays
up if it dies. Whatever ends is started again with a growing pause; whatever interrupts a step, every child that was
started is stopped, in reverse order, and the lock goes with us.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tidings.admin.agents import Ledger
from tidings.admin.creation import broker_config
from tidings.admin.external import SHORT_LIVED, danger_of_replicas, replicas_of
from tidings.admin.home import SIGNING, SpaceHome
from tidings.admin.layout import check_layout
from tidings.admin.link_registry import LinkLedger
from tidings.errors import (
    AuthRevoked,
    BrokerFailed,
    ConfigError,
    LeaseHeld,
    SpaceBusy,
    StewardUnreachable,
    TidingsError,
    UntrustedServer,
    UsageError,
)
from tidings.nats.address import DEFAULT_PORTS, shown
from tidings.nats.client import connect
from tidings.nats.jetstream import JetStream
from tidings.nats.jwt import split_credentials
from tidings.server.disk import DiskReserve
from tidings.server.nats_server import Broker, binary_version, find_binary
from tidings.supervisor.keepers import LinkKeeper, PipelineKeeper, TokenKeeper
from tidings.supervisor.processes import CHILDREN, AdminProcess, end_child, error_of, start_child
from tidings.supervisor.watcher import INVITED, LINKED, Breach, Watcher
from tidings.util import failpoints
from tidings.util.backoff import Backoff
from tidings.util.private_files import lock_holder, locked, read_private
from tidings.util.task_ends import end_tasks
from tidings.wire.names import is_agent_id

START_TIMEOUT = 120.0
STEWARD_GRACE = 10.0
BROKER_GRACE = 15.0
#: a look at the disk costs microseconds; what passes between two looks is found by writes that are not answered
LOOK_AT_DISK = 0.25
RESTART_EVERY = 10.0
#: seconds that checking the account tokens may delay the start of a broker that ended
RECALL_TIMEOUT = 5.0
#: seconds between two looks whether the certificate is another one, and whether it should be
LOOK_AT_CERTIFICATE, RENEW_CERTIFICATE = 2.0, 86_400.0
#: seconds between two looks for credentials of agents that end before long; the shortest lives for 15 minutes
LOOK_AT_CREDENTIALS = 120.0
RESTART = Backoff(0.2, 10.0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpOptions:
    person: str
    open_space: bool = False
    port: int | None = None
    budget: int | None = None
    nats_server: str | None = None
    lease_ttl: float = 3.0
    #: seconds without a beat after which an agent is offline
    presence: float = 25.0
    #: the address on which other machines reach it, `off`, or as before
    listen: str | None = None
    #: the same for websockets
    ws: str | None = None
    #: a certificate for that and its key; ("off", ""): the space's own again
    certificate: tuple[str, str] | None = None
    #: start durable delivery too
    pipeline: bool = True
    #: carry what other spaces share, if a link takes anything in
    links: bool = True
    #: the servers of a NATS that others run, instead of a broker of its own
    server: str | None = None
    #: of every stream there, if it is not to be as many as there can be
    replicas: int | None = None
    #: what the administrator says of `sync_interval`, in seconds
    sync_seconds: int | None = None
    #: files of the administrator's: an operator signing key, and a user of the system account
    operator_key: tuple[str, str] | None = None


class _CutRequest(msgspec.Struct):
    """The agent or invitation to cut."""

    id: str
    why: str


class _Redemption(msgspec.Struct):
    """An invitation that somebody accepted."""

    invitation: str
    agent: str
    asked: dict[str, str]

    def is_known(self) -> bool:
        known = self.asked.keys() in ({"name"}, {"text", "sig", "proof"})
        return known and is_agent_id(self.invitation) and is_agent_id(self.agent)


class _StewardRequest(msgspec.Struct):
    """One line of the steward's standard output; fields that are not set ask for nothing."""

    restart_broker: str = ""
    quota: dict[str, int | None] | None = None
    bar: _CutRequest | None = None
    withhold: _CutRequest | None = None
    redeem: _Redemption | None = None


class Supervisor:
    def __init__(self, home: SpaceHome, options: UpOptions, tell: Callable[[str], None] = lambda _text: None) -> None:
        self.home = home
        self.options = options
        self.tell = tell
        self.broker: Broker | None = None
        self.steward: asyncio.subprocess.Process | None = None
        self._holder: str | None = None
        lease = ["--lease-ttl", str(options.lease_ttl)]
        self.pipeline = PipelineKeeper(home, lease, note=partial(self._note, "pipeline"), tell=tell)
        self.links = LinkKeeper(home, note=partial(self._note, "links"), tell=tell)
        self.watcher = Watcher(home, cut=self._cut, note=partial(self._note, "watcher"))
        self.others = [Watcher(home, cut=self._cut, who=who) for who in (INVITED, LINKED)]
        self._lacking = False
        self.disk = DiskReserve(home.store)
        self._broker_restarted = float("-inf")
        self._state: dict[str, Any] = {"pipeline": {"wanted": options.pipeline, "phase": "off"}}
        self._down: set[str] = set()
        #: invitations that are being accepted
        self._redeeming: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Bring the space up and keep it up until cancelled."""
        self.home.make()
        with ExitStack() as stack:
            self._hold_lock(stack)
            try:
                await self._bring_up()
                self.phase("ready")
                await self._watch()
            finally:
                await asyncio.shield(self._bring_down())

    def _hold_lock(self, stack: ExitStack) -> None:
        try:
            # a little patience: whoever asks who holds the lock takes it for an instant
            stack.enter_context(locked(self.home.up_lock, f"tidings up, space {self.home.name}", wait=0.5))
        except SpaceBusy as error:
            raise SpaceBusy(
                f"space {self.home.name} is already up: {lock_holder(self.home.up_lock)}; `tidings status` shows it"
            ) from error

    def phase(self, name: str, **facts: Any) -> None:
        """Say where we are. A disk that is full must not keep us from stopping our children."""
        self._state |= {"phase": name, "pid": os.getpid(), "at": time.time(), **facts}
        self._write_state()
        log.info("phase %s", name)
        failpoints.reach(f"up.{name}")

    def _write_state(self) -> None:
        try:
            self.home.write_state(self._state)
        except ConfigError as error:
            log.error("cannot write state: %s", error)

    def _note(self, part: str, facts: dict[str, Any]) -> None:
        self._state[part] = facts
        self._write_state()

    # --- up ---

    async def _bring_up(self) -> None:
        external = self._is_external()
        binary = None if external else find_binary(self.options.nats_server)
        async with AdminProcess(self.home) as admin:
            if binary is None:
                await self._bring_up_elsewhere(admin)
            else:
                await self._bring_up_with(admin, binary)
        self._lacking = await self._look_for_spark()

    def _is_external(self) -> bool:
        """Does it live on servers that others run? That is decided when it is created."""
        known = self.home.read_info() if self.home.exists else None
        if known is not None:
            check_layout(known)
        if known is not None and self.options.server and not known.servers:
            raise UsageError(
                f"space {known.name} has a broker of its own: `tidings up --space NAME --server URL` makes another one "
                "that lives there"
            )
        wanted = bool(self.options.server or (known and known.servers))
        if wanted and (self.options.listen or self.options.certificate or self.options.port):
            raise UsageError("--server is for a NATS that others run: where it listens is theirs to say")
        if not wanted and (self.options.replicas or self.options.sync_seconds or self.options.operator_key):
            raise UsageError(
                "--replicas, --sync-interval and --operator-key are for a NATS that others run: --server URL"
            )
        return wanted

    async def _bring_up_elsewhere(self, admin: AdminProcess) -> None:
        """On servers that others run: once all that it needs is there."""
        if not self.home.exists:
            assert self.options.server
            await asyncio.to_thread(replicas_of, self.options.server)  # before anything is made: does one answer?
            self.tell(f"creating space {self.home.name}")
            self.phase("creating")
            made = {"open": self.options.open_space, "port": DEFAULT_PORTS["nats"], "budget": self.options.budget}
            await admin.ask("create", **made, servers=self.options.server)
        elif self.options.budget:
            self.home.update_info(budget=self.options.budget)
        await self._complete_move(admin)
        info = self.home.read_info()
        self.phase("broker", url=shown(self.options.server or info.servers))
        looked = await admin.ask(
            "external",
            servers=self.options.server or info.servers,
            replicas=self.options.replicas,
            sync_seconds=self.options.sync_seconds,
            operator_key=self.options.operator_key,
        )
        info = self.home.read_info()
        if looked["missing"]:
            raise ConfigError(
                f"{info.address} lacks {looked['missing']}. What its administrator must add is written in "
                f"{looked['written']}; then `tidings up` again"
            )
        out = f"is out within {SHORT_LIVED // 60} minutes, when its credential ends"
        revoked = f"who is revoked {'is cut at once' if info.mode == SIGNING else out}"
        self.tell(f"the space lives on {info.address}, with {info.replicas} of each stream; {revoked}")
        if words := danger_of_replicas(info):
            self.tell(words)
        await self._recall(admin)
        await self._provide(admin)

    async def _bring_up_with(self, admin: AdminProcess, binary: Path) -> None:
        version = ".".join(map(str, binary_version(binary)))
        if not self.home.exists:
            self.tell(f"creating space {self.home.name}")
            self.phase("creating")
            made = {"open": self.options.open_space, "port": self.options.port, "budget": self.options.budget}
            await admin.ask("create", **made)
        else:
            changes = {"port": self.options.port, "budget": self.options.budget}
            self.home.update_info(**{name: value for name, value in changes.items() if value})
            await self._complete_move(admin)
            await self._recall(admin)
        info, options = self.home.read_info(), self.options
        if options.listen or info.listen or options.ws or info.ws:
            await admin.ask("listen", wanted=options.listen, ws=options.ws, certificate=options.certificate)
        elif self.options.certificate is not None:
            raise UsageError("a certificate is for other machines: `tidings up --listen ADDR --cert FILE --key FILE`")
        info = self.home.read_info()
        if self.options.open_space and not info.open:
            raise UsageError(f"space {info.name} was created without --open; create another space for that")
        self.phase("broker", url=info.address, nats_server=version)
        self.tell(
            f"starting the broker (nats-server {version}) on port {info.port}"
            + (f" of {info.listen}, with TLS" if info.listen else "")
            + (f", for websockets on port {info.ws_port} of {info.ws}" if info.ws else "")
        )
        self._tend_reserve()
        self.broker = Broker(broker_config(self.home, info), self.home.run / "nats.conf", binary)
        await self._start_broker()
        await self._provide(admin, broker_pid=self.broker.pid)

    async def _provide(self, admin: AdminProcess, **facts: Any) -> None:
        """Streams, steward and agents, wherever the broker is."""
        self.phase("streams", **facts)
        changes = (await admin.ask("provision"))["changes"]
        for change in changes:
            log.info("%s", change)
        self.phase("steward")
        self.tell("starting the steward")
        await self._start_steward()
        self.phase("agents")
        for each in (await admin.ask("agents", person=self.options.person))["done"]:
            self.tell(each)

    async def _recall(self, admin: AdminProcess) -> None:
        """What was decided since a copy was made that is put back now."""
        for each in (await admin.ask("recall"))["done"]:
            self.tell(each)

    async def _complete_move(self, admin: AdminProcess) -> None:
        """Completes a move that was interrupted, before a broker serves the accounts."""
        if self.home.unfinished_move.exists():
            await admin.ask("complete_move")

    async def _look_for_spark(self) -> bool:
        """Said before we are ready, so that whoever starts us in the background hears it too."""
        from tidings.delivery.session import missing

        lacking = await asyncio.to_thread(missing) if self.options.pipeline else None
        if lacking:
            self.pipeline.unavailable(lacking)
        return lacking is not None

    async def _start_broker(self) -> None:
        assert self.broker is not None
        self.broker.spawn()
        await self._until_broker_ready()

    async def _until_broker_ready(self) -> None:
        assert self.broker is not None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not self.broker.is_ready():
                    await asyncio.sleep(0.02)
                while not await self._round_trip():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise BrokerFailed(
                f"the broker was not ready within {START_TIMEOUT:.0f} s; `tidings logs broker` says why"
            ) from None

    async def _round_trip(self) -> bool:
        """Ready is when JetStream answers the steward's own credential, not when a port is open."""
        info = self.home.read_info()
        creds = self.home.creds / "steward.creds"
        try:
            user = split_credentials(read_private(creds))[1]
            connection = await connect(info.url, creds, user.id, name="readiness", reconnect=False, timeout=2)
        except AuthRevoked as error:
            raise AuthRevoked(
                f"the broker at {info.address} does not take the steward's credential ({creds}): keys, credentials and "
                "tokens of this folder are not of one space. Was only a part of it put back? Put all of "
                f"{self.home.root} back from one copy"
            ) from error
        except (ConfigError, UntrustedServer):
            raise  # waiting will not mend a credential, or a certificate that this machine does not trust
        except TidingsError:
            if self.broker is not None and not self.broker.alive:
                raise BrokerFailed("nats-server ended while it was starting; `tidings logs broker` says why") from None
            return False
        try:
            await JetStream(connection, timeout=2).api("INFO")
        except TidingsError:
            return False
        finally:
            await connection.close()
        return True

    async def _start_steward(self) -> None:
        arguments = ["--lease-ttl", str(self.options.lease_ttl), "--presence", str(self.options.presence)]
        if self._holder:
            arguments += ["--after", self._holder]
        # to standard error goes only what Python itself says when it cannot go on
        self.steward = await start_child(self.home, CHILDREN, "steward", *arguments, errors="steward.err")
        line = await self._first_line(self.steward)
        if not line.get("ready"):
            await self.steward.wait()
            raise error_of(line, "the steward")
        self._holder = line["holder"]
        self._state |= {"steward_pid": self.steward.pid, "lease": line["lease"]}

    @staticmethod
    async def _first_line(child: asyncio.subprocess.Process) -> dict[str, Any]:
        assert child.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT):
                line = await child.stdout.readline()
        except TimeoutError:
            await end_child(child, 2)
            raise StewardUnreachable(
                f"the steward was not ready within {START_TIMEOUT:.0f} s; `tidings logs steward` says why"
            ) from None
        try:
            return dict(json.loads(line))
        except ValueError:
            return {}

    async def _administer(self, program: str, **options: Any) -> dict[str, Any]:
        """What needs a key, while the space runs; its error becomes ours."""
        async with AdminProcess(self.home) as admin:
            return await admin.ask(program, **options)

    # --- watch ---

    async def _watch(self) -> None:
        info = self.home.read_info()
        parts = [self._watch_steward(), self._watch_credentials()]
        if self.broker is not None:
            parts += [self._watch_broker(), self._watch_disk(), self.watcher.keep()]
            parts += [each.keep() for each in self.others]
        elif info.mode == SIGNING:
            parts.append(TokenKeeper(self.home).keep())
        if info.listen or info.ws:
            parts.append(self._watch_certificate())
        if self.options.pipeline and not self._lacking:
            parts.append(self.pipeline.keep())
        if self.options.links:
            parts.append(self.links.keep())
        await asyncio.gather(*parts)

    async def _watch_broker(self) -> None:
        assert self.broker is not None
        backoff = RESTART.delays(fresh_after=60)
        while True:
            await asyncio.sleep(0.2)
            starting = self.broker.alive
            if starting and "broker" not in self._down:
                continue
            try:
                if starting:  # a store with much in it may need longer than we waited
                    await self._until_broker_ready()
                else:
                    log.error("the broker ended with code %s", self.broker.exit_code)
                    self._troubled("broker")
                    await asyncio.sleep(next(backoff))
                    recalled = await self._recall_tokens()
                    await self._start_broker()
                    if not recalled:
                        await self._recall_tokens()
                self._recovered("broker", broker_pid=self.broker.pid)
            except TidingsError as error:
                log.error("the broker does not start: %s", error)

    async def _recall_tokens(self) -> bool:
        """Returns whether the account tokens are those of the key registry.

        A broker that starts on an older copy of them would let revoked agents in.
        """
        try:
            async with asyncio.timeout(RECALL_TIMEOUT):
                for each in (await self._administer("recall"))["done"]:
                    log.warning("%s", each)
        except (TidingsError, TimeoutError) as error:
            log.error("the account tokens could not be checked before the broker starts: %r", error)
            return False
        return True

    async def _watch_credentials(self) -> None:
        """Those that end before long are renewed. Whose they are says the ledger, which needs no key to be read."""
        while True:
            await asyncio.sleep(LOOK_AT_CREDENTIALS)
            try:
                if await asyncio.to_thread(self._are_due):
                    log.info("renewed the credentials of %s", (await self._administer("renew"))["names"])
            except TidingsError as error:
                log.error("credentials that end before long could not be renewed: %s", error)

    def _are_due(self) -> bool:
        now, links = time.time(), LinkLedger.below(self.home, self.home.read_info().id)
        return bool(Ledger(self.home.issued).due(now)) or any(row.is_due(now) for row in links.rows())

    async def _watch_certificate(self) -> None:
        """The broker takes up a certificate that is another one; once a day it is renewed if it ends soon."""
        assert self.broker is not None
        shown, looked = self._certificate(), time.monotonic()
        while True:
            await asyncio.sleep(LOOK_AT_CERTIFICATE)
            if time.monotonic() - looked >= RENEW_CERTIFICATE:
                looked = time.monotonic()
                try:
                    await self._administer("listen", wanted=None)
                except TidingsError as error:
                    log.error("the broker's certificate could not be looked after: %s", error)
            now = self._certificate()
            if now != shown and self._is_whole():
                shown = now
                self.broker.reload()
                log.info("the broker has a new certificate")

    def _certificate(self) -> bytes:
        """What the broker is to show, with its key."""
        assert self.broker is not None
        try:
            return b"".join(path.read_bytes() for path in self.broker.config.shown or ())
        except OSError:
            return b""

    def _is_whole(self) -> bool:
        """Not while one of the two is written and the other is not."""
        from tidings.server.certificates import is_pair  # only where there is one: it loads more than we need else

        assert self.broker is not None
        return self.broker.config.shown is not None and is_pair(*self.broker.config.shown)

    async def _watch_disk(self) -> None:
        """Give the reserve up before the disk is empty. A broker that may have met an empty one starts again."""
        hurt = False
        while True:
            hurt = self._tend_reserve() or hurt
            if hurt and self.disk.look().can_start:
                why = "the disk was full, and a stream that met that stores nothing any more"
                hurt = not await self._restart_broker(why)
            await asyncio.sleep(LOOK_AT_DISK)

    def _tend_reserve(self) -> bool:
        """Whether the disk was found empty."""
        room = self.disk.look()
        if room.is_low and room.reserved:
            self.disk.give_up()
            log.error("%s: the reserve of %d bytes is given up", room, room.size)
        try:
            self.disk.make()
        except ConfigError as error:
            log.warning("%s", error)
        return room.is_empty

    async def _restart_broker(self, why: str) -> bool:
        """Stop it; whoever watches it starts it again. False if it is down, or was stopped a moment ago."""
        if self.broker is None or not self.broker.alive or time.monotonic() - self._broker_restarted < RESTART_EVERY:
            return False
        self._broker_restarted = time.monotonic()
        log.error("the broker is started again: %s", why)
        await asyncio.to_thread(self.broker.stop, BROKER_GRACE)
        return True

    async def _watch_steward(self) -> None:
        backoff = RESTART.delays(fresh_after=60)
        while True:
            assert self.steward is not None
            heeding = asyncio.create_task(self._heed(self.steward))
            try:
                code = await self.steward.wait()
            finally:
                await end_tasks([heeding])
            log.error("the steward ended with code %s", code)
            self._troubled("steward")
            await asyncio.sleep(next(backoff))
            try:
                await self._start_steward()
                self._recovered("steward")
                for each in (await self._administer("agents"))["done"]:
                    log.warning("%s", each)
            except LeaseHeld as error:
                self._holder = None
                log.error("%s", error)
            except TidingsError as error:
                log.error("the steward does not start: %s", error)

    async def _heed(self, steward: asyncio.subprocess.Process) -> None:
        """Do what a steward asks for on its standard output: cut a flooder, tell the watcher, restart the broker."""
        assert steward.stdout is not None
        while line := await steward.stdout.readline():
            try:
                said = msgspec.json.decode(line, type=_StewardRequest)
            except (msgspec.DecodeError, UnicodeDecodeError):  # boundary: such a line asks for nothing
                continue
            if said.restart_broker:
                await self._restart_broker(said.restart_broker[:300])
            if said.quota is not None:
                self.watcher.heed(said.quota)
            if (asked := said.bar or said.withhold) and is_agent_id(asked.id):
                self.watcher.bar(Breach(asked.id, asked.why[:150], void=said.bar is not None))
            if said.redeem is not None and said.redeem.is_known():
                self._redeeming = [each for each in self._redeeming if not each.done()]
                self._redeeming.append(asyncio.create_task(self._redeem(said.redeem)))

    async def _cut(self, breach: Breach) -> None:
        """Take from an agent its posting or its credential; the keys for that are opened by a child."""
        done = await self._administer("bar" if breach.void else "withhold", agent=breach.agent, why=breach.why)
        log.warning("%s may not post %s (%s)", done["name"], breach.why, done["note"])

    async def _redeem(self, accepted: _Redemption) -> None:
        """Somebody accepted an invitation. Whoever waits for that hears of it from the administrator."""
        try:
            done = await self._administer("redeem", **msgspec.structs.asdict(accepted))
            became = (done["refused"] or {}).get("message") or f"made {done['name']}"
            log.warning("invitation %s: %s", accepted.invitation, became)
        except TidingsError as error:
            log.error("invitation %s could not be accepted: %s", accepted.invitation, error)

    def _troubled(self, part: str) -> None:
        self._down.add(part)
        self.phase(f"{' and '.join(sorted(self._down))} restarting")

    def _recovered(self, part: str, **facts: Any) -> None:
        """Ready only when nothing is down: two children may fall at once."""
        self._down.discard(part)
        self.phase(f"{' and '.join(sorted(self._down))} restarting" if self._down else "ready", **facts)

    # --- down ---

    async def _bring_down(self) -> None:
        self.phase("stopping")
        await end_tasks(self._redeeming)
        await self.watcher.close()
        for each in self.others:
            await each.close()
        await self.links.stop()
        await self.pipeline.stop()
        if self.steward is not None:
            await end_child(self.steward, STEWARD_GRACE)
        if self.broker is not None:
            consumers = len(list(self.home.issued.glob("*.json"))) * 2
            grace = 15 + consumers / 100  # a clean stop writes every consumer's state
            await asyncio.to_thread(self.broker.stop, grace)
        if self.broker is not None:
            self.disk.give_up()  # nobody needs it now, and a backup is not to hold it
        self.phase("down", broker_pid=None, steward_pid=None)
