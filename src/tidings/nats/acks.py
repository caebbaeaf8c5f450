"""Acknowledgement subjects: what the broker says about a delivery in the reply of the message it delivers.

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>                       9 tokens
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<seq>.<seq>.<time>.<pending>[.<token>]         11 or more

Only read here: an acknowledgement is published to the reply exactly as it came.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidings.wire.records import Headers

#: seconds after which an unacknowledged delivery comes again
ACK_WAIT = 30.0
ACK, NAK, IN_PROGRESS, TERM = b"+ACK", b"-NAK", b"+WPI", b"+TERM"


@dataclass(frozen=True, slots=True)
class DeliveryInfo:
    """One delivery of one record."""

    reply: str
    stream: str
    consumer: str
    #: 1 the first time
    count: int
    seq: int
    time_ns: int
    pending: int


def handed_out(status: Headers, batch: int) -> int:
    """How many messages were handed to a pull of so many that the broker says is over.

    Replicas agree on a delivery before it is sent: the word that a pull is over may come before what was handed to it.
    """
    said = status.last("Nats-Pending-Messages") or ""
    return batch - int(said) if said.isascii() and said.isdigit() else 0


def parse_delivery(reply: str) -> DeliveryInfo | None:
    """The delivery a reply subject speaks of; None if it is none, and then the message is a word of the server."""
    tokens = reply.split(".")
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) < 9 or len(tokens) == 10:
        return None
    fields = tokens[2:9] if len(tokens) == 9 else tokens[4:11]
    stream, consumer, *numbers = fields
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    count, seq, _, time_ns, pending = map(int, numbers)
    return DeliveryInfo(reply, stream, consumer, count, seq, time_ns, pending)
