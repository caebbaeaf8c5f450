"""The golden vectors of frames, of control requests and of what the steward signs hold, both ways."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

import schema
from tidings.admin.identity import bundle_identity
from tidings.contract.agents import BeatRequest
from tidings.contract.catalogue import OPERATIONS
from tidings.errors import MalformedFrame, MalformedRecord, TidingsError, UsageError, WireError
from tidings.nats import jwt
from tidings.steward.requests import parse_request
from tidings.wire import frames, roster, rulings, signing
from tidings.wire.envelope import Received, open_record
from tidings.wire.message import decode
from tidings.wire.records import Headers, parse_time, record_time
from tidings.wire.subjects import Subjects, block_shard

SHIPPED: dict[str, Any] = json.loads((schema.FOLDER / "vectors.json").read_text())
CONTROL: dict[str, Any] = json.loads((schema.FOLDER / "control.schema.json").read_text())["$defs"]
SUBJECTS = Subjects(SHIPPED["subjects"]["space"])
SPACE, STEWARD = SHIPPED["keys"]["space"]["id"], SHIPPED["keys"]["steward"]["id"]


def why(vector: dict[str, Any]) -> str:
    return str(vector["why"])


def opened_block(
    frame: frames.Frame, block: frames.Block | frames.Ref, stored: dict[str, Any]
) -> tuple[frames.FrameRecord, ...]:
    if isinstance(block, frames.Block):
        return frames.open_block(block)
    return frames.open_ref(SPACE, frame.epoch, block, bytes.fromhex(stored["stored_hex"]))


def told_of(ref: frames.Ref) -> dict[str, Any]:
    name = ref.name.hex()
    facts = {"size": ref.size, "channel": ref.channel, "name": name, "key_hex": ref.key.hex()}
    return facts | {"seqs": list(ref.seqs), "get": SUBJECTS.block_get(name)}


@pytest.mark.parametrize("vector", SHIPPED["frames"]["valid"], ids=why)
def test_a_frame_opens_as_the_vectors_say(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["frame_hex"])
    frame = frames.decode_frame(data)
    assert frames.frame_id(data) == vector["id"]
    names = ("owner", "epoch", "series", "number")
    assert [getattr(frame, name) for name in names] == [vector[name] for name in names]
    assert (frame.prev and list(frame.prev)) == vector["prev"]
    assert [list(msgspec.to_builtins(each)) for each in frame.lost] == vector["lost"]
    for block, expected in zip(frame.blocks, vector["blocks"], strict=True):
        facts = [getattr(block, name) for name in ("codec", "count", "first", "last", "raw_size")]
        assert facts == [expected[name] for name in ("codec", "count", "first", "last", "raw_size")]
        ref = expected.get("ref", {})
        if isinstance(block, frames.Ref):
            assert told_of(block) | {"stored_hex": ref["stored_hex"]} == ref
        for kept, record in zip(opened_block(frame, block, ref), expected["records"], strict=True):
            assert (kept.seq, record_time(kept.time_ns)) == (record["seq"], record["time"])
            assert (kept.tail, kept.payload.decode()) == (record["subject_tail"], record["payload"])
            assert [list(field) for field in kept.headers] == record["headers"]
            opened = open_record(SUBJECTS, SPACE, f"{SUBJECTS.root}.{kept.tail}", kept.headers, kept.payload)
            assert isinstance(opened, Received)


@pytest.mark.parametrize("vector", SHIPPED["frames"]["invalid"], ids=why)
def test_a_frame_or_a_block_that_is_none_is_refused_and_nothing_swells(vector: dict[str, str]) -> None:
    data = bytes.fromhex(vector["frame_hex"])
    if vector["refused"] == "frame":
        with pytest.raises(MalformedFrame):
            frames.decode_frame(data)
        return
    frame = frames.decode_frame(data)
    (block,) = frame.blocks
    with pytest.raises(MalformedFrame):
        opened_block(frame, block, vector)


@pytest.mark.parametrize("vector", SHIPPED["sealed_blocks"], ids=lambda vector: vector["name"])
def test_whoever_seals_a_block_derives_what_the_vectors_say(vector: dict[str, str]) -> None:
    sealer = frames.BlockSealer(bytes.fromhex(vector["secret_hex"]), vector["space_id"], vector["epoch"])
    ref = msgspec.msgpack.decode(bytes.fromhex(vector["ref_hex"]), type=frames.Ref)
    sealed = sealer.seal(vector["channel"], bytes.fromhex(vector["block_hex"]), ref.packed_seqs)
    assert (sealed.name, sealed.data.hex(), sealed.ref.hex()) == (
        vector["name"],
        vector["data_hex"],
        vector["ref_hex"],
    )
    assert ref.key.hex() == vector["key_hex"]
    assert frames.context(vector["space_id"], vector["epoch"], vector["channel"], ref).hex() == vector["context_hex"]


def test_the_shard_of_a_block_is_the_one_of_the_vectors() -> None:
    assert [block_shard(each["name"]) for each in SHIPPED["block_shards"]] == [
        each["shard"] for each in SHIPPED["block_shards"]
    ]


def test_what_we_pack_is_what_the_vectors_have() -> None:
    first = SHIPPED["frames"]["valid"][0]
    frame = frames.decode_frame(bytes.fromhex(first["frame_hex"]))
    (block,) = frame.blocks
    assert isinstance(block, frames.Block)
    records = frames.open_block(block)
    packed = frames.encode_block(records)
    assert frames.open_block(msgspec.msgpack.decode(packed, type=frames.Block)) == records
    again = frames.encode_frame(
        frame.owner, frame.epoch, frame.series, frame.number, [msgspec.msgpack.encode(block)], prev=frame.prev
    )
    assert again.hex() == first["frame_hex"]


def bundle_file(folder: Path, bundle: dict[str, Any]) -> Path:
    path = folder / "ada.tidings.json"
    path.write_text(json.dumps(bundle))
    path.chmod(0o600)
    return path


def test_a_bundle_is_an_identity(tmp_path: Path) -> None:
    for bundle in SHIPPED["bundles"]["valid"]:
        identity = bundle_identity(bundle_file(tmp_path, bundle))
        assert (identity.id, identity.name) == (bundle["agent"]["id"], bundle["agent"]["name"])
        assert (identity.space_id, identity.steward_key) == (SPACE, STEWARD)
        claims = jwt.decode(identity.token())
        assert (claims["sub"], claims["iss"]) == (identity.id, SHIPPED["keys"]["agents"]["id"])


@pytest.mark.parametrize("vector", SHIPPED["bundles"]["invalid"], ids=why)
def test_what_is_no_bundle_is_refused(vector: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TidingsError):
        bundle_identity(bundle_file(tmp_path, vector["bundle"]))


def test_beats_are_read_or_refused_as_the_vectors_say() -> None:
    for vector in SHIPPED["beats"]["valid"]:
        BeatRequest.operation.decode(vector["beat"])
        Draft202012Validator(CONTROL["presence beat"] | {"$defs": CONTROL}).validate(
            {"op": "12345678", "do": "beat", **vector["beat"]}
        )
    for vector in SHIPPED["beats"]["invalid"]:
        with pytest.raises(UsageError):
            BeatRequest.operation.decode(vector["beat"])


@pytest.mark.parametrize("vector", SHIPPED["exchanges"], ids=why)
def test_a_request_is_taken_or_refused_by_steward_and_schema_as_its_answer_says(vector: dict[str, Any]) -> None:
    service = vector["subject"].split(".")[3]
    known = CONTROL.get(f"{service} {vector['request']['do']}")
    refused = vector["answer"].get("error", {}).get("code") == "usage"
    assert (
        known is None or not Draft202012Validator(known | {"$defs": CONTROL}).is_valid(vector["request"])
    ) is refused
    data = json.dumps(vector["request"]).encode()
    if refused:
        with pytest.raises(UsageError) as error:
            parse_request(SUBJECTS, vector["subject"], data)
        assert str(error.value) == vector["answer"]["error"]["message"]
        return
    parse_request(SUBJECTS, vector["subject"], data)
    if vector["answer"]["ok"]:
        OPERATIONS[f"{service} {vector['request']['do']}"].read_answer(json.dumps(vector["answer"]).encode())
    lines = vector["answer"].get("records") or [vector["answer"].get("task")]
    for line in filter(None, lines):
        fields = Headers.parse(base64.b64decode(line["headers"])).fields
        opened = open_record(SUBJECTS, SPACE, line["subject"], fields, base64.b64decode(line["payload"]))
        assert isinstance(opened, Received)
        assert record_time(parse_time(line["time"])) == line["time"]


@pytest.mark.parametrize("vector", SHIPPED["deltas"], ids=why)
def test_a_delta_is_believed_or_not_as_the_vectors_say(vector: dict[str, Any]) -> None:
    fields = (("Td-Sig", vector["signature"]),) if vector["signature"] else ()
    found = roster.open_delta(SUBJECTS, SPACE, STEWARD, vector["subject"], fields, vector["payload"].encode())
    assert (found if isinstance(found, str) else None) == vector["refused"]
    if isinstance(found, roster.Delta):
        assert msgspec.json.encode(found).decode() == vector["payload"]


@pytest.mark.parametrize("vector", SHIPPED["rulings"], ids=why)
def test_a_ruling_counts_or_not_as_the_vectors_say(vector: dict[str, Any]) -> None:
    tail, payload = SUBJECTS.tail(vector["subject"]), vector["payload"].encode()
    good = rulings.verify_ruling(vector["signature"], SPACE, STEWARD, tail, payload)
    assert good is (vector["refused"] != "signature")
    if vector["refused"] == "malformed":
        with pytest.raises(MalformedRecord):
            rulings.decode(tail.split(".")[0], payload)
    else:
        assert rulings.encode(rulings.decode(tail.split(".")[0], payload)) == payload


@pytest.mark.parametrize("vector", SHIPPED["results"], ids=why)
def test_a_result_is_believed_or_not_as_the_vectors_say(vector: dict[str, Any]) -> None:
    payload, destination = base64.b64decode(vector["result"]), f"{vector['asker']}.{vector['id']}"
    good = signing.verifies(vector["sig"], SPACE, "result", vector["worker"], destination, payload)
    assert good is (vector["refused"] != "signature")
    if vector["refused"] == "malformed":
        with pytest.raises(WireError):
            decode(payload)
    else:
        assert (decode(payload).sender.id == vector["worker"]) is (vector["refused"] != "sender_mismatch")
