"""What one agent can do to its neighbours: floods by a raw client, bounded, each a process of its own.

    python tests/tools/attacks.py connections --url U --space S --creds FILE --seconds 6

Blocking sockets and protocol lines made once, so that the attacker costs the machine little and the space much. An
attack ends by itself after its seconds, or when nobody lets it in any more; it says on standard output what it did.
`bench/flood.py` measures what a neighbour notices; tests run small variants.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidings.nats import jwt
from tidings.wire.message import new_id
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import AGENT_SERVICES, Subjects
from tidings_testing.security.actor import line

#: refusals in a row after which an attacker gives up
LOCKED_OUT = 20


@dataclass
class Attacker:
    """A credential, where to go with it, and until when."""

    url: str
    subjects: Subjects
    token: str
    key: KeyPair
    until: float
    held: list[socket.socket] = field(default_factory=list)
    connected: int = 0
    refused: int = 0
    sent: int = 0

    @classmethod
    def of(cls, url: str, space: str, creds: Path, seconds: float) -> Attacker:
        token, key = jwt.split_credentials(creds.read_text())
        return cls(url, Subjects(space), token, key, time.monotonic() + seconds)

    @property
    def id(self) -> str:
        return self.key.id

    def close(self) -> None:
        for link in self.held:
            link.close()

    def goes_on(self) -> bool:
        return time.monotonic() < self.until and self.refused < LOCKED_OUT

    def connect(self) -> socket.socket | None:
        """A connection the broker accepted, or None."""
        host, _, port = self.url.removeprefix("nats://").rpartition(":")
        try:
            link = socket.create_connection((host, int(port)), timeout=2)
        except OSError:
            self.refused += 1
            return None
        try:
            greeting = json.loads(_read_line(link).removeprefix(b"INFO "))
            signature = base64.urlsafe_b64encode(self.key.sign(greeting["nonce"].encode())).decode().rstrip("=")
            hello = {"jwt": self.token, "sig": signature, "headers": True, "no_responders": True, "verbose": False}
            hello |= {"pedantic": False, "lang": "raw", "version": "0", "name": "attack", "protocol": 1}
            link.sendall(b"CONNECT %b\r\nPING\r\n" % json.dumps(hello).encode())
            if not _read_line(link).startswith(b"PONG"):
                raise OSError("refused")
        except (OSError, ValueError):
            link.close()
            self.refused += 1
            time.sleep(0.05)
            return None
        self.refused = 0
        self.connected += 1
        return link

    def pour(self, lines: Iterator[bytes], *, connections: int = 1, bytes_per_second: float = float("inf")) -> None:
        """Send lines over so many connections until the time is over; whoever is cut comes back."""
        links: list[socket.socket | None] = [None] * connections
        started, sent = time.monotonic(), 0
        while self.goes_on():
            for number, link in enumerate(links):
                if link is None:
                    links[number] = self.connect()
                    continue
                part = next(lines)
                try:
                    link.sendall(part)
                    _forget(link)
                except OSError:
                    link.close()
                    links[number] = None
                    continue
                sent += len(part)
                self.sent += 1
            ahead = sent / bytes_per_second - (time.monotonic() - started)
            if ahead > 0:
                time.sleep(min(ahead, 0.1))
        for link in links:
            if link is not None:
                link.close()


def _read_line(link: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\r\n"):
        part = link.recv(1)
        if not part:
            raise OSError("closed")
        found += part
    return found


def _forget(link: socket.socket) -> None:
    """Read what came and drop it, so that only our sending is the attack."""
    link.settimeout(0)
    try:
        while link.recv(1 << 20):
            pass
        raise OSError("closed")
    except BlockingIOError:
        return
    finally:
        link.settimeout(2)


def _chat(attacker: Attacker, channel: str = "general") -> str:
    return attacker.subjects.chat(attacker.id, channel)


def connections(attacker: Attacker) -> None:
    """Open connection after connection and hold them."""
    while attacker.goes_on():
        link = attacker.connect()
        if link is not None:
            attacker.held.append(link)


def direct_fill(attacker: Attacker) -> None:
    """250 KB to one invented mailbox after the other."""
    body = b"x" * 250_000
    direct = attacker.subjects.direct
    attacker.pour(line(direct(KeyPair.generate().id, attacker.id), body) for _ in itertools.count())


def task_fill(attacker: Attacker) -> None:
    """250 KB to one role after the other."""
    body = b"x" * 250_000
    attacker.pour(line(attacker.subjects.task(f"role{n % 4000}", attacker.id), body) for n in itertools.count())


def control_large(attacker: Attacker) -> None:
    """Control requests of 120 KB on four connections."""
    body = json.dumps({"op": new_id(), "do": "list", "fill": "x" * 120_000}).encode()
    said = line(attacker.subjects.control("member", attacker.id), body, reply=f"_INBOX_{attacker.id}.x")
    attacker.pour(itertools.repeat(said), connections=4)


def control_many(attacker: Attacker) -> None:
    """12,000 small control requests a second to all services."""
    body = json.dumps({"op": new_id(), "do": "list"}).encode()
    reply = f"_INBOX_{attacker.id}.x"
    said = [line(attacker.subjects.control(service, attacker.id), body, reply=reply) for service in AGENT_SERVICES]
    batch = b"".join(said * 15)[:None]
    attacker.pour(itertools.repeat(batch), bytes_per_second=12_000 * len(batch) / (15 * len(said)))


def subscriptions(attacker: Attacker) -> None:
    """Ten connections with 2,000 live subscriptions each that do not read, and a large chat now and then."""
    live = attacker.subjects.live_chat("general")
    while attacker.goes_on() and len(attacker.held) < 10:
        link = attacker.connect()
        if link is not None:
            with suppress(OSError):
                link.sendall(b"".join(b"SUB %b %d\r\n" % (live.encode(), n) for n in range(1, 2001)))
                attacker.held.append(link)
    large = line(_chat(attacker), b"x" * 250_000)
    attacker.pour(itertools.repeat(large), bytes_per_second=500_000)


def message_ids(attacker: Attacker) -> None:
    """Message ids of 60 KB, which the broker remembers for its duplicate window."""
    lines = (
        line(_chat(attacker), b"x", headers=[("Nats-Msg-Id", f"{n:08d}" + "i" * 60_000)]) for n in itertools.count()
    )
    attacker.pour(lines)


def long_subjects(attacker: Attacker) -> None:
    """Channels with names of 50 KB."""
    attacker.pour(line(_chat(attacker, "general") + f".{n:08d}" + "s" * 50_000, b"x") for n in itertools.count())


def steady(attacker: Attacker) -> None:
    """13.7 MB a second into the log: below the quota of old."""
    attacker.pour(itertools.repeat(line(_chat(attacker), b"x" * 100_000)), bytes_per_second=13_700_000)


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    "connections": connections,
    "direct_fill": direct_fill,
    "task_fill": task_fill,
    "control_large": control_large,
    "control_many": control_many,
    "subscriptions": subscriptions,
    "message_ids": message_ids,
    "long_subjects": long_subjects,
    "steady": steady,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=sorted(ATTACKS))
    parser.add_argument("--url", required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--creds", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args(arguments)
    attacker = Attacker.of(options.url, options.space, options.creds, options.seconds)
    started = time.monotonic()
    ATTACKS[options.attack](attacker)
    seconds = round(time.monotonic() - started, 3)
    said = {"connected": attacker.connected, "sent": attacker.sent, "seconds": seconds}
    sys.stdout.write(json.dumps(said | {"locked_out": attacker.refused >= LOCKED_OUT}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
