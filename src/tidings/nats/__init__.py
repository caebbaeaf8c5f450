"""The NATS client protocol: one core without I/O, and a driver for asyncio and one for blocking sockets.

    core.py       bytes in, events out; commands in, bytes out; who waits for which answer
    aio.py        `Connection` and `Subscription` on an event loop; reconnects if told to
    aio_socket.py one socket of such a connection
    blocking.py   one thread, one socket, bulk reads: what workers of the pipeline use
    address.py    server URLs
    errors.py     what can go wrong, whichever driver

Nothing here knows of spaces, agents or streams, and nothing outside of this package speaks the protocol. Header blocks
and subjects stay the bytes they came as: a sender can put almost anything into both.
"""
