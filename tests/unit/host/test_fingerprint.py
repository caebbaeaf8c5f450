"""The fingerprint of a request: the same request, the same bytes; any other, others."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from tidings.errors import MalformedMessage
from tidings.host import fingerprint as module
from tidings.host.fingerprint import FingerprintFields, fingerprint
from tidings.wire.message import ArtifactPart, DataPart, ExtensionPart, Part, TextPart

PLAIN = FingerprintFields(space="SPACE", sender="UADA", kind="dm", destination="UBOB", max_age=1000, text="hello")
OTHER: dict[str, Any] = {
    "space": "OTHER",
    "sender": "UEVE",
    "kind": "chat",
    "destination": "UEVE",
    "max_age": 1001,
    "text": "hello ",
    "data": None,
    "parts": (TextPart("hello"),),
    "mentions": ("UBOB",),
    "reply_to": "00000000-0000-7000-8000-000000000000",
    "context": "lunch",
    "priority": "now",
}
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_it_is_32_bytes_and_stays_the_same_for_ever() -> None:
    assert fingerprint(PLAIN).hex() == "c7168cb1918c1d4a73dc17fbb333ef9f03d85ea424004936e91e831377e85950"


def test_every_field_counts() -> None:
    assert set(OTHER) == {field.name for field in fields(FingerprintFields)}
    seen = {fingerprint(PLAIN), *(fingerprint(replace(PLAIN, **{name: value})) for name, value in OTHER.items())}
    assert len(seen) == len(OTHER) + 1


@given(json)
def test_the_order_of_keys_does_not_count(value: Any) -> None:
    one, two = replace(PLAIN, data={"a": value, "b": 1}), replace(PLAIN, data={"b": 1, "a": value})
    assert fingerprint(one) == fingerprint(two)


@given(json, json)
def test_other_data_is_another_request(one: Any, two: Any) -> None:
    same = repr(one) == repr(two) or one == two
    assert same or fingerprint(replace(PLAIN, data=one)) != fingerprint(replace(PLAIN, data=two))


def test_kinds_of_parts_are_not_taken_for_each_other() -> None:
    made: list[tuple[Part, ...]] = [
        (TextPart("x"),),
        (DataPart("x"),),
        (DataPart({"kind": "text", "text": "x"}),),
        (ExtensionPart("com.example.x", {"kind": "com.example.x"}),),
        (ArtifactPart("x", "text/plain", "sha256:" + "0" * 64, 1),),
        (TextPart("x"), TextPart("y")),
        (TextPart("y"), TextPart("x")),
        (TextPart("x\ny"),),
    ]
    assert len({fingerprint(replace(PLAIN, parts=parts)) for parts in made}) == len(made)


@pytest.mark.parametrize("data", [float("nan"), object(), b"bytes"])
def test_what_is_not_json_is_refused(data: Any) -> None:
    with pytest.raises(MalformedMessage):
        fingerprint(replace(PLAIN, data=data))


@given(st.text(st.characters(), max_size=40))
@example("\x7f")
@example("\u00e9\U0001f600")
@example("\ud800")
@example('"\\/\b\f\n\r\t\x00\x1f')
def test_the_quick_way_writes_what_the_slow_one_writes(text: str) -> None:
    asked = replace(PLAIN, parts=(TextPart(text), TextPart("x")), text=text, context=text, mentions=(text,))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_quickly", lambda _fields: None)
        slow = fingerprint(asked)
    assert fingerprint(asked) == slow


def test_plain_text_takes_the_quick_way() -> None:
    assert module._quickly({"text": "hello"}) == b'{"text":"hello"}'
