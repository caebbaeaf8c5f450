"""The shipped schema and golden vectors are current, and every vector holds."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

import schema
from golden import cast, grammar
from tidings.errors import BadSignature, MalformedMessage, WireError
from tidings.model.rulebook import Rulebook
from tidings.wire import message, names, seal, signing, strict_json, subjects
from tidings.wire.envelope import Received, Refused, open_record
from tidings.wire.message import decode
from tidings.wire.names import covers_pattern
from tidings.wire.records import Headers, own_fields, record_mark, refused_headers
from tidings.wire.rulings import Link

SHIPPED: dict[str, Any] = json.loads((schema.FOLDER / "vectors.json").read_text())
MESSAGE_SCHEMA: dict[str, Any] = json.loads((schema.FOLDER / "message.schema.json").read_text())
VALIDATOR = Draft202012Validator(MESSAGE_SCHEMA)


def why(vector: dict[str, Any]) -> str:
    return str(vector["why"])


@pytest.mark.parametrize("name", schema.contents())
def test_the_shipped_file_is_what_would_be_generated_now(name: str) -> None:
    assert (schema.FOLDER / name).read_text() == schema.contents()[name], "run: make schema"


def test_nothing_else_is_shipped_beside_the_generated_files() -> None:
    assert {path.name for path in schema.FOLDER.iterdir()} == set(schema.contents())


def test_the_seeds_give_the_keys() -> None:
    prefixes = {"U": signing.USER, "A": signing.ACCOUNT}
    for vector in SHIPPED["keys"].values():
        byte = bytes.fromhex(vector["seed_hex"])[0]
        made = cast.key_of(byte, prefixes[vector["id"][0]])
        assert (made.id, made.seed) == (vector["id"], vector["seed"])
        assert signing.KeyPair(vector["seed"]).id == vector["id"]


CHECKS: dict[str, Callable[[str], bool]] = {
    "token": names.is_token,
    "channel": names.is_channel,
    "pattern": names.is_pattern,
    "agent_id": names.is_agent_id,
    "message_id": message.is_message_id,
}


@pytest.mark.parametrize("kind", CHECKS)
def test_names_are_valid_or_not_as_the_vectors_say(kind: str) -> None:
    assert set(CHECKS) == set(SHIPPED["names"])
    vector = SHIPPED["names"][kind]
    assert [name for name in vector["valid"] if not CHECKS[kind](name)] == []
    assert [name for name in vector["invalid"] if CHECKS[kind](name)] == []


@pytest.mark.parametrize("vector", SHIPPED["covers"], ids=lambda v: f"{v['wide']} {v['narrow']}")
def test_a_pattern_covers_as_the_vectors_say(vector: dict[str, Any]) -> None:
    assert covers_pattern(vector["wide"], vector["narrow"]) is vector["covers"]


def test_tags_and_shards_are_as_the_vectors_say() -> None:
    for vector in SHIPPED["tags"]:
        assert subjects.tag(bytes.fromhex(vector["secret"]), vector["text"]) == vector["tag"]
        assert subjects.is_tag(vector["tag"])
    for vector in SHIPPED["shards"]:
        assert subjects.shard_of(vector["owner"]) == vector["shard"]
    assert {vector["shard"] for vector in SHIPPED["shards"]} == set(range(subjects.SHARDS))


def test_marks_of_records_are_as_the_vectors_say() -> None:
    for vector in SHIPPED["marks"]:
        assert record_mark(int(vector["time_ns"]), vector["subject"], vector["payload"].encode()) == vector["mark"]


@pytest.mark.parametrize("vector", SHIPPED["subjects"]["valid"], ids=lambda v: v["type"])
def test_subjects_are_built_and_parsed_as_the_vectors_say(vector: dict[str, Any]) -> None:
    spelled = subjects.Subjects(SHIPPED["subjects"]["space"])
    assert type(spelled.parse(vector["subject"])).__name__ == vector["type"]
    if "builder" in vector:
        assert getattr(spelled, vector["builder"])(*vector["arguments"]) == vector["subject"]


@pytest.mark.parametrize("subject", SHIPPED["subjects"]["invalid"])
def test_subjects_that_are_nobodys_do_not_parse(subject: str) -> None:
    assert subjects.Subjects(SHIPPED["subjects"]["space"]).parse(subject) is None


@pytest.mark.parametrize("vector", SHIPPED["signatures"], ids=lambda v: v["kind"])
def test_signed_bytes_and_signatures_are_as_the_vectors_say(vector: dict[str, str]) -> None:
    fields = [vector[name] for name in ("space_id", "kind", "sender", "destination")]
    payload = vector["payload"].encode()
    assert signing.signed_bytes(*fields, payload).hex() == vector["signed_bytes_hex"]  # type: ignore[call-arg, arg-type]
    assert signing.verifies(vector["signature"], *fields, payload)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("vector", SHIPPED["bad_signatures"], ids=why)
def test_a_signature_of_anything_else_or_spelled_otherwise_does_not_verify(vector: dict[str, str]) -> None:
    fields = [vector[name] for name in ("signature", "space_id", "kind", "sender", "destination")]
    assert not signing.verifies(*fields, vector["payload"].encode())  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("vector", SHIPPED["bad_seals"], ids=why)
def test_a_seal_that_does_not_hold_is_not_opened(vector: dict[str, str]) -> None:
    refusal = BadSignature if vector["seen_by"] == "seal" else MalformedMessage
    with pytest.raises(refusal):
        seal.open_sealed(cast.BOB, vector["sender"], decode(vector["sealed"].encode()))


def test_what_was_sealed_is_opened_and_says_what_it_said() -> None:
    for vector in SHIPPED["sealed"]:
        assert cast.BOB.shared_with(vector["sender"]).hex() == vector["shared_hex"]
        opened = seal.open_sealed(cast.BOB, vector["sender"], decode(vector["sealed"].encode()))
        assert opened == replace(decode(vector["message"].encode()), raw=vector["sealed"].encode())


@pytest.mark.parametrize("vector", SHIPPED["linked"], ids=why)
def test_a_record_that_came_over_a_link_opens_or_not_as_the_vectors_say(vector: dict[str, Any]) -> None:
    rules = Rulebook("LOG_main")
    for row in sorted(SHIPPED["links"], key=lambda each: int(each["seq"])):
        rules.put_link(row["seq"], msgspec.convert({**row, "op": "told"}, Link))
    fields = Headers.parse(vector["block"].encode()).fields
    asked = (subjects.Subjects("main"), SHIPPED["keys"]["space"]["id"], vector["subject"], fields)
    found = open_record(*asked, vector["payload"].encode(), rules.admits_at(vector["seq"], int(vector["time_ns"])))
    assert (found.reason if isinstance(found, Refused) else None) == vector["refused"]
    unknown = open_record(*asked, vector["payload"].encode())
    assert isinstance(unknown, Refused)
    assert unknown.reason == "wrong_kind"
    if isinstance(found, Received):
        record = rules.link_at(found.link, vector["seq"])
        assert record is not None
        space = record.space if record.origin == found.origin else ""
        assert names.foreign_name(found.message.sender.name, found.sender, space, found.origin) == vector["shown"]


@pytest.mark.parametrize("vector", SHIPPED["records"], ids=why)
def test_a_record_is_opened_or_refused_for_the_reason_the_vectors_say(vector: dict[str, Any]) -> None:
    space = subjects.Subjects(SHIPPED["subjects"]["space"])
    payload = vector["payload"].encode() + b" " * vector.get("blanks", 0)
    fields = Headers.parse(vector["block"].encode()).fields
    opened = open_record(space, SHIPPED["keys"]["space"]["id"], vector["subject"], fields, payload)
    assert (None if isinstance(opened, Received) else opened.reason) == vector["refused"]


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(MESSAGE_SCHEMA)
    assert MESSAGE_SCHEMA["$schema"] == schema.DIALECT


@pytest.mark.parametrize("vector", SHIPPED["messages"]["valid"], ids=why)
def test_a_valid_message_decodes_and_fits_the_schema(vector: dict[str, str]) -> None:
    payload = vector["payload"].encode()
    message = decode(payload)
    assert message.text == vector["text"]
    assert message.raw == payload
    VALIDATOR.validate(json.loads(payload))


@pytest.mark.parametrize("vector", SHIPPED["messages"]["invalid"], ids=why)
def test_an_invalid_message_is_refused_by_whoever_can_see_it(vector: dict[str, str]) -> None:
    payload = vector["payload"].encode()
    with pytest.raises(WireError):
        decode(payload)
    if vector["seen_by"] == "schema":
        assert not VALIDATOR.is_valid(strict_json.loads(payload))


@pytest.mark.parametrize("vector", SHIPPED["headers"], ids=why)
def test_header_blocks_are_read_as_the_vectors_say(vector: dict[str, Any]) -> None:
    block = vector["block"].encode()
    if vector.get("malformed"):
        with pytest.raises(WireError):
            Headers.parse(block)
        return
    headers = Headers.parse(block)
    own = own_fields(headers, grammar.POLICIES[vector["policy"]])
    assert headers.status == vector["status"]
    assert [list(field) for field in own] == vector["own"]
    assert list(refused_headers(own)) == vector["refused"]
