"""The stage of the suite: three throw-away agents, a channel of their own, and a view from inside.

`probe-mal` attacks, `probe-vic` is attacked, and `probe-loud` does what an agent is cut for, so that `probe-mal` can go
on. They are provisioned like any agent and revoked at the end, and their channels, named `probe.<random>`, are listed
no more; what they wrote into the log stays there, because a hole in the log would be a fault.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidings.admin.administration import administer
from tidings.admin.agents import AgentFile
from tidings.admin.home import SpaceHome, SpaceInfo
from tidings.contract.admin import IssuedRequest
from tidings.contract.channels import ChangeChannelRequest, ChannelsRequest, JoinRequest
from tidings.contract.mail import DeadLettersRequest, DropLetterRequest
from tidings.errors import WireError
from tidings.model.projection import Table
from tidings.nats import jwt
from tidings.nats.client import connect
from tidings.nats.errors import ApiError
from tidings.nats.jetstream import JetStream
from tidings.nats.jetstream_api import NO_END
from tidings.server.keyring import Keyring
from tidings.server.log import log_record
from tidings.wire import message as wire_message
from tidings.wire import signing
from tidings.wire.envelope import Received, Refused, open_record
from tidings.wire.message import new_id
from tidings.wire.records import REPUBLISH_HEADERS, Headers, split_block
from tidings.wire.subjects import Subjects
from tidings_testing.security.actor import PATIENCE, Actor, acting, line
from tidings_testing.security.watch import Mark, Watch

MAL, VIC, LOUD = "probe-mal", "probe-vic", "probe-loud"


@dataclass
class Stage:
    home: SpaceHome
    info: SpaceInfo
    subjects: Subjects
    js: JetStream
    mal: Actor
    vic: Actor
    loud: Actor
    watch: Watch
    base: str
    nonce: str
    #: the sequence of the frame and of the direct message the victim holds unacknowledged
    frame: int = 0
    direct: int = 0
    #: a sealed block, and its name, which the attacker does not know from a frame
    block: str = field(default_factory=lambda: os.urandom(20).hex())
    sealed: bytes = field(default_factory=lambda: b"sealed " + os.urandom(64))
    #: acknowledgement subject of what the attacker itself holds, by mailbox
    held: dict[int, str] = field(default_factory=dict)
    #: what arrived at the victim's subscriptions
    heard: list[Any] = field(default_factory=list)
    deep: bool = False

    @property
    def channel(self) -> str:
        """Both may read and post."""
        return f"{self.base}.open"

    @property
    def secret(self) -> str:
        """The victim's alone."""
        return f"{self.base}.secret"

    @property
    def role(self) -> str:
        """Both hold it, and nobody else."""
        return _role(self.base)

    @property
    def flood(self) -> int:
        """Requests of one round of a flood."""
        return 25_000 if self.deep else 1_500

    def chat(self, channel: str | None = None, **fields: Any) -> bytes:
        """A chat of the attacker's, marked, as a protocol line."""
        return line(self.subjects.chat(self.mal.id, channel or self.channel), self.marked(), **fields)

    def marked(self) -> bytes:
        return json.dumps({"mark": self.nonce, "id": new_id()}).encode()

    def signed(self, actor: Actor, channel: str, text: str) -> tuple[bytes, list[tuple[str, str]]]:
        """A message any reader would surface, and its headers."""
        payload = wire_message.compose(wire_message.Sender(actor.id, "probe"), text=text).raw
        return payload, [("Td-Sig", signing.sign(actor.key, self.info.id, "chat", channel, payload))]

    async def unchanged(self, before: Mark) -> str | None:
        """What changed, in one line, or None."""
        found = await self.watch.changes(before)
        return "; ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "") if found else None

    def opened(self, message: Any) -> Received | Refused | None:
        """What a reader makes of something that arrived on a live subscription; None if it is no live copy at all."""
        s = self.subjects
        if s.parse_live(message.subject) is None:
            return None
        own, said = split_block(message.block, REPUBLISH_HEADERS)
        try:
            fields = Headers.parse(own).fields
        except WireError as error:
            return Refused("header", str(error))
        if "Nats-Sequence" not in said:
            return Refused("header", "no sequence of the log")
        return open_record(s, self.info.id, message.subject.replace(".live.", ".", 1), fields, message.data)

    async def barrier(self) -> list[Any]:
        """Everything sent so far has reached the victim once this message of the attacker's own has."""
        payload, headers = self.signed(self.mal, self.channel, f"barrier {new_id()}")
        await self.mal.send(line(self.subjects.chat(self.mal.id, self.channel), payload, headers=headers))
        async with asyncio.timeout(PATIENCE):
            while not any(each.data == payload for each in self.heard):
                await asyncio.sleep(0.002)
        return [each for each in self.heard if each.data != payload]


@asynccontextmanager
async def set_stage(home: SpaceHome, cleanup: list[str], *, deep: bool) -> AsyncIterator[Stage]:
    info = home.read_info()
    subjects = info.subjects
    base = f"probe.{os.urandom(6).hex()}"
    await _revoke(home)
    await _check_running(home)
    try:
        creds = await _provision(home, base)
        async with AsyncExitStack() as stack:
            js = await _core(home, info, stack)
            mal = await stack.enter_async_context(acting(info.url, subjects, creds[0]))
            vic = await stack.enter_async_context(acting(info.url, subjects, creds[1]))
            loud = await stack.enter_async_context(acting(info.url, subjects, creds[2]))
            nonce = os.urandom(8).hex()
            key = await _steward_key(js, info)
            watch = Watch(js, subjects, info.id, key, mal=mal.id, vic=vic.id, nonce=nonce)
            stage = Stage(home, info, subjects, js, mal, vic, loud, watch, base, nonce, deep=deep)
            await _prepare_victim(stage)
            yield stage
            await _clear_tasks(stage, cleanup)
            await _clear_block(stage, cleanup)
            await _clear_channels(stage, cleanup)
    finally:
        cleanup += await _revoke(home)


def _role(base: str) -> str:
    return base.replace(".", "-")


async def _check_running(home: SpaceHome) -> None:
    """Raise before anything is written: an agent half added would be completed by the next administrator."""
    async with administer(home, "security suite") as admin:
        await admin.call(IssuedRequest())


async def _provision(home: SpaceHome, base: str) -> list[Path]:
    shared, wild = f"{base}.open", f"{base}.wild.>"
    roles = (_role(base),)
    mal = AgentFile(MAL, description="security suite", read=(shared,), post=(shared, wild), roles=roles)
    mine = (shared, wild, f"{base}.secret")
    vic = AgentFile(VIC, description="security suite", read=mine, post=mine, manage=(f"{base}.>",), roles=roles)
    loud = AgentFile(LOUD, description="security suite", post=(wild,))
    async with administer(home, "security suite") as admin:
        for agent in (mal, vic, loud):
            await admin.add(agent)
    return [home.agent_creds(agent.name) for agent in (mal, vic, loud)]


async def _revoke(home: SpaceHome) -> list[str]:
    """Take the agents away, also those of a suite that was interrupted. Answers what could not be done."""
    left = []
    async with administer(home, "security suite") as admin:
        for name in (MAL, VIC, LOUD):
            try:
                if admin.ledger.active(name):
                    granted = await admin.revoke(name)
                    left += [f"{name}: {granted.note}"] if granted.note else []
                (home.agents / f"{name}.md").unlink(missing_ok=True)
            except Exception as error:  # noqa: BLE001  boundary: the others must still be revoked
                left.append(f"{name} could not be revoked: {error}")
    return left


async def _core(home: SpaceHome, info: SpaceInfo, stack: AsyncExitStack) -> JetStream:
    keyring = Keyring.load(home.keys)
    token, key = keyring.short_lived(keyring.core, "security suite")
    creds = jwt.credentials(token, key)
    connection = await connect(info.url, creds, key.id, name="security suite", reconnect=False)
    stack.push_async_callback(connection.close)
    return JetStream(connection)


async def _steward_key(js: JetStream, info: SpaceInfo) -> str:
    """The key that rules now: rotations are followed from the one in `space.toml`."""
    table = Table(info.subjects, info.id, info.steward_key)
    head = (await js.info(info.subjects.log_stream))["state"]["last_seq"]
    async for page in js.read(info.subjects.log_stream, info.subjects.space_record, 1, head):
        table.apply_all(map(log_record, page))
    return table.steward_key


async def _prepare_victim(stage: Stage) -> None:
    """The victim is a member of its secret channel, listens, and holds one frame and one direct message."""
    s, vic = stage.subjects, stage.vic
    await vic.control.call(JoinRequest(stage.secret))
    await vic.control.call(ChangeChannelRequest(stage.secret, description="probe"))
    await stage.js.publish(s.block(stage.block), stage.sealed)
    stage.frame = await stage.js.publish(s.delivery(vic.id), b"frame for the victim")
    payload = wire_message.compose(wire_message.Sender(vic.id, "probe"), text="direct for the victim").raw
    signature = signing.sign(vic.key, stage.info.id, "dm", vic.id, payload)  # a void one would be told to its sender
    stage.direct = await stage.js.publish(s.direct(vic.id, vic.id), payload, {signing.SIGNATURE_HEADER: signature})

    async def hear(message: Any) -> None:
        stage.heard.append(message)

    for subject in (s.live_chat(stage.channel), s.live_chat(f"{stage.base}.wild.>"), s.live_roster):
        await vic.connection.subscribe(subject, cb=hear)
    for mailbox in stage.watch.mailboxes(vic.id):
        await vic.pull(mailbox, wait=True)
    await vic.connection.flush()


async def _clear_channels(stage: Stage, cleanup: list[str]) -> None:
    """Nobody is in them once the agents are revoked; without settings nobody is shown them."""
    try:
        for row in (await stage.vic.control.call(ChannelsRequest())).channels:
            nothing = ChangeChannelRequest(row.channel, cls=None, description="", listed=False)
            await stage.vic.control.call(nothing)
    except Exception as error:  # noqa: BLE001  boundary: reported, the agents are revoked next
        cleanup.append(f"channels of the probes remain: {error}")


async def _clear_block(stage: Stage, cleanup: list[str]) -> None:
    s = stage.subjects
    try:
        await stage.js.purge(s.block_stream, subject_filter=s.block(stage.block), below=NO_END)
    except Exception as error:  # noqa: BLE001  boundary: reported, the agents are revoked next
        cleanup.append(f"a block of the probes remains: {error}")


async def _clear_tasks(stage: Stage, cleanup: list[str]) -> None:
    """Nobody else holds the role of the probes, so nobody would ever take their tasks or see their dead letters."""
    stream, role = stage.subjects.task_stream, stage.role
    try:
        for actor in (stage.vic, stage.mal):
            for dead in (await actor.control.call(DeadLettersRequest())).dead:
                await actor.control.call(DropLetterRequest(seq=dead.seq))
        await stage.js.purge(stream, subject_filter=f"{stage.subjects.root}.task.{role}.*", below=NO_END)
        with suppress(ApiError):  # no probe of tasks ran
            await stage.js.api(f"CONSUMER.DELETE.{stream}.task_{role}")
    except Exception as error:  # noqa: BLE001  boundary: reported, the agents are revoked next
        cleanup.append(f"tasks of the probes remain: {error}")
