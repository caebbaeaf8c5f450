"""Errors of a NATS connection, whichever driver it has. Most also inherit the Tidings error that a user sees.

    NatsError
    ├── ConnectionGone     (ConnectionLost) it was lost or closed; what was asked may have happened
    │   ├── NotConnected   there was none when it was asked: nothing was sent
    │   └── Untrusted      (UntrustedServer) the server's certificate is not one that its address trusts
    ├── AuthRefused        (AuthRevoked) the server does not take this credential, or no longer does
    ├── PublishDenied      (DeniedError) the server does not let this user publish there
    ├── Unwritable         (WireError) a subject, header or payload that cannot be sent
    │   └── InvalidAddress (UsageError) a text that is no address of a NATS server
    ├── ProtocolError      (UnreachableError) the other end does not speak NATS, or lies about sizes
    ├── NoResponders       nobody listens on that subject
    ├── ServerComplaint    anything else the server says with -ERR
    └── SlowReader         a subscription dropped messages because nobody took them

A wait that was too long is Python's `TimeoutError`. `ApiError` is an answer of JetStream that says no; `Refusal` is the
one table of what its error codes mean for a publisher.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from tidings.errors import (
    AuthRevoked,
    ConnectionLost,
    DeniedError,
    TidingsError,
    UnreachableError,
    UntrustedServer,
    UsageError,
    WireError,
)

if TYPE_CHECKING:
    from tidings.nats.address import Address

#: what OpenSSL finds wrong with a certificate, by its numbers
NOT_YET, EXPIRED, OTHER_NAME = 9, 10, 62


class NatsError(Exception):
    """The root."""


class ConnectionGone(NatsError, ConnectionLost):
    """The connection was lost or closed; what was asked may have happened."""


class NotConnected(ConnectionGone):
    """There was no connection: nothing was sent."""


class Untrusted(ConnectionGone, UntrustedServer):
    """No server has a certificate that its address trusts: it was told nothing."""

    code = UntrustedServer.code


class AuthRefused(NatsError, AuthRevoked):
    """The server does not take this credential."""

    #: of some servers: did each refuse it, so that there is nobody left who might take it?
    by_all = True


class PublishDenied(NatsError, DeniedError):
    """The server does not let this user publish to that subject."""


class Unwritable(NatsError, WireError):
    """A subject, header or payload that cannot be sent."""


class InvalidAddress(UsageError, Unwritable):
    """A text that is no address of a NATS server."""


class ProtocolError(NatsError, UnreachableError):
    """The other end does not speak NATS, or lies about sizes."""


class NoResponders(NatsError):
    """Nobody listens on that subject."""


class ServerComplaint(NatsError):
    """What the server said with -ERR."""


class SlowReader(NatsError):
    """The buffer of a subscription is full, so messages were dropped."""


def untrusted_words(error: ssl.SSLCertVerificationError) -> str:
    """What is wrong with a server's certificate."""
    clock = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    match error.verify_code:
        case code if code == NOT_YET:
            return f"its certificate is not valid yet: is the clock of this machine right? It says {clock}"
        case code if code == EXPIRED:
            return f"its certificate has expired, or the clock of this machine is wrong: it says {clock}"
        case code if code == OTHER_NAME:
            return "its certificate is another server's or space's"
    return f"its certificate is not by the authority that this address trusts ({error.verify_message})"


def reason(error: Exception) -> str:
    """Why one server did not take us, in words."""
    match error:
        case ssl.SSLCertVerificationError():
            return untrusted_words(error)
        case ssl.SSLError():
            return f"it does not speak TLS as it should ({error.reason or error})"
        case ConnectionRefusedError():
            return "nothing listens there"
        case TimeoutError():
            return "it does not answer"
        case socket.gaierror():
            return f"there is no such name ({error.strerror})"
        case OSError():
            return error.strerror or str(error) or "it hung up"
    return str(error) or type(error).__name__


class ServerFailed(NamedTuple):
    """One server of some that did not take us."""

    words: str
    error: Exception


def failure(address: Address, error: Exception) -> ServerFailed:
    return ServerFailed(f"{address.url}: {reason(error)}", error)


def all_failed(failed: Sequence[ServerFailed]) -> NatsError:
    """No server took us: what each of them said. One that refuses our credential counts more than one that is away."""
    errors = [each.error for each in failed]
    words = "; ".join(each.words for each in failed)
    found: NatsError
    if any(isinstance(error, AuthRefused) for error in errors):
        found = AuthRefused(words)
        found.by_all = all(isinstance(error, AuthRefused) for error in errors)
    elif all(isinstance(error, ssl.SSLCertVerificationError) for error in errors):
        found = Untrusted(words)
    else:
        found = ConnectionGone(words)
    found.__cause__ = errors[-1]
    return found


# --- what JetStream answers ---

#: error codes of nats-server (its `server/errors.json`) for what is not there
NO_CONSUMER, NO_MESSAGE, NO_STREAM = 10014, 10037, 10059
#: and for a message that was not stored
WRONG_LAST_SEQUENCE = 10071
WRITE_UNDER_WAY, ID_UNDER_WAY = 10164, 10158
NO_QUORUM, NOT_LEADER = 10008, 10009
BATCH_INCOMPLETE, BATCH_HAS_DUPLICATE = 10176, 10201
NO_ROOM, MESSAGE_TOO_LARGE = 10077, 10054


class Refusal(Enum):
    """Why a message was not stored. Only an answer says so: without one the outcome is unknown."""

    #: a stream with replicas handles another write of this subject, id or lease; send it again
    BUSY = "busy"
    #: no stream listens, its replicas have no leader, or it has more to store than it buffers; send it again later
    UNAVAILABLE = "unavailable"
    #: the newest record of a subject is not the one that the message expects
    STALE = "stale"
    #: the stream has no room, or the subject has none and the stream may have
    STREAM_FULL = "stream full"
    SUBJECT_FULL = "subject full"
    TOO_LARGE = "too large"
    #: anything else; sending it again does not help
    REJECTED = "rejected"


_REFUSALS = {
    WRITE_UNDER_WAY: Refusal.BUSY,
    ID_UNDER_WAY: Refusal.BUSY,
    NO_QUORUM: Refusal.UNAVAILABLE,
    NOT_LEADER: Refusal.UNAVAILABLE,
    # the leader changed while an atomic batch was on its way
    BATCH_INCOMPLETE: Refusal.UNAVAILABLE,
    WRONG_LAST_SEQUENCE: Refusal.STALE,
    NO_ROOM: Refusal.STREAM_FULL,
    MESSAGE_TOO_LARGE: Refusal.TOO_LARGE,
    # nothing of an atomic batch is stored if the stream has one of its ids
    BATCH_HAS_DUPLICATE: Refusal.REJECTED,
}
_LAST = re.compile(r"wrong last sequence: ([0-9]+)")


class ApiError(TidingsError):
    """The broker answered, and its answer was no."""

    code = "broker_refused"

    def __init__(self, what: str, error: Mapping[str, Any]) -> None:
        #: as in HTTP; 0 if the broker does not say
        self.status = int(error.get("code", 0))
        self.err_code = int(error.get("err_code", self.status))
        self.description = str(error.get("description", ""))
        super().__init__(f"{what}: {self.description} ({self.err_code})")

    @property
    def refusal(self) -> Refusal:
        """What it means for the message that was published."""
        found = _REFUSALS.get(self.err_code)
        if found is Refusal.STREAM_FULL and "per subject" in self.description:
            return Refusal.SUBJECT_FULL
        if found is None and self.status in (429, 503):
            return Refusal.UNAVAILABLE
        return found or Refusal.REJECTED

    @property
    def is_temporary(self) -> bool:
        """Returns whether the same message may be stored a little later."""
        return self.refusal in (Refusal.BUSY, Refusal.UNAVAILABLE)

    @property
    def is_full(self) -> bool:
        return self.refusal in (Refusal.STREAM_FULL, Refusal.SUBJECT_FULL)

    @property
    def found(self) -> int | None:
        """The sequence that the broker found instead of the one a write expected; None if it does not say."""
        said = _LAST.search(self.description) if self.err_code == WRONG_LAST_SEQUENCE else None
        return int(said[1]) if said else None

    def proves_nothing(self, expected: int) -> bool:
        """Was a write refused, and yet may be right? It was not stored, and can be asked again.

        For a write under way; or by a former leader of a stream with replicas, which still has an older record than the
        write expects.
        """
        return self.refusal is Refusal.BUSY or (self.found is not None and self.found < expected)
