"""The protocol without I/O: what is read, what is refused, and what is never written."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.nats.core import (
    ANSWERS,
    MAX_INFO,
    MAX_LINE,
    Complaint,
    Core,
    Event,
    Info,
    Msg,
    Pong,
    header_block,
    status_of,
)
from tidings.nats.errors import NatsError, ProtocolError, Unwritable

BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
CONVERSATION = (
    b'INFO {"server_id":"S","max_payload":1048576}\r\n+OK\r\nPONG\r\n'
    b"MSG a.b 7 3\r\nx\r\n\r\nMSG a.b 7 reply.to 0\r\n\r\nPING\r\n"
    b"HMSG a.\xff\x0b\x00c 8 %d %d\r\n%bhello\r\n"
    % (len(BLOCK), len(BLOCK) + 5, BLOCK)
    + b"HMSG a 8 r %d %d\r\n%b\r\n" % (len(BLOCK), len(BLOCK), BLOCK)
    + b"-ERR 'Permissions Violation for Publish to \"a.b\"'\r\n"
)
HEARD: list[Event] = [
    Info({"server_id": "S", "max_payload": 1048576}),
    Pong(),
    Msg(7, b"a.b", b"", b"", b"x\r\n"),
    Msg(7, b"a.b", b"reply.to", b"", b""),
    Msg(8, b"a.\xff\x0b\x00c", b"", BLOCK, b"hello"),
    Msg(8, b"a", b"r", BLOCK, b""),
    Complaint("publish", "a.b", 'Permissions Violation for Publish to "a.b"'),
]


def events(core: Core, *chunks: bytes) -> list[Event]:
    found: list[Event] = []
    for chunk in chunks:
        core.feed(chunk)
        while (event := core.next_event()) is not None:
            found.append(event)
    return found


def fresh(**options: Any) -> Core:
    return Core(inbox="_INBOX.x", **options)


@pytest.mark.parametrize("cut", range(len(CONVERSATION) + 1))
def test_a_conversation_is_the_same_wherever_it_is_cut(cut: int) -> None:
    core = fresh()
    assert events(core, CONVERSATION[:cut], CONVERSATION[cut:]) == HEARD
    assert core.take() == b"PONG\r\n"
    assert core.is_between


@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12))
def test_a_conversation_is_the_same_in_any_pieces(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CONVERSATION)]
    pieces = [CONVERSATION[a:b] for a, b in pairwise(edges)]
    assert events(fresh(), *pieces) == HEARD


def test_byte_by_byte_is_the_same_too() -> None:
    assert events(fresh(), *(bytes([each]) for each in CONVERSATION)) == HEARD


@pytest.mark.parametrize(
    ("whole", "bound"),
    [(b"MSG a 1 %d\r\n%b\r\n" % (8 << 20, b"x" * (8 << 20)), 40), (b'INFO {"a":"%b"}\r\n' % (b"x" * 200_000), 40)],
)
def test_what_is_large_costs_its_size_and_not_the_square_of_it(whole: bytes, bound: int) -> None:
    """Against itself in one piece: a quadratic reader would take hundreds of times as long."""

    def seconds(size: int) -> float:
        core, started = fresh(), time.perf_counter()
        assert len(events(core, *(whole[at : at + size] for at in range(0, len(whole), size)))) == 1
        return time.perf_counter() - started

    in_one = min(seconds(len(whole)) for _ in range(3))
    assert min(seconds(max(1, len(whole) // 128)) for _ in range(3)) < max(in_one, 0.002) * bound


@pytest.mark.parametrize(
    "said",
    [
        b"HMSG\r\n",
        b"MSG\r\n",
        b"MSG a\r\n",
        b"MSG a 1\r\n",
        b"MSG a 1 b c 1\r\nx\r\n",
        b"HMSG a 1 1\r\nx\r\n",
        b"HMSG a 1 2 1\r\nx\r\n",
        b"HMSG a 1 r 1 2 3\r\nxxx\r\n",
        b"MSG  1 1\r\nx\r\n",
        b"MSG a 1 1\r\nxx\r\n",
        b"MSG a 1 -1\r\n\r\n",
        b"MSG a 1 +1\r\nx\r\n",
        b"MSG a 1 1_0\r\nxxxxxxxxxx\r\n",
        b"MSG a 1 %b\r\n" % (b"9" * 5_000),
        b"MSG a 1 999999999999\r\n",
        b"MSG a \xd9\xa1 1\r\nx\r\n",
        b"MSG a x 1\r\nx\r\n",
        b"MSGX a 1 1\r\nx\r\n",
        b"HELLO\r\n",
        b"\r\n",
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"INFO \r\n",
        b"INFO []\r\n",
        b"INFO {\r\n",
        b'INFO {"max_payload":1e999}\r\n',
        b'INFO {"max_payload":"1"}\r\n',
        b'INFO {"max_payload":true}\r\n',
        b'INFO {"max_payload":0}\r\n',
        b"INFO " + b"[" * 100_000 + b"\r\n",
        b"M" * (MAX_LINE + 1),
        b"I" * (MAX_INFO + 1),
    ],
)
def test_what_is_no_nats_ends_it_and_what_came_before_is_handed_out(said: bytes) -> None:
    core = fresh()
    core.feed(b"PONG\r\n" + said)
    assert core.next_event() == Pong()

    def read_on() -> None:
        while core.next_event() is not None:
            pass
        core.feed(b"x" * 20)  # what a message without its end lacks
        core.next_event()

    with pytest.raises(ProtocolError):
        read_on()


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_be_read_or_end_it(data: bytes) -> None:
    core = fresh()
    try:
        events(core, data)
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"NATS/1.0 503\r\n\r\n", 503),
        (b"NATS/1.0 408 Request Timeout\r\n\r\n", 408),
        (b"NATS/1.0\r\nStatus: 503\r\n\r\n", None),
        (b"NATS/1.0 5\r\n\r\n", None),
        (b"NATS/1.05 503\r\n\r\n", None),
        (b"NATS/1.0 \xb2\xb2\xb2\r\n\r\n", None),
        (b"", None),
    ],
)
def test_a_status_is_only_what_the_first_line_says(block: bytes, status: int | None) -> None:
    assert status_of(block) == status


@pytest.mark.parametrize(
    ("said", "kind", "subject"),
    [
        ('Permissions Violation for Publish to "a.\\"b\\\\c"', "publish", 'a."b\\c'),
        ('Permissions Violation for Subscription to "a.>" using queue "q"', "subscription", "a.>"),
        ("Authorization Violation", "auth", ""),
        ("User Authentication Revoked", "auth", ""),
        ("User Authentication Expired", "auth", ""),
        ("Authentication Timeout", "other", ""),
        ("Maximum Subscriptions Exceeded", "other", ""),
        ("Stale Connection", "other", ""),
    ],
)
def test_complaints_are_told_apart(said: str, kind: str, subject: str) -> None:
    assert events(fresh(), f"-ERR '{said}'\r\n".encode()) == [Complaint(kind, subject, said)]


# --- writing ---


def test_what_is_written_is_what_the_protocol_says() -> None:
    core = fresh(name="n", auth=lambda info: {"sig": info["nonce"]})
    events(core, b'INFO {"nonce":"abc"}\r\n')
    core.hello()
    core.ping()
    connect, subscribed, ping, _ = core.take().split(b"\r\n")
    options = json.loads(connect.removeprefix(b"CONNECT "))
    assert (options["name"], options["sig"], options["headers"], options["no_responders"]) == ("n", "abc", True, True)
    assert (subscribed, ping) == (b"SUB _INBOX.x.* 1", b"PING")
    core.subscribe("a.>", 5)
    core.subscribe("a.*", 6, "workers")
    core.unsubscribe(5)
    core.publish("a.b", b"hi")
    core.publish("a.b", b"hi", reply="c")
    core.publish("a.b", b"hi", block=header_block([("A", "b")]))
    assert core.take() == (
        b"SUB a.> 5\r\nSUB a.* workers 6\r\nUNSUB 5\r\nPUB a.b 2\r\nhi\r\nPUB a.b c 2\r\nhi\r\n"
        b"HPUB a.b 18 20\r\nNATS/1.0\r\nA: b\r\n\r\nhi\r\n"
    )
    assert (core.take(), core.out_size) == (b"", 0)


@pytest.mark.parametrize("subject", ["", "a b", "a\tb", "a\r\nPING", "a\nb", "a\x00b", "a\x0bb", "ä", "�", "a" * 5_000])
def test_nothing_is_written_to_what_could_end_a_word_or_a_line(subject: str) -> None:
    core = fresh()
    for write in (
        lambda: core.publish(subject, b""),
        lambda: core.publish("a", b"", reply=subject) if subject else core.publish("", b""),
        lambda: core.request(subject, b"", b"", None),
        lambda: core.subscribe(subject, 2),
    ):
        with pytest.raises(Unwritable):
            write()
    assert (core.take(), core.waiting) == (b"", {})


@pytest.mark.parametrize("fields", [[("A", "b\r\nC: d")], [("A\n", "b")], [("A", "b\rc")]])
def test_no_header_starts_a_line(fields: list[tuple[str, str]]) -> None:
    with pytest.raises(Unwritable):
        header_block(fields)


def test_what_is_larger_than_the_server_takes_is_refused_here_with_its_headers_counted() -> None:
    core = fresh()
    events(core, b'INFO {"max_payload":100}\r\n')
    block = header_block([("A", "b")])
    core.publish("a", b"x" * (100 - len(block)), block=block)
    before = core.take()
    with pytest.raises(Unwritable, match="101 bytes; the server takes 100"):
        core.publish("a", b"x" * (101 - len(block)), block=block)
    assert (before != b"", core.take()) == (True, b"")


# --- answers ---


def answer(core: Core, token: bytes, payload: bytes) -> bytes:
    block = b"NATS/1.0\r\nN: 1\r\n\r\n"
    subject = core.inbox.encode() + token
    return b"HMSG %b %d %d %d\r\n%b%b\r\n" % (subject, ANSWERS, len(block), len(block) + len(payload), block, payload)


def test_an_answer_finds_who_waits_and_a_denial_everybody_who_asked_there() -> None:
    core = fresh()
    first, second, third = (core.request(subject, b"", b"", subject) for subject in ("a", "b", "a"))
    (message,) = events(core, answer(core, second, b"yes"))
    assert isinstance(message, Msg)
    assert core.answered(message) == "b"
    core.waiting.pop(second)
    assert core.answered(message) is None
    assert (core.denied("a"), core.denied("A"), len({first, second, third})) == (["a", "a"], [], 3)


@given(st.lists(st.sampled_from(["ours", "other", "ping", "plain"]), max_size=12), st.integers(1, 400))
def test_reading_in_bulk_is_reading(kinds: list[str], size: int) -> None:
    """Whatever lies between the answers, and wherever it is cut: the same ones, in the same order."""
    core = fresh()
    token, other = core.request("a", b"", b"", None), core.request("a", b"", b"", None)
    whole, wanted = b"", []
    for number, kind in enumerate(kinds):
        payload = b"%d\r\nMSG" % number
        if kind == "ours":
            wanted.append(payload)
        plain = b"MSG %b%b 1 %d\r\n%b\r\n" % (core.inbox.encode(), other, len(payload), payload)
        whole += {
            "ours": answer(core, token, payload),
            "other": answer(core, other, payload),
            "ping": b"PING\r\n",
            "plain": plain,
        }[kind]
    got: list[bytes] = []
    for at in range(0, len(whole), size):
        core.feed(whole[at : at + size])
        while True:
            got += [payload for _, payload in core.whole_answers(token)]
            event = core.next_event()
            if event is None:
                break
            if isinstance(event, Msg) and core.token_of(event) == token:
                got.append(event.data)
    assert got == wanted


def test_every_error_of_a_connection_is_of_one_family() -> None:
    assert issubclass(ProtocolError, NatsError)
    assert issubclass(Unwritable, NatsError)
