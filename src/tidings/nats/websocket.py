"""A websocket as a stream of bytes, without I/O. The `websockets` package reads and writes its frames.

    stream = WebSocketStream(address)
    write(stream.to_send())                  # the request for an upgrade
    for payload in stream.receive(data): ... # what binary frames hold, in order
    write(stream.to_send())                  # answers to pings and to a close
    write(stream.wrap(data))

Where frames begin and end means nothing: NATS has ends of its own. What breaks the rules of a websocket, or is none,
raises `ProtocolError` in words; the stream is of no use after that.
"""

from __future__ import annotations

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import WebSocketURI

from tidings.nats.address import Address
from tidings.nats.core import MAX_MESSAGE
from tidings.nats.errors import ProtocolError


class WebSocketStream:
    """The client's end of one websocket."""

    def __init__(self, address: Address) -> None:
        uri = WebSocketURI(address.tls, address.host, address.port, address.path or "/", "")
        # no extension is offered, so nothing comes compressed: a frame is as large as it says
        self._protocol = ClientProtocol(uri, max_size=MAX_MESSAGE)
        self._protocol.send_request(self._protocol.connect())
        #: why the server closed it, once it did
        self.ended = ""

    @property
    def is_open(self) -> bool:
        return self._protocol.state is State.OPEN

    def to_send(self) -> bytes:
        """What is to be written now."""
        return b"".join(self._protocol.data_to_send())

    def receive(self, data: bytes) -> list[bytes]:
        """What the binary frames hold that came whole. After the server closed it nothing more is heard."""
        if not self.ended:
            self._protocol.receive_data(data)
        return self._read()

    def at_end(self) -> None:
        """The connection has ended: before it was a websocket, that is an error."""
        if self._protocol.state is not State.CONNECTING:
            return
        self._protocol.receive_eof()
        if isinstance(self._protocol.handshake_exc, InvalidStatus):  # a page that ended with the connection
            self._read()
        raise ProtocolError("it hung up when it was asked for a websocket")

    def _read(self) -> list[bytes]:
        events = self._protocol.events_received()  # an answer that is no 101 is among them
        if self._protocol.handshake_exc is not None:
            raise ProtocolError(_refusal(self._protocol.handshake_exc)) from self._protocol.handshake_exc
        payloads = [bytes(event.data) for event in events if isinstance(event, Frame) and _is_data(event)]
        if (broken := self._protocol.parser_exc) is not None:
            raise ProtocolError(f"the server breaks the rules of a websocket: {broken}") from broken
        if (close := self._protocol.close_rcvd) is not None:
            self.ended = f"the server closed the websocket ({close})"
        return payloads

    def wrap(self, data: bytes) -> bytes:
        """These bytes in a frame; of a websocket that is closing, nothing."""
        if not self.is_open:
            return b""
        self._protocol.send_binary(data)
        return self.to_send()

    def goodbye(self) -> bytes:
        if not self.is_open:
            return b""
        self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
        return self.to_send()


def _is_data(frame: Frame) -> bool:
    if frame.opcode is Opcode.TEXT:
        raise ProtocolError("the server sends text where a NATS server sends bytes")
    return frame.opcode in (Opcode.BINARY, Opcode.CONT)


def _refusal(error: Exception) -> str:
    if not isinstance(error, InvalidStatus):
        return f"what answers there is no websocket ({error})"
    answer = error.response
    said = f"{answer.status_code} {answer.reason_phrase}".strip()
    if answer.status_code == 407:
        return f"asked for a websocket, somebody in between answered {said}: a proxy that wants a password"
    return f"asked for a websocket, it answered {said}: another web server, or a proxy that lets none through"
