"""Signatures in threads are judged like one after the other."""

import pytest

from tidings.link.judging import verified
from tidings.link.verifying import ThreadedVerify
from tidings.wire import signing
from tidings.wire.keys import ACCOUNT, KeyPair
from tidings.wire.links import LinkedRecord

SPACE, ADA = KeyPair.generate(ACCOUNT).id, KeyPair.generate()


def record(seq: int) -> LinkedRecord:
    payload = f"{seq}".encode()
    signature = signing.sign(ADA, SPACE, "chat", "general" if seq % 3 else "another", payload)
    return LinkedRecord(
        seq=seq, time_ns=0, origin=SPACE, channel="general", sender=ADA.id, signature=signature, payload=payload
    )


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 101])
async def test_each_gets_its_own_verdict_in_order(count: int) -> None:
    verify = ThreadedVerify()
    records = [record(seq) for seq in range(count)]
    try:
        assert await verify(records) == verified(records) == [seq % 3 != 0 for seq in range(count)]
    finally:
        verify.close()
