"""`tidings up`: broker, steward and pipeline as children that live and die with this process.

    lock -> create (once), or migrate and recall -> broker -> streams -> steward -> agents -> ready -> pipeline, watch

It opens no key: what needs one runs in a short-lived child. Ready does not wait for the pipeline, and its death
disturbs nobody. Whatever ends is started again with a growing pause; whatever interrupts a step, every child that was
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
from pathlib import Path
from typing import Any

from tidings import failpoints
from tidings.backoff import Backoff
from tidings.broker.aio import end_tasks
from tidings.broker.client import connect
from tidings.broker.disk import DiskReserve
from tidings.broker.jetstream import JetStream
from tidings.broker.private_files import lock_holder, locked, read_private
from tidings.broker.server import Broker, binary_version, find_binary
from tidings.errors import (
    AuthRevoked,
    BrokerFailed,
    ConfigError,
    LeaseHeld,
    SpaceBusy,
    StewardUnreachable,
    TidingsError,
    UsageError,
)
from tidings.space.administration import broker_config
from tidings.space.home import SpaceHome
from tidings.space.layout import LAYOUT
from tidings.steward.admin_process import AdminProcess, error_of, spawn
from tidings.steward.damage import seal_known_damage
from tidings.steward.pipeline_process import PipelineKeeper, end_child
from tidings.steward.watcher import Breach, Watcher
from tidings.wire.keys import KeyPair
from tidings.wire.names import is_agent_id

START_TIMEOUT = 120.0
STEWARD_GRACE = 10.0
BROKER_GRACE = 15.0
#: a look at the disk costs microseconds; what passes between two looks is found by writes that are not answered
LOOK_AT_DISK = 0.25
RESTART_EVERY = 10.0
LOOK_AT_CERTIFICATE = 86_400.0
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
    #: a certificate for that and its key; ("off", ""): the space's own again
    certificate: tuple[str, str] | None = None
    #: start durable delivery too
    pipeline: bool = True


class Supervisor:
    def __init__(self, home: SpaceHome, options: UpOptions, tell: Callable[[str], None] = lambda _text: None) -> None:
        self.home = home
        self.options = options
        self.tell = tell
        self.broker: Broker | None = None
        self.steward: asyncio.subprocess.Process | None = None
        self._holder: str | None = None
        self.pipeline = PipelineKeeper(
            home, ["--lease-ttl", str(options.lease_ttl)], note=self._note_pipeline, tell=tell
        )
        self.watcher = Watcher(home, cut=self._cut, note=self._note_watcher)
        self._lacking = False
        self.disk = DiskReserve(home.store)
        self._broker_restarted = float("-inf")
        self._state: dict[str, Any] = {"pipeline": {"wanted": options.pipeline, "phase": "off"}}
        self._down: set[str] = set()

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

    def _note_watcher(self, facts: dict[str, Any]) -> None:
        self._state["watcher"] = facts
        self._write_state()

    def _note_pipeline(self, facts: dict[str, Any]) -> None:
        self._state["pipeline"] = facts
        self._write_state()

    # --- up ---

    async def _bring_up(self) -> None:
        binary = find_binary(self.options.nats_server)
        async with AdminProcess(self.home) as admin:
            await self._bring_up_with(admin, binary)
        self._lacking = await self._look_for_spark()

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
            await self._migrate(admin)
            await admin.ask("recall")
        if self.options.listen or self.home.read_info().listen:
            await admin.ask("listen", wanted=self.options.listen, certificate=self.options.certificate)
        elif self.options.certificate is not None:
            raise UsageError("a certificate is for other machines: `tidings up --listen ADDR --cert FILE --key FILE`")
        info = self.home.read_info()
        if self.options.open_space and not info.open:
            raise UsageError(f"space {info.name} was created without --open; create another space for that")
        self.phase("broker", url=info.address, nats_server=version)
        self.tell(
            f"starting the broker (nats-server {version}) on port {info.port}"
            + (f" of {info.listen}, with TLS" if info.listen else "")
        )
        self._tend_reserve()
        self.broker = Broker(broker_config(self.home, info), self.home.run / "nats.conf", binary)
        await self._start_broker()
        self.phase("streams", broker_pid=self.broker.pid)
        changes = (await admin.ask("provision"))["changes"]
        for change in changes:
            log.info("%s", change)
        self.phase("steward")
        self.tell("starting the steward")
        await self._start_steward()
        self.phase("agents")
        for each in (await admin.ask("agents", person=self.options.person))["done"]:
            self.tell(each)

    async def _migrate(self, admin: AdminProcess) -> None:
        """Accounts and credentials of this version, before a broker serves them."""
        if self.home.read_info().layout == LAYOUT:
            return
        self.phase("migrating")
        done = (await admin.ask("migrate"))["done"]
        if done:
            self.tell(done)
            log.info("%s", done)

    async def _look_for_spark(self) -> bool:
        """Said before we are ready, so that whoever starts us in the background hears it too."""
        from tidings.pipeline.session import missing

        lacking = await asyncio.to_thread(missing) if self.options.pipeline else None
        if lacking:
            self.pipeline.unavailable(lacking)
        return lacking is not None

    async def _start_broker(self) -> None:
        assert self.broker is not None
        await asyncio.to_thread(seal_known_damage, self.home, self.home.read_info().id)
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
        user = KeyPair(read_private(self.home.creds / "steward.user").strip())
        try:
            connection = await connect(
                info.url, self.home.creds / "steward.creds", user.id, name="readiness", reconnect=False, timeout=2
            )
        except (ConfigError, AuthRevoked):
            raise  # waiting will not mend a credential
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
        errors = self._error_file()
        try:
            self.steward = await spawn(self.home, "steward", *arguments, stderr=errors)
        finally:
            os.close(errors)
        line = await self._first_line(self.steward)
        if not line.get("ready"):
            await self.steward.wait()
            raise error_of(line, "the steward")
        self._holder = line["holder"]
        self._state |= {"steward_pid": self.steward.pid, "lease": line["lease"]}

    def _error_file(self) -> int:
        """What a steward writes to standard error: only what Python itself says when it cannot go on."""
        return os.open(self.home.logs / "steward.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

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
        parts = [self._watch_broker(), self._watch_steward(), self._watch_disk(), self.watcher.keep()]
        if self.home.read_info().listen:
            parts.append(self._watch_certificate())
        if self.options.pipeline and not self._lacking:
            parts.append(self.pipeline.keep())
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
                    await self._start_broker()
                self._recovered("broker", broker_pid=self.broker.pid)
            except TidingsError as error:
                log.error("the broker does not start: %s", error)

    async def _watch_certificate(self) -> None:
        """Once a day: does the broker's certificate end soon, or was it renewed? The broker takes up the new one."""
        assert self.broker is not None
        shown = self._certificate()
        while True:
            await asyncio.sleep(LOOK_AT_CERTIFICATE)
            try:
                await self._administer("listen", wanted=None)
                if (now := self._certificate()) != shown:
                    shown = now
                    self.broker.reload()
                    log.info("the broker has a new certificate")
            except TidingsError as error:
                log.error("the broker's certificate could not be looked after: %s", error)

    def _certificate(self) -> bytes:
        assert self.broker is not None
        pair = self.broker.config.certificate
        return b"" if pair is None else b"".join(path.read_bytes() for path in pair)

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
            if stuck := _stuck(line):
                await self._restart_broker(stuck)
            said = _said(line)
            if isinstance(said, Breach):
                self.watcher.bar(said)
            elif said is not None:
                self.watcher.heed(said)

    async def _cut(self, breach: Breach) -> None:
        """Take from an agent its posting or its credential; the keys for that are opened by a child."""
        done = await self._administer("bar" if breach.void else "withhold", agent=breach.agent, why=breach.why)
        log.warning("%s may not post %s (%s)", done["name"], breach.why, done["note"])

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
        await self.watcher.close()
        await self.pipeline.stop()
        if self.steward is not None:
            await end_child(self.steward, STEWARD_GRACE)
        if self.broker is not None:
            consumers = len(list(self.home.issued.glob("*.json"))) * 2
            grace = 15 + consumers / 100  # a clean stop writes every consumer's state
            await asyncio.to_thread(self.broker.stop, grace)
        self.disk.give_up()  # nobody needs it now, and a backup is not to hold it
        self.phase("down", broker_pid=None, steward_pid=None)


def _stuck(line: bytes) -> str | None:
    """Why the broker is to be started again, if a line of the steward asks for that."""
    try:
        why = json.loads(line).get("restart_broker")
    except (ValueError, AttributeError):
        return None
    return str(why)[:300] if why else None


def _said(line: bytes) -> Breach | dict[str, Any] | None:
    """What a line of the steward asks for: a cut, or the quota the watcher is to keep."""
    try:
        said = dict(json.loads(line))
        if "quota" in said:
            return dict(said["quota"])
        void = "bar" in said
        asked = said["bar" if void else "withhold"]
        breach = Breach(str(asked["id"]), str(asked["why"])[:150], void)
    except (ValueError, KeyError, TypeError):
        return None
    return breach if is_agent_id(breach.agent) else None
