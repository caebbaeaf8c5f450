"""What can go wrong on a NATS connection, whichever driver it has. Most are also what they mean to a user.

    NatsError
    ├── ConnectionGone     (ConnectionLost) it was lost or closed; what was asked may have happened
    │   ├── NotConnected   there was none when it was asked: nothing was sent
    │   └── Untrusted      (UntrustedServer) the server's certificate is not one that its address trusts
    ├── AuthRefused        (AuthRevoked) the server does not take this credential, or no longer does
    ├── PublishDenied      (DeniedError) the server does not let this user publish there
    ├── Unwritable         (WireError) a subject, header or payload that cannot be sent
    ├── ProtocolError      (UnreachableError) the other end does not speak NATS, or lies about sizes
    ├── NoResponders       nobody listens on that subject
    ├── ServerComplaint    anything else the server says with -ERR
    └── SlowReader         a subscription dropped messages because nobody took them

A wait that was too long is Python's `TimeoutError`.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidings.errors import AuthRevoked, ConnectionLost, DeniedError, UnreachableError, UntrustedServer, WireError

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


class ProtocolError(NatsError, UnreachableError):
    """The other end does not speak NATS, or lies about sizes."""


class NoResponders(NatsError):
    """Nobody listens on that subject."""


class ServerComplaint(NatsError):
    """What the server said with -ERR."""


class SlowReader(NatsError):
    """A subscription has more waiting for it than it may."""


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
