"""Step by step from an agent's address to an answer of its steward: which step fails, in words, and what to do.

    name -> port [-> proxy] -> TLS [-> websocket] -> greeting -> credential -> steward -> clock

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
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from tidings.admin.identity import Identity
from tidings.contract.agents import AccessRequest, HealthRequest
from tidings.errors import AuthRevoked, DeniedError, TidingsError
from tidings.nats.address import Address, parse_addresses
from tidings.nats.client import connect
from tidings.nats.errors import NatsError, untrusted_words
from tidings.nats.jwt import decode
from tidings.nats.proxy import END, MAX_ANSWER, Proxy, check_tunnel, proxy_for, tunnel_request
from tidings.rpc.control import ControlClient

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
    """Every step; the last one is the first that is a problem. One of several servers is enough: of the others it is
    noted what they lack."""
    addresses = parse_addresses(identity.url)
    tried = [[step async for step in _in_thread(_reach(address))] for address in addresses]
    reached = [steps[-1].verdict != "problem" for steps in tried]
    for address, steps in zip(addresses, tried, strict=True):
        for step in steps:
            verdict = "note" if step.verdict == "problem" and any(reached) else step.verdict
            said = step.said if len(addresses) == 1 else f"{address.url}: {step.said}"
            yield replace(step, verdict=verdict, said=said)
    if any(reached):
        async for step in _ask(identity):
            yield step


async def _in_thread(steps: Iterator[Step]) -> AsyncIterator[Step]:
    """Sockets block; whoever waits for them does not hold up the loop."""
    while (step := await asyncio.to_thread(next, steps, None)) is not None:
        yield step


# --- to the broker, with nothing in hand ---


def _reach(address: Address) -> Iterator[Step]:
    try:
        proxy = proxy_for(address)
    except NatsError as error:
        yield Step("proxy", "problem", str(error), PROXY)
        return
    to = f"the proxy {proxy}" if proxy else str(address)
    host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield Step("name", "problem", f"{host} is no name that this machine can look up ({error})", DNS)
        return
    numbers = sorted({str(each[4][0]) for each in found})
    yield Step("name", "ok", host if numbers == [host] else f"{host} is {', '.join(numbers)}")
    started = time.monotonic()
    try:
        plain = socket.create_connection((host, port), PATIENCE)
    except OSError as error:
        yield Step("port", "problem", f"{to}: {_why_not(error)}", PROXY if proxy else PORT)
        return
    with plain:
        yield Step("port", "ok", f"{to} is open, {_ms(started)}")
        step = _tunnel(proxy, address, plain) if proxy else None
        if step is not None:
            yield step
        if step is None or step.verdict == "ok":
            yield from _greet(address, plain)


def _tunnel(proxy: Proxy, address: Address, plain: socket.socket) -> Step:
    answer = b""
    try:
        plain.sendall(tunnel_request(proxy, address))
        while END not in answer and len(answer) < MAX_ANSWER and (more := plain.recv(MAX_ANSWER)):
            answer += more
        check_tunnel(proxy, answer)
    except (NatsError, OSError) as error:
        return Step("proxy", "problem", _why_not(error) if isinstance(error, OSError) else str(error), PROXY)
    return Step("proxy", "ok", f"{proxy} lets us through to {address}")


def _upgrade(address: Address, sock: socket.socket) -> Generator[Step, None, bytes | None]:
    """Ask for a websocket. Answers what comes through it up to the end of a line; None if there is none."""
    from tidings.nats.websocket import WebSocketStream

    stream, heard, told = WebSocketStream(address), b"", False
    sock.settimeout(PATIENCE)
    try:
        while b"\n" not in heard and not stream.ended:
            sock.sendall(stream.to_send())
            if not (data := sock.recv(65_536)):
                stream.at_end()
                break
            heard += b"".join(stream.receive(data))
            if stream.is_open and not told:
                told = True
                yield Step("websocket", "ok", f"{address.url} takes it")
    except (NatsError, OSError) as error:
        said = _why_not(error) if isinstance(error, OSError) else str(error)
        yield Step("websocket", "problem", said, WEBSOCKET)
        return None
    return heard


def _greet(address: Address, plain: socket.socket) -> Iterator[Step]:
    sock = plain
    try:
        if address.tls_first:
            sock = address.context().wrap_socket(plain, server_hostname=address.server_name)
            yield _shown_certificate(address, sock)
        greeting = (yield from _upgrade(address, sock)) if address.websocket else _line(sock)
        if greeting is None:
            return
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
        hangs = isinstance(error, TimeoutError)
        why = f"within {PATIENCE:.0f} s: it hangs" if hangs else f"({_why_not(error)})"
        silent = f"{address} is open and says nothing {why}{'' if address.tls else ', or it wants TLS'}"
        yield Step("greeting", "problem", silent, f"{HANGS}; {NOT_NATS if address.tls else OLD_BUNDLE}")
        return
    finally:
        sock.close()
    if not greeting and not address.tls:
        yield Step("greeting", "problem", f"{address} says nothing: it may want TLS", OLD_BUNDLE)
        return
    info = _info(greeting)
    if info is None:
        yield Step("greeting", "problem", f"what listens at {address} is no NATS server", NOT_NATS)
        return
    if info.get("tls_required") and not address.tls:
        yield Step("greeting", "problem", "the server wants TLS, and this address is without", OLD_BUNDLE)
        return
    yield Step("greeting", "ok", f"nats-server {info.get('version')}")


def _info(greeting: bytes) -> dict[str, Any] | None:
    """What a NATS server says of itself first; None if it is none."""
    if not greeting.startswith(b"INFO "):
        return None
    try:
        return dict(json.loads(greeting[5:].partition(b"\n")[0]))
    except (ValueError, TypeError):
        return None


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
        assert connection.address is not None
        by = f" at {connection.address.url}" if "," in identity.url else ""
        yield Step("credential", "ok", f"the broker{by} takes agent {identity.name} ({identity.id})")
        started = time.monotonic()
        control = ControlClient(connection, identity.subjects, identity.id, PATIENCE)
        try:
            answer = await control.call(HealthRequest())
            await control.call(AccessRequest())
        except DeniedError as error:  # its token holds a little longer than its place in the space
            yield Step("steward", "problem", f"the steward refuses agent {identity.name}: {error}", CREDENTIAL)
            return
        except TidingsError as error:
            yield Step("steward", "problem", str(error), STEWARD)
            return
        yield Step("steward", "ok", f"the steward answers, {_ms(started)}")
        yield _compare_clocks(answer.at, started)
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
PROXY = "HTTPS_PROXY names it and NO_PROXY says what goes without: ask whoever runs that network for its right name"
WEBSOCKET = "is it the port of `tidings up --ws ADDR`? A proxy in front of it must pass websockets on"
CERTIFICATE = "mend the clock, start the space again if it ended, or take a new bundle (`tidings agent export`)"
NOT_TLS = "something else listens there, or somebody is in between; nothing was told to it"
HANGS = "does the server stand still? `tidings status` where the space runs tells, and its log"
NOT_NATS = "is it the right port? `tidings status` on the machine of the space shows it"
OLD_BUNDLE = "if the space listens now, take a new bundle (`tidings agent export`); else, is it the right port?"
CREDENTIAL = "`tidings agent export` it again where the space runs, or `tidings agent add` if it was revoked"
STEWARD = "`tidings status` and `tidings logs steward` where the space runs"
