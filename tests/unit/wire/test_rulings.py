"""Ruling records decode strictly, and only as what they are."""

import base64
import random

import msgspec
import pytest

from tidings.errors import InvalidName, MalformedRecord
from tidings.wire.keys import ACCOUNT
from tidings.wire.rulings import (
    Access,
    Channel,
    Defaults,
    Lease,
    Link,
    Member,
    Parts,
    RulingRecord,
    Space,
    decode,
    encode,
    sign_ruling,
    verify_ruling,
)
from tools.generated import PUBACK, seeded_key

_RNG = random.Random(7)
STEWARD = seeded_key(_RNG)
SPACE_ID = seeded_key(_RNG, ACCOUNT).id
ADA = seeded_key(_RNG).id

RECORDS: list[tuple[str, RulingRecord]] = [
    ("member", Member(op="1", state="in", pattern="team.>", at="2025-06-01T10:00:00Z")),
    (
        "acl",
        Access(
            op="2",
            name="ada",
            roles=("reviewer",),
            read=(">",),
            post=("team.*",),
            manage=("team.>",),
            jwt="a.b.c",
            succeeds=ADA,
            iat=1_750_000_000,
        ),
    ),
    ("channel", Channel(op="3", name="team.backend", cls="live", replay=True, replay_window=3600, by=ADA)),
    ("link", Link(op="4", link="east", state="on", origin=SPACE_ID, channels={"general": "east.general"})),
    ("lease", Lease(op="5", holder="one", host="box", pid=12, key=STEWARD.id)),
    (
        "space",
        Space(
            op="6",
            defaults=Defaults(cls="live", replay=False, replay_window=60),
            channels="listed",
            parts=Parts(archive="off"),
            keep_age=86_400,
            keep_bytes=1 << 30,
            steward_key=STEWARD.id,
        ),
    ),
]


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_a_record_survives_the_wire(kind: str, record: RulingRecord) -> None:
    assert decode(kind, encode(record)) == record


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_fields_of_a_newer_steward_are_ignored(kind: str, record: RulingRecord) -> None:
    newer = {**msgspec.json.decode(encode(record)), "mood": {"of": ["the", "day"]}}
    assert decode(kind, msgspec.json.encode(newer)) == record


@pytest.mark.parametrize(("kind", "record"), RECORDS)
def test_a_record_without_an_operation_id_is_malformed(kind: str, record: RulingRecord) -> None:
    fields = msgspec.json.decode(encode(record))
    del fields["op"]
    with pytest.raises(MalformedRecord):
        decode(kind, msgspec.json.encode(fields))


def test_the_class_of_a_channel_travels_as_class() -> None:
    assert b'"class":"live"' in encode(Channel(op="1", name="general", cls="live"))


def test_delivery_counts_unless_a_record_switches_it_off_and_the_archive_does_not() -> None:
    space = decode("space", b'{"op":"1"}')
    assert isinstance(space, Space)
    assert space.parts == Parts(deliver="on", archive="off")
    assert space.channels == "open"


def _nested(depth: int) -> bytes:
    """A member record with a field that makes it `depth` deep."""
    return b'{"op":"1","state":"in","pattern":"a","x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_of_32_is_accepted_and_33_is_not() -> None:
    decode("member", _nested(32))
    with pytest.raises(MalformedRecord, match="nests deeper than 32"):
        decode("member", _nested(33))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("member", PUBACK),
        ("member", b""),
        ("member", b"null"),
        ("member", b"[]"),
        ("member", b"\xff\xfe"),
        ("member", _nested(200_000)),
        ("member", b'{"op":"1","state":"in","pattern":"a","pattern":"b"}'),
        ("member", b'{"op":"1","state":"in","pattern":"a","x":{"y":1,"y":2}}'),
        ("member", b'{"op":"1","state":"in","pattern":"a","x":NaN}'),
        ("member", b'{"op":"1","state":"in","pattern":"a","x":-Infinity}'),
        ("member", b'{"op":"1","state":"in","pattern":"a","x":1e999}'),
        ("member", b'{"op":"1","state":"in","pattern":"a","x":"\\ud800"}'),
        ("member", b'{"op":"1","state":"in","pattern":"a"} trailing'),
        ("member", b'{"op":"1","state":"maybe","pattern":"a"}'),
        ("member", b'{"op":"1","state":"in","pattern":"a..b"}'),
        ("member", b'{"op":"1","state":"in","pattern":"a.>.b"}'),
        ("member", b'{"op":"1","state":"in","pattern":7}'),
        ("member", b'{"op":"","state":"in","pattern":"a"}'),
        ("member", b'{"op":1,"state":"in","pattern":"a"}'),
        ("member", b'{"op":"1","v":2,"state":"in","pattern":"a"}'),
        ("member", b'{"op":"1","v":true,"state":"in","pattern":"a"}'),
        ("acl", b'{"op":"1","name":"a b"}'),
        ("acl", b'{"op":"1","name":"a","read":["x",">.y"]}'),
        ("acl", b'{"op":"1","name":"a","post":["x y"]}'),
        ("acl", b'{"op":"1","name":"a","manage":[""]}'),
        ("acl", b'{"op":"1","name":"a","roles":["a.b"]}'),
        ("acl", b'{"op":"1","name":"a","read":">"}'),
        ("acl", b'{"op":"1","name":"a","revoked":1}'),
        ("acl", b'{"op":"1","name":"a","succeeds":"bob"}'),
        ("acl", b'{"op":"1","name":"a","iat":-1}'),
        ("acl", b'{"op":"1","name":"a","iat":1.5}'),
        ("channel", b'{"op":"1","name":"team.*"}'),
        ("channel", b'{"op":"1","name":"a","class":"eternal"}'),
        ("channel", b'{"op":"1","name":"a","by":"bob"}'),
        ("channel", b'{"op":"1","name":"a","description":"' + b"d" * 201 + b'"}'),
        ("channel", b'{"op":"1","name":"a","instructions":"' + b"i" * 2001 + b'"}'),
        ("link", b'{"op":"1","link":"a.b","state":"on","origin":"' + SPACE_ID.encode() + b'","channels":{}}'),
        ("link", b'{"op":"1","link":"a","state":"on","origin":"' + ADA.encode() + b'","channels":{}}'),
        ("link", b'{"op":"1","link":"a","state":"on","origin":"' + SPACE_ID.encode() + b'","channels":{"a":"b.>"}}'),
        ("link", b'{"op":"1","link":"a","state":"on","origin":"' + SPACE_ID.encode() + b'","channels":{"*":"b"}}'),
        ("lease", b'{"op":"1","holder":"a","host":"h","pid":1,"key":"not a key"}'),
        ("lease", b'{"op":"1","holder":"a","host":"h","pid":"1","key":"' + STEWARD.id.encode() + b'"}'),
        ("space", b'{"op":"1","channels":"closed"}'),
        ("space", b'{"op":"1","parts":{"deliver":true}}'),
        ("space", b'{"op":"1","defaults":{"class":"eternal"}}'),
        ("space", b'{"op":"1","steward_key":"' + STEWARD.id[:-1].encode() + b'"}'),
        ("chat", b'{"op":"1"}'),
    ],
)
def test_what_does_not_decode_strictly_is_malformed(kind: str, payload: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(kind, payload)


def test_a_name_that_does_not_fit_is_refused_when_the_record_is_made() -> None:
    with pytest.raises(InvalidName):
        Access(op="1", name="not a token")


def test_encode_refuses_what_decode_would_refuse() -> None:
    with pytest.raises(MalformedRecord):
        encode(Channel(op="1", name="general", description="d" * 201))


def test_a_ruling_verifies_only_in_its_space_on_its_subject_under_its_key() -> None:
    tail, payload = f"acl.{ADA}", encode(Access(op="1", name="ada"))
    signature = sign_ruling(STEWARD, SPACE_ID, tail, payload)
    other = seeded_key(random.Random(8))

    assert verify_ruling(signature, SPACE_ID, STEWARD.id, tail, payload)
    assert not verify_ruling(signature, other.id, STEWARD.id, tail, payload)
    assert not verify_ruling(signature, SPACE_ID, other.id, tail, payload)
    assert not verify_ruling(signature, SPACE_ID, STEWARD.id, f"acl.{other.id}", payload)
    assert not verify_ruling(signature, SPACE_ID, STEWARD.id, tail, payload + b" ")
    assert not verify_ruling(None, SPACE_ID, STEWARD.id, tail, payload)


def test_the_signed_bytes_of_a_ruling_are_those_of_the_design() -> None:
    payload = b'{"op":"1"}'
    signed = b"td1\n" + SPACE_ID.encode() + b"\nruling\n" + STEWARD.id.encode() + b"\nspace\n" + payload
    expected = base64.urlsafe_b64encode(STEWARD.sign(signed)).decode().rstrip("=")
    assert sign_ruling(STEWARD, SPACE_ID, "space", payload) == expected
