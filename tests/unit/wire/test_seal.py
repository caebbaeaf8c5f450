"""What is sealed opens for its target, from its sender, under its id; everything else is refused by name."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schema
from golden.cast import ADA, BOB
from tidings.errors import BadSignature, InvalidName, MalformedMessage, TooLarge
from tidings.wire.message import (
    MAX_PAYLOAD,
    ArtifactPart,
    Mention,
    Message,
    Part,
    Sender,
    TextPart,
    compose,
    decode,
    new_id,
)
from tidings.wire.seal import MAX_SEALED, SEALED_KIND, is_sealed, open_sealed, seal_message
from tidings.wire.signing import KeyPair

MAL = KeyPair.generate()
SAYS = Sender(ADA.id, "ada", "planner")
VECTORS: list[dict[str, str]] = json.loads((schema.FOLDER / "vectors.json").read_text())["sealed"]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


def changed(sealed: Message, **fields: Any) -> Message:
    document = json.loads(sealed.raw)
    return decode(json.dumps(document | fields).encode())


def part(**fields: Any) -> dict[str, Any]:
    return {"kind": SEALED_KIND, **fields}


@given(text, values, st.none() | text.filter(lambda t: t and t.isprintable()))
def test_what_is_sealed_opens_as_it_was(said: str, data: Any, context: str | None) -> None:
    parts: list[Part] = [ArtifactPart("plan.md", "text/markdown", "sha256:" + "0" * 64, 3)]
    message = compose(
        SAYS,
        text=said,
        data=data,
        parts=parts,
        priority="now",
        mentions=[Mention(BOB.id, "bob")],
        reply_to=new_id(),
        context=context,
    )
    sealed = seal_message(ADA, BOB.id, message)
    assert open_sealed(BOB, ADA.id, sealed) == msgspec.structs.replace(message, raw=sealed.raw)
    assert open_sealed(ADA, ADA.id, sealed, target_id=BOB.id).parts == message.parts, "a sender reads its own"


def test_outside_only_id_time_sender_and_priority_can_be_seen() -> None:
    message = compose(
        SAYS, text="the secret", priority="low", mentions=[Mention(BOB.id, "bob")], reply_to=new_id(), context="plan"
    )
    sealed = seal_message(ADA, BOB.id, message)
    seen = json.loads(sealed.raw)
    assert set(seen) == {"id", "ts", "from", "priority", "parts"}
    assert set(seen["parts"][0]) == {"kind", "v", "n", "ct"}
    assert (sealed.id, sealed.ts, sealed.sender, sealed.priority) == (message.id, message.ts, message.sender, "low")
    assert is_sealed(sealed)
    assert not is_sealed(message)
    assert b"the secret" not in sealed.raw
    assert base64.b64encode(b"the secret")[:10] not in sealed.raw


def test_the_same_message_is_never_sealed_to_the_same_bytes() -> None:
    message = compose(SAYS, text="hello")
    assert seal_message(ADA, BOB.id, message).raw != seal_message(ADA, BOB.id, message).raw


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_refused(place: int, flip: int) -> None:
    sealed = seal_message(ADA, BOB.id, compose(SAYS, text="hello"))
    body = json.loads(sealed.raw)["parts"][0]
    for name in ("n", "ct"):
        raw = bytearray(base64.b64decode(body[name]))
        raw[place % len(raw)] ^= flip
        tampered = changed(sealed, parts=[body | {name: base64.b64encode(raw).decode()}])
        with pytest.raises(BadSignature):
            open_sealed(BOB, ADA.id, tampered)


def test_another_target_sender_id_or_direction_is_refused() -> None:
    sealed = seal_message(ADA, BOB.id, compose(SAYS, text="hello"))
    for key, sender, message in (
        (MAL, ADA.id, sealed),
        (BOB, MAL.id, sealed),
        (BOB, ADA.id, changed(sealed, id=new_id())),
        (BOB, BOB.id, sealed),
        (ADA, BOB.id, sealed),  # turned around: sent back to its sender as if the target had said it
        (BOB, "U" + "A" * 55, sealed),
    ):
        with pytest.raises(BadSignature):
            open_sealed(key, sender, message)


@pytest.mark.parametrize(
    "body",
    [
        part(),
        part(v=2, n="", ct=""),
        part(v=1, n="AAAA", ct="AAAA"),
        part(v=1, n=base64.b64encode(bytes(24)).decode(), ct="not base64!"),
        part(v=1, n=base64.b64encode(bytes(24)).decode(), ct=7),
        part(v=1, n=base64.b64encode(bytes(24)).decode(), ct=base64.b64encode(bytes(15)).decode()),
        part(v=[1], n=None, ct=None),
    ],
)
def test_a_part_that_is_not_what_it_claims_is_malformed(body: dict[str, Any]) -> None:
    sealed = changed(seal_message(ADA, BOB.id, compose(SAYS, text="hello")), parts=[body])
    with pytest.raises(MalformedMessage):
        open_sealed(BOB, ADA.id, sealed)


def test_what_is_not_sealed_is_not_opened() -> None:
    with pytest.raises(MalformedMessage, match="not sealed"):
        open_sealed(BOB, ADA.id, compose(SAYS, text="hello"))


@pytest.mark.parametrize(
    "inside",
    [
        b"",
        b"[]",
        b"{}",
        b'{"parts":[]}',
        b'{"parts":[{"kind":"text","text":"a"}],"parts":[{"kind":"text","text":"b"}]}',
        b'{"parts":[{"kind":"data","data":NaN}]}',
        b'{"parts":[{"kind":"text","text":"a"}],"reply_to":"x"}',
        b"\xff",
    ],
)
def test_hostile_plaintext_is_malformed(inside: bytes) -> None:
    with pytest.raises(MalformedMessage):
        open_sealed(BOB, ADA.id, sealing(inside))


def test_what_is_inside_cannot_change_who_says_it_or_when() -> None:
    inside = {"parts": [{"kind": "text", "text": "a"}], "from": {"id": MAL.id, "name": "mal"}, "id": new_id()}
    sealed = sealing(json.dumps(inside | {"priority": "now", "ts": "2000-01-01T00:00:00.000Z"}).encode())
    opened = open_sealed(BOB, ADA.id, sealed)
    assert (opened.sender, opened.id, opened.ts, opened.priority) == (SAYS, sealed.id, sealed.ts, "next")
    assert opened.parts == (TextPart("a"),)


def sealing(plaintext: bytes) -> Message:
    """A sealed message with any plaintext, as a hostile sender can make it."""
    from nacl import bindings

    from tidings.wire.seal import _bound_to, pair_key

    sealed = seal_message(ADA, BOB.id, compose(SAYS, text="hello"))
    nonce = bytes(24)
    ct = bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(
        plaintext, _bound_to(BOB.id, sealed.id), nonce, pair_key(ADA, ADA.id, BOB.id)
    )
    body = part(v=1, n=base64.b64encode(nonce).decode(), ct=base64.b64encode(ct).decode())
    return changed(sealed, parts=[body])


def test_the_largest_plaintext_fits_a_payload_and_one_byte_more_is_refused() -> None:
    long_name = Sender(ADA.id, "n" * 64, "r" * 64)
    around = len('{"parts":[{"kind":"text","text":""}]}')
    largest = compose(long_name, text="x" * (MAX_SEALED - around), priority="low")
    sealed = seal_message(ADA, BOB.id, largest)
    assert MAX_PAYLOAD - 1024 <= len(sealed.raw) <= MAX_PAYLOAD
    assert open_sealed(BOB, ADA.id, sealed).text == largest.text
    with pytest.raises(TooLarge):
        seal_message(ADA, BOB.id, compose(long_name, text="x" * (MAX_SEALED - around + 1)))


def test_only_the_sender_seals_and_only_for_an_agent() -> None:
    with pytest.raises(BadSignature):
        seal_message(MAL, BOB.id, compose(SAYS, text="hello"))
    for target in ("bob", "U" + "A" * 55, BOB.id.lower()):
        with pytest.raises(InvalidName):
            seal_message(ADA, target, compose(SAYS, text="hello"))


def test_a_note_to_oneself_is_sealed_too() -> None:
    sealed = seal_message(ADA, ADA.id, compose(SAYS, text="remember"))
    assert open_sealed(ADA, ADA.id, sealed).text == "remember"


@pytest.mark.parametrize("vector", VECTORS)
def test_the_golden_vector_holds(vector: dict[str, str]) -> None:
    message = decode(vector["message"].encode())
    assert ADA.shared_with(BOB.id).hex() == BOB.shared_with(ADA.id).hex() == vector["shared_hex"]
    made = seal_message(ADA, BOB.id, message, nonce=bytes.fromhex(vector["nonce_hex"]))
    assert made.raw.decode() == vector["sealed"]
    opened = open_sealed(BOB, vector["sender"], decode(vector["sealed"].encode()))
    assert msgspec.structs.replace(opened, raw=message.raw) == message
