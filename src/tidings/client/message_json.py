"""Messages, tasks and results as JSON, written and read back: one spelling for the host, its clients and `--json`.

`read_message(message_json(incoming))` is the same message in every field that a program sees but two: `raw` is written
anew from the parts, and what settling does is for whoever reads it to say. Who sent something is a verified id and the
name of its access record; a message that says another name only claims it. What was said in another space has the name
of that space as `origin`, and its sender is `name@space`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from tidings.client.incoming import Incoming
from tidings.client.tasks import Job, TaskResult
from tidings.contract.host import HeldTask, MessageSender, TaskStateAnswer, VerifiedMessage
from tidings.wire import message as wire
from tidings.wire import strict_json
from tidings.wire.message import Mention, Message, Sender, TextPart

Json = dict[str, Any]
#: what is said of every message, in the order in which `--json` prints it
SAID = ("kind", "channel", "from", "text", "id", "seq", "time", "priority", "mentions", "reply_to", "context", "origin")


def to_json(answer: Any) -> Json:
    """Returns an answer as plain JSON values."""
    return dict(msgspec.to_builtins(answer))


def moment(milliseconds: int | None) -> str | None:
    """RFC 3339 in UTC with three decimals."""
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")


def message_sender(agent_id: str, name: str, claimed: str | None) -> MessageSender:
    return MessageSender(agent_id, name, None if claimed == name else claimed)


def sender_json(agent_id: str, name: str, claimed: str | None) -> Json:
    return to_json(message_sender(agent_id, name, claimed))


def content_json(message: Message, mentioned: Iterable[Mention]) -> Json:
    """What a message says, whoever shows it."""
    fields = wire.document(message)
    who = list(mentioned)
    return {
        "parts": fields["parts"],
        "mentions": [each.name for each in who],
        "mention_ids": [each.id for each in who],
        "ts": message.ts,
        "role": message.sender.role,
        "priority": message.priority,
        "reply_to": message.reply_to,
        "context": message.context,
    }


def verified_message(incoming: Incoming) -> VerifiedMessage:
    """Returns a message of a channel's history, or one that came."""
    return VerifiedMessage(
        id=incoming.id,
        kind=incoming.kind,
        channel=incoming.channel,
        sender=message_sender(incoming.sender.id, incoming.sender.name, incoming.claims),
        text=incoming.text,
        **content_json(incoming.message, incoming.mentions),
        mentions_me=incoming.mentions_me,
        wakes=incoming.wakes,
        historical=incoming.historical,
        sealed=incoming.sealed,
        origin=incoming.origin or None,
        origin_id=incoming.origin_id or None,
        seq=incoming.seq,
        time=moment(incoming.time_ns // 1_000_000),
    )


def message_json(incoming: Incoming) -> Json:
    return to_json(verified_message(incoming))


def read_message(found: Json) -> Incoming:
    """The message in an answer of the host. Its times are whole milliseconds."""
    writer = found["from"]
    mentions = tuple(
        Mention(key, name) for key, name in zip(found.get("mention_ids", ()), found["mentions"], strict=False)
    )
    message = _message(found, mentions)
    when = datetime.fromisoformat(found["time"])
    return Incoming(
        kind=found["kind"],
        sender=Sender(writer["id"], writer["name"], message.sender.role),
        message=message,
        channel=found["channel"],
        seq=found["seq"],
        time_ns=round(when.timestamp() * 1000) * 1_000_000,
        historical=bool(found.get("historical")),
        sealed=bool(found.get("sealed")),
        mentions_me=bool(found["mentions_me"]),
        wakes=bool(found.get("wakes", True)),
        claims=writer.get("claims"),
        mentions=mentions,
        origin=found.get("origin") or "",
        origin_id=found.get("origin_id") or "",
    )


def _message(found: Json, mentions: tuple[Mention, ...]) -> Message:
    """Not checked again: the host verified it when it came, and shows it under names that were never on the wire."""
    writer, origin = found["from"], found.get("origin")
    named = writer["name"].removesuffix(f"@{origin}") if origin else writer["name"]
    message = Message(
        id=found["id"],
        ts=found.get("ts") or wire.timestamp(datetime.fromisoformat(found["time"])),
        sender=Sender(writer["id"], writer.get("claims") or named, found.get("role")),
        # without parts it is sealed for a key that the host does not have: its text says so
        parts=wire.read_parts(found["parts"]) or (TextPart(found["text"]),),
        priority=found["priority"],
        mentions=mentions,
        reply_to=found["reply_to"],
        context=found["context"],
    )
    return msgspec.structs.replace(message, raw=strict_json.write(wire.document(message)))


# --- tasks ---


def task_in_hands(job: Job) -> HeldTask:
    """Returns a task in a program's hands; its id is that of the message that asked for it."""
    return HeldTask(
        id=job.message.id,
        seq=job.seq,
        role=job.role,
        attempt=job.attempt,
        deadline=job.deadline,
        asker=message_sender(job.asker.id, job.asker.name, job.claims),
        # of a task of a linked space: what that is called here, and its id
        origin=job.asker.name.partition("@")[2] if job.origin else "",
        origin_id=job.origin,
        text=job.text,
        parts=wire.document(job.message)["parts"],
        message=_opened(job.message),
    )


def job_json(job: Job) -> Json:
    return to_json(task_in_hands(job))


def task_state(message_id: str, result: TaskResult) -> TaskStateAnswer:
    return TaskStateAnswer(
        id=message_id,
        state=result.state,
        text=result.text,
        worker=result.worker_name or result.worker,
        worker_id=result.worker,
        attempt=result.attempt,
        cause=result.cause,
        reasons=result.reasons,
        message=_opened(result.message) if result.message else None,
    )


def result_json(message_id: str, result: TaskResult) -> Json:
    return to_json(task_state(message_id, result))


def _opened(message: Message) -> Json:
    """A message as it travelled, with what was sealed in it."""
    return {**json.loads(message.raw), **wire.document(message)}


def read_result(found: TaskStateAnswer) -> TaskResult:
    return TaskResult(
        state=found.state,
        message=None if found.message is None else read_document(found.message),
        worker=found.worker_id,
        worker_name=found.worker,
        cause=found.cause,
        attempt=found.attempt,
        reasons=found.reasons,
    )


def read_document(document: Json) -> Message:
    """A message from the JSON object it travels as."""
    return wire.decode(strict_json.write(document))
