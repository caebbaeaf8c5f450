r"""The NATS client protocol without I/O. A core never touches a socket, a clock or a loop.

    core.feed(data)
    while (event := core.next_event()) is not None: ...     # Msg | Info | Pong | Complaint, in wire order
    core.publish("a.b", b"payload"); write(core.take())

What does not keep to the protocol raises `ProtocolError`, once everything that came whole before it was handed out; the
connection is of no use after that. A PING is answered by itself: its PONG is in the next `take`.

Words of a line are separated by one space; the server lets everything but space, tab and line feed into a subject, so
a subject may hold `\r`, `\v`, NUL or bytes that are no text. Such a subject is read as what it is and can be told from
every name of ours, but nothing is ever written to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tidings.nats.errors import ProtocolError, Unwritable

#: the subscription on which answers to our requests come
ANSWERS = 1
#: the server's own ceilings are configurable; these are above what ours are set to
MAX_LINE = 1 << 17
MAX_INFO = 1 << 20
MAX_MESSAGE = 64 << 20
_SUBJECT = re.compile(r"[!-~]{1,4096}").fullmatch
_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"((?:[^\"\\]|\\.)*)\"", re.IGNORECASE)
_AUTH_WORDS = ("authorization", "authentication", "revoked", "expired")
#: it did not wait for our credential (we stood still, or the machine was too busy): nothing was refused
_TOO_LATE = "authentication timeout"
_SIZE_DIGITS = 12
_END = b"\r\n"

#: fields of CONNECT that prove who we are, from what the server said in INFO
Auth = Callable[[Mapping[str, Any]], Mapping[str, str]]


def anonymous(_info: Mapping[str, Any]) -> Mapping[str, str]:
    return {}


class Msg(NamedTuple):
    """One message as it came. `block` is its raw header block, empty if it has none."""

    sid: int
    raw_subject: bytes
    raw_reply: bytes
    block: bytes
    data: bytes

    @property
    def subject(self) -> str:
        """A replacement character is in no name of ours: a subject with one parses as nothing."""
        return self.raw_subject.decode(errors="replace")

    @property
    def reply(self) -> str:
        return self.raw_reply.decode(errors="replace")

    @property
    def status(self) -> int | None:
        return status_of(self.block)


class Info(NamedTuple):
    """What the server says of itself: first of all, and again when something changes."""

    fields: dict[str, Any]


class Pong(NamedTuple):
    """The answer to the oldest PING that has none."""


class Complaint(NamedTuple):
    """`-ERR`. `kind` is publish, subscription, auth or other; the first two name a `subject`."""

    kind: str
    subject: str
    text: str


Event = Msg | Info | Pong | Complaint


def status_of(block: bytes) -> int | None:
    """The status in the first line of a header block: the only place where it is the server's word."""
    if block[:9] != b"NATS/1.0 ":
        return None
    word = block[9:12]
    return int(word) if len(word) == 3 and word.isdigit() else None


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block of our own. No name or value can start a line."""
    named = [f"{name}: {value}\r\n" for name, value in fields]
    lines = "".join(named)
    if lines.count("\n") != len(named) or lines.count("\r") != len(named):
        raise Unwritable("a header with a line break")
    return f"NATS/1.0\r\n{lines}\r\n".encode()


class Core:
    """The protocol state of one socket. `inbox` is where answers come, without its last dot."""

    def __init__(self, *, name: str = "", inbox: str, auth: Auth = anonymous) -> None:
        self._name, self._auth = name, auth
        self.inbox = f"{_checked(inbox)}."
        self._answer_to = self.inbox.encode()
        self._whole_answer = re.compile(
            rb"HMSG %b([0-9]+) 1 ([0-9]{1,12}) ([0-9]{1,12})\r\n" % re.escape(self._answer_to)
        )
        self.info: dict[str, Any] = {}
        self.max_payload = 1 << 20
        #: token -> (subject, whatever the driver wakes)
        self.waiting: dict[bytes, tuple[str, Any]] = {}
        self._tokens = 0
        self._good: set[str] = set()
        self._out: list[bytes] = []
        #: bytes that wait to be taken
        self.out_size = 0
        self._buffer = b""
        self._position = 0
        #: what came of something that needs `_missing` bytes more: joined once, so a large message costs its size
        self._held: list[bytes] = []
        self._missing = 0

    # --- in ---

    def feed(self, data: bytes) -> None:
        """What the socket said. `next_event` has been asked until it had no more."""
        if self._missing > 0:
            self._held.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._held)
            self._held.clear()
        elif self._position < len(self._buffer):
            data = self._buffer[self._position :] + data
        self._buffer, self._position, self._missing = data, 0, 0

    @property
    def is_between(self) -> bool:
        """Is nothing there that came and was not handed out?"""
        return self._missing <= 0 and self._position >= len(self._buffer)

    def next_event(self) -> Event | None:
        """The next thing that came whole; None if more must be fed first."""
        while not self._missing:
            buffer, start = self._buffer, self._position
            if start >= len(buffer):
                return None
            first = buffer[start]
            stop = buffer.find(_END, start, start + (MAX_INFO if first == 73 else MAX_LINE))
            if stop < 0:
                if len(buffer) - start >= (MAX_INFO if first == 73 else MAX_LINE):
                    raise ProtocolError("the server sends a line without an end")
                return None
            if first == 77 or first == 72:  # MSG, HMSG
                return self._message(buffer, start, stop)
            self._position = stop + 2
            event = self._control(buffer[start:stop])
            if event is not None:
                return event
        return None

    def _message(self, buffer: bytes, start: int, stop: int) -> Msg | None:
        """MSG subject sid [reply] size; HMSG subject sid [reply] block size."""
        words = buffer[start:stop].split(b" ")
        cut = b"0"
        if words[0] == b"HMSG" and len(words) > 4:
            cut = words.pop(-2)
        elif words[0] != b"MSG":
            words.clear()
        if len(words) == 4:
            _, subject, sid, size = words
            reply = b""
        elif len(words) == 5:
            _, subject, sid, reply, size = words
        else:
            raise ProtocolError(f"the server does not speak NATS: {buffer[start : min(stop, start + 64)]!r}")
        body = stop + 2
        head, total = _number(cut), _number(size)
        if not subject or head > total or total > MAX_MESSAGE:
            raise ProtocolError("the server sends a message whose sizes cannot be")
        end = body + total
        if end + 2 > len(buffer):
            self._hold(end + 2)
            return None
        if buffer[end : end + 2] != _END:
            raise ProtocolError("a message does not end where its size says")
        self._position = end + 2
        middle = body + head
        return Msg(_number(sid), subject, reply, buffer[body:middle], buffer[middle:end])

    def _hold(self, end: int) -> None:
        self._held = [self._buffer[self._position :]]
        self._missing = end - len(self._buffer)
        self._buffer, self._position = b"", 0

    def _control(self, line: bytes) -> Event | None:
        if line == b"PING":
            self._put(b"PONG\r\n")
            return None
        if line == b"PONG":
            return Pong()
        if line == b"+OK":
            return None
        if line.startswith(b"INFO "):
            return Info(self._read_info(line[5:]))
        if line.startswith(b"-ERR"):
            return _complaint(line[4:].decode(errors="replace").strip(" '"))
        raise ProtocolError(f"the server does not speak NATS: {line[:64]!r}")

    def _read_info(self, text: bytes) -> dict[str, Any]:
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise TypeError
            max_payload = fields.get("max_payload", 1 << 20)
            if type(max_payload) is not int or max_payload < 1:
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise ProtocolError("what the server says of itself cannot be read") from None
        self.info, self.max_payload = fields, max_payload
        return fields

    def whole_answers(self, token: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Header block and payload of answers to `token` that came whole, without an object for each.

        It ends at the first thing that is none of an answer with headers, or not whole: `next_event` takes that.
        """
        match, buffer = self._whole_answer.match, self._buffer
        while (found := match(buffer, self._position)) is not None:
            body = found.end()
            end = body + int(found[3])
            middle = body + int(found[2])
            if end + 2 > len(buffer) or middle > end or buffer[end : end + 2] != _END:
                return
            self._position = end + 2
            if found[1] == token:
                yield buffer[body:middle], buffer[middle:end]
                buffer = self._buffer  # whoever takes them may have used this connection meanwhile

    # --- out ---

    def _put(self, data: bytes) -> None:
        self._out.append(data)
        self.out_size += len(data)

    def take(self) -> bytes:
        """What is to be written now."""
        out, self._out, self.out_size = self._out, [], 0
        return out[0] if len(out) == 1 else b"".join(out)

    def hello(self) -> None:
        """CONNECT, and the subscription for answers. That we are in is said by the answer to a PING after it."""
        options = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "tidings",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "echo": True,
            "tls_required": False,
            "name": self._name,
            **self._auth(self.info),
        }
        self._put(b"CONNECT %b\r\n" % json.dumps(options, separators=(",", ":")).encode())
        self._put(b"SUB %b* %d\r\n" % (self._answer_to, ANSWERS))

    def ping(self) -> None:
        self._put(b"PING\r\n")

    def subscribe(self, subject: str, sid: int, queue: str = "") -> None:
        words = [b"SUB", _checked(subject).encode(), *([_checked(queue).encode()] if queue else []), b"%d\r\n" % sid]
        self._put(b" ".join(words))

    def unsubscribe(self, sid: int) -> None:
        self._put(b"UNSUB %d\r\n" % sid)

    def publish(self, subject: str, payload: bytes, *, reply: str = "", block: bytes = b"") -> None:
        self._write(subject, _checked(reply).encode() if reply else b"", block, payload)

    def request(self, subject: str, payload: bytes, block: bytes, waiter: Any) -> bytes:
        """Publish with an inbox of its own, and remember who waits. Taking the token out again is the driver's."""
        self._tokens += 1
        token = b"%d" % self._tokens
        self._write(subject, self._answer_to + token, block, payload)
        self.waiting[token] = (subject, waiter)
        return token

    def _write(self, subject: str, reply: bytes, block: bytes, payload: bytes) -> None:
        if subject not in self._good:
            _checked(subject)
            if len(self._good) > 4096:
                self._good.clear()
            self._good.add(subject)
        size = len(block) + len(payload)
        if size > self.max_payload:
            raise Unwritable(f"a message of {size} bytes; the server takes {self.max_payload}")
        to = reply + b" " if reply else b""
        if block:
            self._put(b"HPUB %b %b%d %d\r\n%b%b\r\n" % (subject.encode(), to, len(block), size, block, payload))
        else:
            self._put(b"PUB %b %b%d\r\n%b\r\n" % (subject.encode(), to, size, payload))

    def write_raw(self, data: bytes) -> None:
        """Bytes that are protocol already; nothing is checked. For those who try what a server does with anything."""
        self._put(data)

    # --- who waits ---

    def token_of(self, message: Msg) -> bytes:
        return message.raw_subject[len(self._answer_to) :]

    def answered(self, message: Msg) -> Any | None:
        """Who waits for this answer, if anybody still does."""
        found = self.waiting.get(self.token_of(message))
        return None if found is None else found[1]

    def denied(self, subject: str) -> list[Any]:
        """Who waits for answers to what went to a subject that the server lets nobody of us publish to."""
        return [waiter for asked, waiter in self.waiting.values() if asked == subject]


def _number(word: bytes) -> int:
    if not word.isdigit() or len(word) > _SIZE_DIGITS:  # int() takes signs and underscores, and its time for long ones
        raise ProtocolError(f"the server sends {word[:32]!r} where a number belongs")
    return int(word)


def _checked(subject: str) -> str:
    """Nothing that could end a word or a line, whatever a peer named as its reply."""
    if not _SUBJECT(subject):
        raise Unwritable(f"nothing can be sent to {subject[:64]!r}")
    return subject


def _complaint(text: str) -> Complaint:
    found = _VIOLATION.search(text)
    if found is not None:  # the server spells subjects as Go's %q does: of what we can write only these are escaped
        return Complaint(found[1].lower(), re.sub(r"\\([\"\\])", r"\1", found[2]), text)
    lower = text.lower()
    is_auth = _TOO_LATE not in lower and any(word in lower for word in _AUTH_WORDS)
    return Complaint("auth" if is_auth else "other", "", text)
