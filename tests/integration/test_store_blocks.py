"""Sealed blocks on their way to the broker: one that is refused, or not answered, is told and ends nothing."""

import socket

import pytest

from bare import BareServer
from tidings.delivery import publishing
from tidings.delivery.publishing import Outgoing, store_blocks
from tidings.nats.errors import ConnectionGone


def test_what_was_not_stored_is_told_with_its_reason_and_the_rest_is_stored(
    bare: BareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "BLOCK_TIMEOUT", 0.5)
    bare.stream("takes")
    bare.stream("small", max_msg_size=10)
    bare.stream("mute", no_ack=True)
    places = ("takes.0", "small.1", "nowhere.2", "takes.3")
    connection = bare.connect()

    def stored(*subjects: str) -> tuple[dict[int, str], bool]:
        return store_blocks(connection, {n: [Outgoing(s, None, bytes(99))] for n, s in enumerate(subjects)})

    refused, serves = stored(*places)
    assert (set(refused), serves) == ({1, 2}, True)
    assert "maximum" in refused[1]
    assert "no stream takes nowhere.2" in refused[2]
    assert stored("takes.4", "mute.5") == ({1: "no answer"}, False), "an answer that comes now would be another's"
    assert bare.api("STREAM.INFO.takes")["state"]["messages"] == 3
    connection.close()


def test_a_connection_that_went_says_nothing_of_the_store(bare: BareServer) -> None:
    connection = bare.connect()
    connection._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionGone):
        store_blocks(connection, {0: [Outgoing("takes.0", None, b"block")]})
    connection.close()
