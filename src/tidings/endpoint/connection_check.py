"""Step by step from an agent's address to an answer of its steward: which step fails, in words, and what to do.

    name -> port -> TLS -> greeting -> credential -> steward -> clock

A step is tried only if those before it went well. Nothing is changed, no session is taken, and nobody is disturbed: an
agent that receives meanwhile goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tidings.broker.client import connect
from tidings.broker.jwt import decode
from tidings.endpoint.identity import Identity
from tidings.errors import AuthRevoked, TidingsError
from tidings.nats.address import Address, parse_addresses
from tidings.nats.errors import untrusted_words
from tidings.space.control import ControlClient

#: seconds for each step
PATIENCE = 5.0
#: seconds by which two clocks may differ before it is said, and before tokens and certificates are in danger
CLOCK_NOTED, CLOCK_WRONG = 2.0, 3_600.0


@dataclass(frozen=True, slots=True)
class Step:
    what: str
    verdict: Literal["ok", "note", "problem"]
    said: str
    do: str = ""


async def check_connection(identity: Identity) -> AsyncIterator[Step]:
    """Every step; the last one is the first that is a problem."""
    reached = 0
    for address in parse_addresses(identity.url):
        failed = False
        async for step in _in_thread(_reach(address)):
            yield step
            failed = failed or step.verdict == "problem"
        reached += not failed
    if reached:
        async for step in _ask(identity):
            yield step


async def _in_thread(steps: Iterator[Step]) -> AsyncIterator[Step]:
    """Sockets block; whoever waits for them does not hold up the loop."""
    while (step := await asyncio.to_thread(next, steps, None)) is not None:
        yield step


# --- to the broker, with nothing in hand ---


def _reach(address: Address) -> Iterator[Step]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Step("name", "problem", f"{address.host} is no name that this machine can look up ({error})", DNS)
        return
    numbers = sorted({str(each[4][0]) for each in found})
    yield Step("name", "ok", address.host if numbers == [address.host] else f"{address.host} is {', '.join(numbers)}")
    started = time.monotonic()
    try:
        plain = socket.create_connection((address.host, address.port), PATIENCE)
    except OSError as error:
        yield Step("port", "problem", f"{address}: {_why_not(error)}", PORT)
        return
    with plain:
        yield Step("port", "ok", f"{address} is open, {_ms(started)}")
        yield from _greet(address, plain)


def _greet(address: Address, plain: socket.socket) -> Iterator[Step]:
    sock = plain
    try:
        if address.tls_first:
            sock = address.context().wrap_socket(plain, server_hostname=address.server_name)
            yield _shown_certificate(address, sock)
        greeting = _line(sock)
        if address.tls and not address.tls_first:
            sock = address.context().wrap_socket(plain, server_hostname=address.server_name)
            yield _shown_certificate(address, sock)
    except ssl.SSLCertVerificationError as error:
        yield Step("TLS", "problem", untrusted_words(error), CERTIFICATE)
        return
    except ssl.SSLError as error:
        yield Step("TLS", "problem", f"{address} does not speak TLS as it should: {error.reason or error}", NOT_TLS)
        return
    except OSError as error:
        silent = f"{address} says nothing: {'it may want TLS' if not address.tls else _why_not(error)}"
        yield Step("greeting", "problem", silent, NOT_NATS if address.tls else OLD_BUNDLE)
        return
    finally:
        sock.close()
    if not greeting and not address.tls:
        yield Step("greeting", "problem", f"{address} says nothing: it may want TLS", OLD_BUNDLE)
        return
    if not greeting.startswith(b"INFO "):
        yield Step("greeting", "problem", f"what listens at {address} is no NATS server", NOT_NATS)
        return
    info = json.loads(greeting[5:])
    if info.get("tls_required") and not address.tls:
        yield Step("greeting", "problem", "the server wants TLS, and this address is without", OLD_BUNDLE)
        return
    yield Step("greeting", "ok", f"nats-server {info.get('version')}")


def _shown_certificate(address: Address, sock: ssl.SSLSocket) -> Step:
    ends = str((sock.getpeercert() or {}).get("notAfter"))
    authority = address.authority
    trusted = "the system's roots" if authority is None else f"authority {hashlib.sha256(authority).hexdigest()[:16]}"
    return Step("TLS", "ok", f"{sock.version()}, {address.server_name} by {trusted}, until {ends}")


def _line(sock: socket.socket) -> bytes:
    sock.settimeout(PATIENCE)
    with sock.makefile("rb") as file:
        return file.readline(65_536)


# --- with the credential ---


async def _ask(identity: Identity) -> AsyncIterator[Step]:
    try:
        text = identity.credentials()
        expires = decode(identity.token()).get("exp")
        connection = await connect(identity.url, text, identity.id, name=identity.name, reconnect=False)
    except AuthRevoked:
        ended = expires is not None and expires < time.time()
        why = "its token has expired" if ended else "revoked, replaced by a newer key, or of another space"
        yield Step("credential", "problem", f"the broker refuses agent {identity.name}: {why}", CREDENTIAL)
        return
    except TidingsError as error:
        yield Step("credential", "problem", str(error), CREDENTIAL)
        return
    try:
        yield Step("credential", "ok", f"the broker takes agent {identity.name} ({identity.id})")
        started = time.monotonic()
        control = ControlClient(connection, identity.subjects, identity.id, PATIENCE)
        try:
            answer = await control.call("health", "ping")
        except TidingsError as error:
            yield Step("steward", "problem", str(error), STEWARD)
            return
        yield Step("steward", "ok", f"the steward answers, {_ms(started)}")
        yield _compare_clocks(str(answer["at"]), started)
    finally:
        await connection.close()


def _compare_clocks(at: str, asked: float) -> Step:
    there = datetime.fromisoformat(at).timestamp() + (time.monotonic() - asked) / 2
    ahead = time.time() - there
    said = f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the space's"
    if abs(ahead) < CLOCK_NOTED:
        return Step("clock", "ok", "this machine's clock and the space's agree")
    if abs(ahead) < CLOCK_WRONG:
        return Step("clock", "note", said, "times in what you see are off by as much; set one of the clocks")
    return Step("clock", "problem", said, "set it: certificates and tokens are judged by it")


def _ms(started: float) -> str:
    return f"{(time.monotonic() - started) * 1000:.1f} ms"


def _why_not(error: OSError) -> str:
    match error:
        case TimeoutError():
            return f"no answer within {PATIENCE:.0f} s: a firewall, or a machine that is off"
        case ConnectionRefusedError():
            return "the machine answers, and nothing listens there"
    return error.strerror or str(error)


DNS = "is the name right? An address does as well"
PORT = "is the space up, with `--listen` if it is on another machine, and is the port open in its firewall?"
CERTIFICATE = "mend the clock, start the space again if it ended, or take a new bundle (`tidings agent export`)"
NOT_TLS = "something else listens there, or somebody is in between; nothing was told to it"
NOT_NATS = "is it the right port? `tidings status` on the machine of the space shows it"
OLD_BUNDLE = "if the space listens now, take a new bundle (`tidings agent export`); else, is it the right port?"
CREDENTIAL = "`tidings agent export` it again where the space runs, or `tidings agent add` if it was revoked"
STEWARD = "`tidings status` and `tidings logs steward` where the space runs"
