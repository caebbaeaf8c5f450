"""What a client that is not ours might send, and what our endpoint makes of it."""

import json
from pathlib import Path
from typing import Any

import tidings
from tidings.client.connect import connect_directly
from tidings.nats import jwt
from tidings.wire import signing
from tidings.wire.message import new_id
from tidings.wire.signing import KeyPair
from tidings_testing.real_space import AgentClient, RealSpace


def connect(space: RealSpace, name: str, *channels: str, **options: Any) -> tidings.DirectAgent:
    return connect_directly("main", name=name, channels=channels, home=space.home.home, **options)


def bundle_of(space: RealSpace, name: str, folder: Path, url: str | None = None) -> Path:
    """What an agent takes to another machine; `url`: the way there."""
    info, creds = space.info, space.home.agent_creds(name).read_text()
    agent = {"name": name, "id": jwt.split_credentials(creds)[1].id}
    anchors = {"space": info.name, "space_id": info.id, "steward_key": info.steward_key, "url": url or info.url}
    path = folder / f"{name}.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"tidings": 1, **anchors, "agent": agent, "creds": creds}))
    return path


def body(sender: AgentClient | tidings.DirectAgent, text: str = "hello", **changes: object) -> bytes:
    """A message as bytes, changed at will: what a client that is not ours might send."""
    fields: dict[str, object] = {
        "id": new_id(),
        "ts": "2026-01-01T00:00:00.000Z",
        "from": {"id": sender.id, "name": sender.name},
        "parts": [{"kind": "text", "text": text}],
    }
    return json.dumps(fields | changes).encode()


async def surfaced(reader: tidings.DirectAgent, sender: AgentClient, channel: str = "general") -> list[str]:
    """The texts a reader surfaced, up to and including a last good message."""
    await sender.post(channel, body(sender, "end of test"))
    found: list[str] = []
    while not found or found[-1] != "end of test":
        found.append((await reader.next_message(10)).text)
    return found[:-1]


async def write_to(client: AgentClient, target: str, payload: bytes, sign_as: KeyPair | None = None) -> dict[str, Any]:
    """Put signed bytes into a mailbox."""
    signature = signing.sign(sign_as or client.key, client.space_id, "dm", target, payload)
    subject = client.subjects.direct(target, client.id)
    reply = await client.connection.request(subject, payload, timeout=5, headers={"Td-Sig": signature})
    return dict(json.loads(reply.data))


async def ask_for(client: AgentClient, role: str, payload: bytes) -> dict[str, Any]:
    """Put signed bytes into the queue of a role."""
    signature = signing.sign(client.key, client.space_id, "task", role, payload)
    subject = client.subjects.task(role, client.id)
    reply = await client.connection.request(subject, payload, timeout=5, headers={"Td-Sig": signature})
    return dict(json.loads(reply.data))
