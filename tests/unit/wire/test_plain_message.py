"""A glance at a message and the whole decoding never disagree, whatever was sent."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.errors import MalformedMessage
from tidings.wire.message import (
    MAX_MENTIONS,
    MAX_PARTS,
    MAX_PAYLOAD,
    Addressed,
    Mention,
    Sender,
    TextPart,
    compose,
    decode,
    new_id,
    read_plain,
)
from tools.generated import seeded_key

IDS = [seeded_key(random.Random(seed)).id for seed in range(3)]
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), max_size=60)
optional_ids = st.none() | st.builds(new_id)


@st.composite
def plain(draw: st.DrawFn) -> bytes:
    """What an endpoint sends most: text, and any of the other fields."""
    return compose(
        Sender(draw(st.sampled_from(IDS)), draw(names), draw(st.none() | names)),
        text=draw(texts.filter(str.strip)),
        parts=[TextPart(text) for text in draw(st.lists(texts, max_size=3))],
        mentions=[Mention(each, draw(names)) for each in draw(st.lists(st.sampled_from(IDS), max_size=3))],
        priority=draw(st.sampled_from(["now", "next", "low"])),
        reply_to=draw(optional_ids),
        context=draw(st.none() | st.from_regex(r"[^\x00-\x1f\x7f]{1,20}", fullmatch=True).filter(_is_unicode)),
    ).raw


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)


#: pieces of JSON and of messages that a hostile sender puts where they do not belong
SNIPPETS = (
    *(
        b'"',
        b"\\",
        b"\\u0041",
        b"\\ud800",
        b"\\/",
        b"\n",
        b"\x00",
        b"\x7f",
        b"\xff",
        b"\xc3\xa9",
        b" ",
        b",",
        b"{",
        b"}",
    ),
    *(b"[", b"]", b"null", b"1", b"1e999", b"NaN", b'"id":"x",', b'"raw":"AA==",', b',"raw":""', b'"x":1,', b',"x":2'),
    *(b'"priority":"next",', b'"kind":"data","data":1', b'"role":null,', b"0000-02-30", b"u0022", b'"parts":[],'),
    *(b',"mentions":[]', b',"context":""', b',"reply_to":null', b'"name":"bob",'),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A plain message with a few pieces taken out, doubled, exchanged or put in."""
    payload = draw(plain())
    for _ in range(draw(st.integers(1, 3))):
        first, last = sorted((draw(st.integers(0, len(payload))), draw(st.integers(0, len(payload)))))
        piece = payload[first : min(last, first + 40)]
        place = draw(st.integers(0, len(payload)))
        match draw(st.sampled_from(["insert", "remove", "double", "replace"])):
            case "insert":
                payload = payload[:place] + draw(st.sampled_from(SNIPPETS)) + payload[place:]
            case "remove":
                payload = payload[:first] + payload[first + len(piece) :]
            case "double":
                payload = payload[:place] + piece + payload[place:]
            case "replace":
                found = draw(
                    st.sampled_from([b'"id"', b'"ts"', b'"from"', b'"text"', b'"kind"', b'"name"', b"-", b"2"])
                )
                payload = payload.replace(found, draw(st.sampled_from(SNIPPETS)), 1)
    return payload


#: a value in every field that may be right or wrong, in any order and spelling of JSON
ODD: list[Any] = ["", "x", IDS[0], IDS[0].lower(), IDS[0] + "\n", None, 1, 1.5, [], {}, "next", new_id(), "\u2028"]
ODD += ["2025-02-29T00:00:00.000Z", "2025-11-15T12:00:00.000Z", "2025-11-15T24:00:00.000Z", "a" * 300]
odd = st.sampled_from(ODD)
senders = odd | st.fixed_dictionaries({"id": odd, "name": odd}, optional={"role": odd, "x": odd})
part_lists = odd | st.lists(
    odd | st.fixed_dictionaries({"kind": odd | st.sampled_from(["text", "data"]), "text": odd}), max_size=3
)
documents = st.fixed_dictionaries(
    {"id": odd | st.builds(new_id), "ts": odd, "from": senders, "parts": part_lists},
    optional={"priority": odd, "mentions": odd | st.lists(senders, max_size=2), "reply_to": odd, "context": odd},
)
hostile = (documents | documents.map(lambda d: dict(reversed(d.items())))).map(msgspec.json.encode)


@given(plain() | mutated() | hostile | st.binary(max_size=80))
def test_what_a_glance_takes_the_whole_decoding_takes_and_both_say_the_same(payload: bytes) -> None:
    if (found := read_plain(payload)) is not None:
        message = decode(payload)
        assert found == Addressed(message.sender.id, tuple(mention.id for mention in message.mentions))


@given(plain())
def test_a_glance_is_enough_for_what_an_endpoint_sends(payload: bytes) -> None:
    assert read_plain(payload) is not None


def test_what_a_glance_leaves_to_the_struct_is_in_the_pattern_and_the_other_way_round() -> None:
    """Each field in turn has a value that only one of the two halves of the proof refuses."""
    sender = Sender(IDS[0], "ada", "dev")
    good = compose(sender, text="hi", mentions=[Mention(IDS[1], "b")], reply_to=new_id(), context="c").raw
    document = msgspec.json.decode(good)
    assert read_plain(good) == Addressed(IDS[0], (IDS[1],))
    wrong = {
        "id": new_id().upper(),
        "ts": "2025-02-29T00:00:00.000Z",
        "from": {"id": IDS[0], "name": "a b"},
        "parts": [{"kind": "text", "text": "x"}] * (MAX_PARTS + 1),
        "priority": "soon",
        "mentions": [{"id": IDS[1], "name": "b"}] * (MAX_MENTIONS + 1),
        "reply_to": "x",
        "context": "\x7f",
    }
    for name, value in wrong.items():
        payload = msgspec.json.encode({**document, name: value})
        assert read_plain(payload) is None, name
        with pytest.raises(MalformedMessage):
            decode(payload)
    assert read_plain(compose(sender, text="x").raw.ljust(MAX_PAYLOAD + 1)) is None


@pytest.mark.parametrize(
    "more",
    [
        b',"x":1e999',
        b',"x":99999999999999999999',
        b',"x":{"a":1,"a":2}',
        b',"x":"\\ud800"',
        b',"context":"a","context":"b"',
        b',"from":{"id":"%s","name":"eve"}' % IDS[1].encode(),
        b',"raw":"AA==","raw":"AA=="',
        b',"x":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]',
    ],
)
def test_what_two_readers_might_read_differently_is_left_to_the_strict_one(more: bytes) -> None:
    payload = compose(Sender(IDS[0], "ada"), text="hi").raw[:-1] + more + b"}"
    assert read_plain(payload) is None
    with pytest.raises(MalformedMessage):
        decode(payload)


def test_a_payload_that_nests_without_end_is_malformed_to_both() -> None:
    good = compose(Sender(IDS[0], "ada"), text="hi").raw
    payload = good[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert read_plain(payload) is None
    with pytest.raises(MalformedMessage, match="nests deeper"):
        decode(payload)
