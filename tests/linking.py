"""Messages of another space, as a link brings them: made and signed here, and admitted by hand.

    west = OtherSpace()
    await west.link(space, channels={"general": "general"})
    seq = await west.admit(space, west.say("hello"))

The other space is a key and its agents; there is no server of it. Whatever a hostile peer or worker could publish can
be published with `admit`: it says nothing to what it is given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tidings.wire import signing
from tidings.wire.links import origin_fields
from tidings.wire.message import Message, Sender, compose, new_id
from tidings.wire.rulings import Link
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings_testing.real_space import RealSpace


@dataclass(frozen=True)
class Said:
    """A message on its way over a link: what is signed, and what the record will say of it."""

    sender: str
    payload: bytes
    signature: str
    origin: str
    theirs: str
    hops: int = 1

    @property
    def headers(self) -> dict[str, str]:
        return {"Td-Sig": self.signature, **dict(origin_fields(self.origin, self.theirs, self.hops))}

    def but(self, **changes: Any) -> Said:
        return replace(self, **changes)


@dataclass
class OtherSpace:
    """A space that is linked here under `name`."""

    name: str = "west"
    key: KeyPair = field(default_factory=lambda: KeyPair.generate(ACCOUNT))
    ada: KeyPair = field(default_factory=KeyPair.generate)

    @property
    def id(self) -> str:
        return self.key.id

    def message(self, text: str, *, key: KeyPair | None = None, name: str = "ada", **fields: Any) -> Message:
        return compose(Sender((key or self.ada).id, name), text=text, **fields)

    def say(self, text: str, theirs: str = "general", *, key: KeyPair | None = None, **fields: Any) -> Said:
        message = self.message(text, key=key, **fields)
        return self.signed(message, theirs, key=key)

    def signed(self, message: Message, theirs: str = "general", *, key: KeyPair | None = None) -> Said:
        signer = key or self.ada
        signature = signing.sign(signer, self.id, "chat", theirs, message.raw)
        return Said(signer.id, message.raw, signature, self.id, theirs)

    def record(self, link: str = "west", state: str = "on", **fields: Any) -> Link:
        given: dict[str, Any] = {"origin": self.id, "space": self.name, "channels": {"general": "general"}}
        return Link(op=new_id(), link=link, state=state, **(given | fields))  # type: ignore[arg-type]

    async def link(self, space: RealSpace, link: str = "west", state: str = "on", **fields: Any) -> int:
        """Have the steward write the link record; its sequence."""
        return await rule(space, self.record(link, state, **fields))

    async def admit(self, space: RealSpace, said: Said, channel: str = "general", link: str = "west") -> int:
        return await admit(space, said, channel, link)


async def rule(space: RealSpace, record: Link) -> int:
    assert space.steward is not None
    async with space.steward.writer.lock:
        return await space.steward.writer.write(space.subjects.link(record.link), record)


async def admit(space: RealSpace, said: Said, channel: str = "general", link: str = "west", **headers: str) -> int:
    """Publish it as the link's worker does, whatever it is; the sequence it was stored at."""
    async with space.core() as js:
        reply = await js.connection.request(
            space.subjects.via(link, said.sender, channel), said.payload, timeout=5, headers=said.headers | headers
        )
    answer = json.loads(reply.data)
    assert "error" not in answer, answer
    return int(answer["seq"])
