"""What can go wrong on a NATS connection, whichever driver it has. Most are also what they mean to a user.

    NatsError
    ├── ConnectionGone     (ConnectionLost) it was lost or closed; what was asked may have happened
    │   └── NotConnected   there was none when it was asked: nothing was sent
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

from tidings.errors import AuthRevoked, ConnectionLost, DeniedError, UnreachableError, WireError


class NatsError(Exception):
    """The root."""


class ConnectionGone(NatsError, ConnectionLost):
    """The connection was lost or closed; what was asked may have happened."""


class NotConnected(ConnectionGone):
    """There was no connection: nothing was sent."""


class AuthRefused(NatsError, AuthRevoked):
    """The server does not take this credential."""


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
