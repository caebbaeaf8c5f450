"""How we open a connection to a space's broker, and what it means when there is none.

It adds no retry policy beyond reconnecting where that is asked for; who holds a connection decides what to do when it
is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from tidings.errors import AuthRevoked, BrokerUnreachable, UnreachableError, UntrustedServer
from tidings.nats import aio
from tidings.nats.address import shown
from tidings.nats.aio import Callbacks, Connection
from tidings.nats.core import Auth, Msg
from tidings.nats.jwt import signed, split_credentials
from tidings.util.private_files import check_private, read_private
from tidings.wire.records import Headers

__all__ = ["TOO_MANY_SUBSCRIPTIONS", "Connection", "close_quietly", "connect", "status_of"]

#: what the broker says of a subscription beyond what a connection may have; it is not there, and all others are
TOO_MANY_SUBSCRIPTIONS = "maximum subscriptions exceeded"


def status_of(message: Msg) -> Headers | None:
    """The block of a word from the server itself (it has a status), or None for a message."""
    return None if message.status is None else Headers.parse(message.block)


async def connect(
    url: str | Callable[[], str],
    creds: Path | str,
    user_id: str,
    *,
    name: str,
    reconnect: bool = True,
    timeout: float = 5.0,
    **callbacks: Unpack[Callbacks],
) -> Connection:
    """Open a connection whose replies arrive in this user's own inbox.

    `creds` is a creds file (0600, checked), which is read again at every attempt, or its text for a user that lives
    only in this process. A function for `url` is asked at every attempt too.
    """
    if isinstance(creds, Path):
        check_private(creds)

    def auth() -> Auth:
        return signed(*split_credentials(read_private(creds) if isinstance(creds, Path) else creds))

    at = url() if callable(url) else url
    try:
        return await aio.connect(
            url,
            auth=auth,
            name=name,
            inbox=f"_INBOX_{user_id}",
            reconnect=reconnect,
            timeout=timeout,
            **callbacks,
        )
    except AuthRevoked as error:
        raise AuthRevoked(
            f"the broker at {shown(at)} refuses {name}: revoked, expired or not of this space"
            + (f" ({error})" if "," in at else "")
        ) from error
    except UntrustedServer as error:
        raise UntrustedServer(f"{shown(at)} is not trusted, and was told nothing: {error}") from error
    except UnreachableError as error:
        raise BrokerUnreachable(f"no broker answers at {error}; {_advice(at)}") from error


def _advice(url: str) -> str:
    if url.startswith(("tls://", "wss://")):
        return "is the space running, and can this machine reach it? (`tidings doctor connection`)"
    return "is the space running? (`tidings up`; a NATS that others run is theirs to start)"


async def close_quietly(connection: Connection) -> None:
    """Close; it is bounded in time and does not fail, whether the broker is there or not."""
    await connection.close()
