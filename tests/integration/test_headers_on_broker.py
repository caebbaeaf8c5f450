"""What `wire/records` believes about the broker, asked of a real nats-server by a client that writes hostile blocks."""

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidings.errors import WireError
from tidings.wire.records import DIRECT_GET_HEADERS, REPUBLISH_HEADERS, Headers, encode_headers, own_fields, split_block

pytestmark = pytest.mark.broker

SERVER = Path(sys.executable).parent / "nats-server"
STREAM = "LOG"
SUBJECT = "in.general"
Record = tuple[bytes, bytes]

FORGED = (("Nats-Stream", "X"), ("Nats-Subject", "forged"), ("Nats-Sequence", "999"), ("Status", "204"))
WELL_FORMED = [
    encode_headers([("Td-Sig", "s"), ("X-Own", "ü")]),
    encode_headers(FORGED),
    encode_headers([("Nats-Num-Pending", "0"), ("Nats-Last-Sequence", "5"), ("Nats-UpTo-Sequence", "5")]),
]
MALFORMED = [
    b"garbage",
    b"NATS/1.0\r\n\r\n\r\nA: b\r\n\r\n",
    b"NATS/1.0\r\nA: b\nNats-Subject: z\r\n\r\n",
    b"NATS/1.0\r\nA: \xff\x00\r\n: x\r\n\r\n",
    encode_headers(FORGED)[:-4] + b"\r\nX-",
    # the broker cuts two bytes and writes on: its first header becomes the value of a line of the sender's
    encode_headers(FORGED)[:-4] + b"\r\nX-..",
    encode_headers(FORGED)[:-4],
]
#: a sender that ends everybody's page
STATUS_LINE = [b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n"]


class RawClient:
    """Speaks the protocol byte by byte, because a library would not send what an attacker sends."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._stream = self._socket.makefile("rwb")
        self._stream.readline()
        self._write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB reply 1\r\nSUB live.> 2\r\n')

    def request(self, subject: str, payload: bytes, block: bytes | None = None) -> None:
        if block is None:
            self._write(f"PUB {subject} reply {len(payload)}\r\n".encode() + payload + b"\r\n")
        else:
            sizes = f"{len(block)} {len(block) + len(payload)}"
            self._write(f"HPUB {subject} reply {sizes}\r\n".encode() + block + payload + b"\r\n")

    def take(self) -> tuple[str, Record]:
        """Next message: its subject, its raw header block, its payload."""
        while True:
            verb, *words = self._stream.readline().split()
            if verb in (b"MSG", b"HMSG"):
                break
            assert verb in (b"PING", b"INFO"), (verb, words)
        body = self._stream.read(int(words[-1]) + 2)[:-2]
        cut = int(words[-2]) if verb == b"HMSG" else 0
        return words[0].decode(), (body[:cut], body[cut:])

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("broker")
    command: list[str | Path] = [SERVER, "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", folder / "js"]
    process = subprocess.Popen([*command, "--ports_file_dir", folder, "-l", folder / "log"])
    ports = folder / f"nats-server_{process.pid}.ports"
    try:
        deadline = time.monotonic() + 10
        while not (ports.exists() and ports.read_text().endswith("}")):
            assert time.monotonic() < deadline, "nats-server did not start in 10 s"
            assert process.poll() is None, f"nats-server ended with {process.returncode}"
            time.sleep(0.01)
        yield int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def stored(port: int) -> Iterator[tuple[list[Record], list[Record]]]:
    """Each block stored once: the live copies, and the page a direct get answers with."""
    client = RawClient(port)
    try:
        yield _store_and_read(client)
    finally:
        client.close()


def _store_and_read(client: RawClient) -> tuple[list[Record], list[Record]]:
    config = {
        "name": STREAM,
        "subjects": ["in.>"],
        "allow_direct": True,
        "republish": {"src": "in.>", "dest": "live.in.>"},
    }
    client.request(f"$JS.API.STREAM.CREATE.{STREAM}", json.dumps(config).encode())
    assert b"error" not in client.take()[1][1]
    live = []
    for number, block in enumerate(WELL_FORMED + MALFORMED + STATUS_LINE, 1):
        client.request(SUBJECT, b"body", block)
        answers = dict(client.take() for _ in range(2))
        assert json.loads(answers["reply"][1])["seq"] == number
        live.append(answers[f"live.{SUBJECT}"])
    client.request(f"$JS.API.DIRECT.GET.{STREAM}", b'{"seq":1,"batch":100}')
    page = [client.take()[1] for _ in range(len(live) + 1)]
    return live, page


def test_subject_and_sequence_are_the_brokers_however_hostile_the_block(
    stored: tuple[list[Record], list[Record]],
) -> None:
    live, page = stored
    for number, (block, _) in enumerate(live, 1):
        _, said = split_block(block, REPUBLISH_HEADERS)
        assert (said["Nats-Subject"], said["Nats-Sequence"]) == (SUBJECT, str(number)), block
    for number, (block, _) in enumerate(page[:-1], 1):
        _, said = split_block(block, DIRECT_GET_HEADERS)
        assert (said["Nats-Subject"], said["Nats-Sequence"]) == (SUBJECT, str(number)), block
        assert said["Nats-Num-Pending"] == str(len(live) - number)


def test_a_well_formed_block_comes_back_as_the_sender_wrote_it(stored: tuple[list[Record], list[Record]]) -> None:
    live, page = stored
    for sent, (copy, body), (record, _) in zip(WELL_FORMED, live, page, strict=False):
        fields = Headers.parse(sent).fields
        assert own_fields(Headers.parse(copy), REPUBLISH_HEADERS) == fields
        assert own_fields(Headers.parse(record), DIRECT_GET_HEADERS) == fields
        assert split_block(copy, REPUBLISH_HEADERS)[0] == sent
        assert body == b"body"


def test_a_malformed_block_stays_malformed_or_shows_what_it_forged(stored: tuple[list[Record], list[Record]]) -> None:
    for block, _ in itertools.chain(stored[0][len(WELL_FORMED) : -1], stored[1][len(WELL_FORMED) : -2]):
        own, _ = split_block(block, DIRECT_GET_HEADERS)
        try:
            fields = Headers.parse(own).fields
        except WireError:
            continue
        assert "Nats-Subject" in dict(fields), block


def test_the_end_of_a_page_is_a_status_and_no_record(stored: tuple[list[Record], list[Record]]) -> None:
    end, body = stored[1][-1]
    assert Headers.parse(end).status == 204
    assert body == b""
    _, said = split_block(end, DIRECT_GET_HEADERS)
    assert "Nats-Sequence" not in said
    assert {Headers.parse(block).status for block, _ in stored[1][: len(WELL_FORMED)]} == {None}


def test_a_status_line_of_the_senders_does_not_survive_the_broker(stored: tuple[list[Record], list[Record]]) -> None:
    for block, _ in (stored[0][-1], stored[1][-2]):
        headers = Headers.parse(block)
        assert headers.status is None
        assert headers.fields[0] == ("A", "b")
