"""A signature is valid for one space, kind, sender, destination and payload, and has one spelling."""

import base64

import nkeys
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tidings.errors import BadSignature, InvalidName
from tidings.wire.signing import ACCOUNT, KINDS, KeyPair, public_bytes, sign, signed_bytes, verifies, verify

ADA, MAL = KeyPair.generate(), KeyPair.generate()
SPACE = KeyPair.generate(ACCOUNT).id

field = st.text("ab.\r \0ü", max_size=4)
tuples = st.tuples(field, st.sampled_from(KINDS), field, field, st.binary(max_size=4) | st.just(b"\nchat\na\n"))


@given(tuples, tuples)
def test_different_tuples_never_give_equal_bytes(
    one: tuple[str, str, str, str, bytes], other: tuple[str, str, str, str, bytes]
) -> None:
    assume(one != other)
    assert signed_bytes(*one) != signed_bytes(*other)


@given(tuples)
def test_the_bytes_can_be_taken_apart_again(one: tuple[str, str, str, str, bytes]) -> None:
    version, *fields, payload = signed_bytes(*one).split(b"\n", 5)
    assert version == b"td1"
    assert (*(part.decode() for part in fields), payload) == one


@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_newline_in_a_field_cannot_be_signed(at: int) -> None:
    fields = [SPACE, "chat", ADA.id, "general"]
    fields[at] += "\nx"
    with pytest.raises(BadSignature):
        signed_bytes(*fields, b"{}")  # type: ignore[call-arg, arg-type]


def test_an_unknown_kind_cannot_be_signed() -> None:
    with pytest.raises(BadSignature):
        signed_bytes(SPACE, "via", ADA.id, "general", b"{}")


@given(st.binary(max_size=50), st.integers(0, 85), st.sampled_from("Az0-_+/=\nü"))
def test_a_signature_verifies_and_no_other_spelling_of_it_does(payload: bytes, at: int, other: str) -> None:
    signature = sign(ADA, SPACE, "chat", "general", payload)
    assert verifies(signature, SPACE, "chat", ADA.id, "general", payload)
    mutated = signature[:at] + other + signature[at + 1 :]
    assert mutated == signature or not verifies(mutated, SPACE, "chat", ADA.id, "general", payload)


def test_the_unused_bits_of_a_signature_are_zero() -> None:
    signature = sign(ADA, SPACE, "chat", "general", b"{}")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    last = alphabet.index(signature[-1])
    for same in alphabet[last + 1 : last + 16]:
        assert base64.urlsafe_b64decode(signature[:-1] + same + "==") == base64.urlsafe_b64decode(signature + "==")
        assert not verifies(signature[:-1] + same, SPACE, "chat", ADA.id, "general", b"{}")


@pytest.mark.parametrize("signature", [None, "", "A" * 85, "A" * 86, "A" * 88, "ü" * 86])
def test_what_is_no_signature_does_not_verify(signature: str | None) -> None:
    assert not verifies(signature, SPACE, "chat", ADA.id, "general", b"{}")


def test_a_destination_that_cannot_be_encoded_does_not_verify() -> None:
    assert not verifies(sign(ADA, SPACE, "chat", "x", b""), SPACE, "chat", ADA.id, "\ud800", b"")


def test_one_key_has_one_id() -> None:
    raw = base64.b32decode(ADA.id)
    assert public_bytes(ADA.id) == raw[1:33]
    for low in range(1, 8):
        body = bytes([raw[0] | low]) + raw[1:33]
        alias = base64.b32encode(body + nkeys.crc16(bytearray(body)).to_bytes(2, "little")).decode()
        assert alias[0] == "U"
        with pytest.raises(InvalidName):
            public_bytes(alias)
        assert not verify(alias, b"m", ADA.sign(b"m"))


@given(st.text(max_size=60) | st.just(MAL.id), st.binary(max_size=70))
def test_verification_never_raises(key: str, signature: bytes) -> None:
    assert not verify(key, b"message", signature)
