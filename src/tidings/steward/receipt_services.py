"""`ctl.receipt`: readers tell, senders ask or watch.

A receipt counts only if the record it speaks of is addressed to whoever sends it. Only the sender of a message can
wait for its receipts, or watch them. Every request is answered: at once if there is no room to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.errors import DeniedError, UsageError
from tidings.steward.agent_handlers import Answer, Handler, access_of
from tidings.steward.receipts import RANK, Key, reached
from tidings.steward.requests import Request
from tidings.wire.ids import is_message_id
from tidings.wire.names import check_agent_id
from tidings.wire.operations import RECEIPT_WAIT

if TYPE_CHECKING:
    from tidings.steward.service import Steward

READER_STAGES = ("delivered", "read")
MOST_RECEIPTS = 512
#: records looked up at the same time for one request
AT_ONCE = 32
LONGEST_WAIT = RECEIPT_WAIT


class Told(NamedTuple):
    """One receipt as its reader tells it. `of` is the sender and id it speaks of, if the reader says so."""

    seq: int
    stage: str
    of: tuple[str, str] | None


async def put(steward: Steward, request: Request) -> Answer:
    """`receipts`: [{seq, stage}], or one `seq` and `stage`. What is not addressed to the caller is refused.

    Who tells late adds `sender` and `id`: a message whose record has gone is known by them if it was told of before,
    and a sequence that was used again for another message is not taken for it.
    """
    access_of(steward, request.sender)
    if request.arguments.get("stream", "dm") != "dm":
        raise UsageError("receipts are for direct messages: `stream` is dm")
    single = "seq" in request.arguments
    told = _told([request.arguments] if single else request.arguments.get("receipts"))
    await steward.receipts.ready()
    accepted: list[tuple[Key, int, str]] = []
    refused: list[int] = []
    with steward.receipts.telling(request.sender):
        keys = await _addressed(steward, {each.seq for each in told if _known(steward, request, each) is None})
    for each in told:
        known = _known(steward, request, each)
        key = known or keys.get(each.seq)
        if key is None or key[2] != request.sender or (each.of is not None and key[:2] != each.of):
            refused.append(each.seq)
        else:
            accepted.append((key, steward.receipts.lives[key].seq if known else each.seq, each.stage))
    if single and refused:
        raise DeniedError(f"the direct message {refused[0]} is not addressed to you, or is gone")
    return {"new": await steward.receipts.write(accepted), "refused": refused}


def _known(steward: Steward, request: Request, told: Told) -> Key | None:
    """The message by what was told of it before."""
    key = (*told.of, request.sender) if told.of is not None else None
    return key if key in steward.receipts.lives else None


async def _addressed(steward: Steward, seqs: set[int]) -> dict[int, Key | None]:
    """To whom each of these is addressed, a few reads at a time: a batch must not take a round trip for each."""
    found: dict[int, Key | None] = {}
    wanted = sorted(seqs)
    for start in range(0, len(wanted), AT_ONCE):
        part = wanted[start : start + AT_ONCE]
        found |= zip(part, await asyncio.gather(*map(steward.receipts.addressed, part)), strict=True)
    return found


def _told(items: Any) -> list[Told]:
    if not isinstance(items, list) or not 0 < len(items) <= MOST_RECEIPTS:
        raise UsageError(f"receipt put needs `receipts`, a list of 1 to {MOST_RECEIPTS}")
    return [_one_told(item if isinstance(item, dict) else {}) for item in items]


def _one_told(item: Mapping[str, Any]) -> Told:
    seq, stage = item.get("seq"), item.get("stage")
    if type(seq) is not int or seq < 1 or stage not in READER_STAGES:
        raise UsageError(f"a receipt has `seq` and `stage`, one of {', '.join(READER_STAGES)}")
    sender, mid = item.get("sender"), item.get("id")
    of = (sender, mid) if isinstance(sender, str) and isinstance(mid, str) else None
    if of is None and (sender is not None or mid is not None):
        raise UsageError("a receipt that names its message has `sender` and `id`, both texts")
    return Told(seq, str(stage), of)


async def wait(steward: Steward, request: Request) -> Answer:
    """Wait for a receipt of a message of the caller's own: the key begins with who asks, so nobody sees another's."""
    access_of(steward, request.sender)
    key = (request.sender, message_id(request), check_agent_id(request.text("to")))
    stage = request.arguments.get("stage", "delivered")
    if stage not in RANK or RANK[stage] < 0:
        raise UsageError(f"stages are {', '.join(name for name in RANK if RANK[name] >= 0)}")
    receipts = steward.receipts
    await receipts.ready()
    found = receipts.stage_of(key) or await _stored_stage(steward, request, key)
    if not reached(found, stage):
        found = await receipts.wait(key, stage, _seconds(request)) or found
    life = receipts.lives.get(key)
    stages, why = (dict(life.stages), life.why) if life else ({}, "")
    return {"stage": found, "reached": reached(found, stage), "stages": stages, "why": why}


async def _stored_stage(steward: Steward, request: Request, key: Key) -> str:
    """`confirmed` if the record is where the caller says; without a place nothing is searched for."""
    seq = request.optional("seq", int)
    return "confirmed" if seq and await steward.receipts.addressed(seq) == key else "unknown"


async def watch(steward: Steward, request: Request) -> Answer:
    """Receipts of the caller's own messages newer than `since`, waiting for the first.

    `cursor` is the next `since`. `waited` false: too many wait already, so ask again later, not at once.
    """
    access_of(steward, request.sender)
    since = request.optional("since", int) or 0
    receipts = steward.receipts
    await receipts.ready()
    if since > receipts.newest:
        since = 0  # counted by another steward while AUD was full
    news, waited = await receipts.watch(request.sender, since, _seconds(request))
    told = [
        {
            "id": each.key[1],
            "to": each.key[2],
            "seq": each.seq,
            "stage": each.stage,
            "at": each.at,
            **({"why": each.why, "channel": each.channel} if each.why else {}),
        }
        for each in news
    ]
    return {"news": told, "cursor": max(since, receipts.newest if not news else news[-1].n), "waited": waited}


def _seconds(request: Request) -> float:
    value = request.arguments.get("timeout", request.arguments.get("wait", LONGEST_WAIT))
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UsageError("receipt wait: `timeout` is a number of seconds")
    return min(float(value), LONGEST_WAIT)


async def room(steward: Steward, request: Request) -> Answer:
    """Make room in a mailbox that is full of what the caller sent and its target has read."""
    access_of(steward, request.sender)
    return {"made": await steward.mail.make_room(request.sender, check_agent_id(request.text("to")))}


def message_id(request: Request) -> str:
    mid = request.text("id")
    if not is_message_id(mid):
        raise UsageError(f"{mid[:64]!r} is not a message id")
    return mid


RECEIPT_HANDLERS: dict[tuple[str, str], Handler] = {
    ("receipt", "put"): put,
    ("receipt", "wait"): wait,
    ("receipt", "watch"): watch,
    ("receipt", "room"): room,
}
