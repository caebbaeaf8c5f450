"""The NATS client protocol: one core without I/O, and a driver for asyncio and one for blocking sockets.

    core.py       bytes in, events out; commands in, bytes out; who waits for which answer
    aio.py        `Connection` and `Subscription` on an event loop; reconnects if told to
    aio_socket.py one socket of such a connection
    aio_reach.py  from some addresses to a server that greets
    blocking.py   one thread, one socket, bulk reads: what workers of the pipeline use
    address.py    server URLs
    websocket.py  a websocket as a stream of bytes, without I/O; `aio_websocket.py` puts it below a socket
    proxy.py      an HTTP proxy on the way to one, without I/O
    errors.py     what can go wrong, whichever driver

Nothing here knows of spaces, agents or streams, and nothing outside of this package speaks the protocol. Header blocks
and subjects stay the bytes they came as: a sender can put almost anything into both.
"""
