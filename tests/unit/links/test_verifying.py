"""Signatures in threads are judged like one after the other, and ahead like in their turn."""

from collections.abc import Sequence

import pytest

from tidings.links.running_link import ThreadedVerify, VerifiedAhead
from tidings.links.validation import verified
from tidings.wire import signing
from tidings.wire.links import LinkedRecord
from tidings.wire.signing import ACCOUNT, KeyPair

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


async def test_what_was_prepared_is_not_checked_again_and_everything_else_is() -> None:
    checked: list[Sequence[LinkedRecord]] = []

    async def verify(records: Sequence[LinkedRecord]) -> list[bool]:
        checked.append(records)
        return verified(records)

    ahead = VerifiedAhead(verify)
    one, other = (tuple(record(seq) for seq in seqs) for seqs in ((1, 2, 3), (4, 5, 6)))
    assert await ahead(one) == [True, True, False], "nobody prepared it"
    await ahead.prepare(other)
    assert checked == [one, other]
    assert [await ahead(other), await ahead(other)] == [[True, True, False]] * 2
    assert checked == [one, other]
    assert await ahead((*other, record(9))) == [True, True, False, False], "these are others"
    assert len(checked) == 3
