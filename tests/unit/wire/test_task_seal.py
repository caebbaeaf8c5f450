"""Sealed tasks: whoever of the readers gets one can open it, and nobody else."""

import json

import msgspec
import pytest

import schema
from golden import cast
from tidings.errors import BadSignature, MalformedMessage, TooLarge
from tidings.wire import message as wire
from tidings.wire.message import ExtensionPart, Message, Sender, compose
from tidings.wire.seal import (
    MOST_READERS,
    SEALED_TASK,
    TASK_PART,
    is_sealed_task,
    open_task,
    readers_of,
    seal_task,
)
from tidings.wire.signing import KeyPair, verifies

ADA, RITA, ROLF, EVE = (KeyPair.generate() for _ in range(4))
TERMS = ExtensionPart(TASK_PART, {"kind": TASK_PART, "deadline_s": 60})


def asked(text: str = "is this right?", parts: tuple[ExtensionPart, ...] = (TERMS,)) -> Message:
    return compose(Sender(ADA.id, "ada"), text=text, data={"line": 7}, parts=parts, context="review 12")


def sealed(message: Message | None = None) -> Message:
    return wire.decode(wire.encode(seal_task(ADA, [RITA.id, ROLF.id], message or asked())))


@pytest.mark.parametrize("reader", [RITA, ROLF, ADA], ids=["rita", "rolf", "its asker"])
def test_each_reader_and_the_asker_open_it(reader: KeyPair) -> None:
    message = asked()
    found = open_task(reader, ADA.id, sealed(message))
    assert (found.id, found.ts, found.text, found.context) == (message.id, message.ts, message.text, "review 12")
    assert {part.kind for part in found.parts} == {"text", "data", TASK_PART}


def test_what_stewards_have_to_know_stays_visible_and_nothing_else() -> None:
    found = sealed(asked("the secret"))
    assert [part.kind for part in found.parts] == [SEALED_TASK, TASK_PART]
    assert (found.context, found.mentions, found.reply_to) == (None, (), None)
    assert b"secret" not in found.raw
    assert is_sealed_task(found)
    assert set(readers_of(found)) == {ADA.id, RITA.id, ROLF.id}


def test_nobody_else_opens_it() -> None:
    with pytest.raises(BadSignature, match="was not sealed for"):
        open_task(EVE, ADA.id, sealed())


def test_it_opens_only_as_its_askers_and_under_its_id() -> None:
    found = sealed()
    with pytest.raises(BadSignature):
        open_task(RITA, EVE.id, found)
    with pytest.raises(BadSignature):
        open_task(RITA, ADA.id, msgspec.structs.replace(found, id=asked().id))


def test_the_key_of_one_reader_is_no_use_to_another() -> None:
    found = sealed()
    part = found.parts[0]
    assert isinstance(part, ExtensionPart)
    keys = part.body["keys"] | {EVE.id: part.body["keys"][RITA.id]}
    stolen = msgspec.structs.replace(found, parts=(ExtensionPart(SEALED_TASK, part.body | {"keys": keys}), TERMS))
    with pytest.raises(BadSignature):
        open_task(EVE, ADA.id, stolen)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"keys": {}},
        {"keys": {"rita": "x"}},
        {"keys": "x"},
        {"keys": {KeyPair.generate().id: "x" for _ in range(MOST_READERS + 1)}},
    ],
)
def test_what_does_not_say_who_reads_it_is_malformed(changes: dict[str, object]) -> None:
    found = sealed()
    part = found.parts[0]
    assert isinstance(part, ExtensionPart)
    broken = msgspec.structs.replace(found, parts=(ExtensionPart(SEALED_TASK, part.body | changes),))
    with pytest.raises(MalformedMessage):
        readers_of(broken)


@pytest.mark.parametrize("changes", [{"ct": "x"}, {"ct": None}, {"n": "AAAA"}, {"n": None}, {"ct": ""}])
def test_what_was_changed_does_not_open(changes: dict[str, object]) -> None:
    found = sealed()
    part = found.parts[0]
    assert isinstance(part, ExtensionPart)
    broken = msgspec.structs.replace(found, parts=(ExtensionPart(SEALED_TASK, part.body | changes),))
    with pytest.raises(BadSignature):
        open_task(RITA, ADA.id, broken)


def test_many_readers_are_cut_to_as_many_as_fit_and_the_largest_task_fits_a_message() -> None:
    others = [KeyPair.generate().id for _ in range(MOST_READERS + 10)]
    found = seal_task(ADA, others, asked())
    assert readers_of(found) == (ADA.id, *others[: MOST_READERS - 1])
    with pytest.raises(TooLarge) as caught:
        seal_task(ADA, others, asked("x" * 200_000, ()))
    most = int(str(caught.value).split("at most ")[1].split()[0])
    fitting = seal_task(ADA, others, asked("x" * (most - 150), ()))
    assert len(wire.encode(fitting)) <= wire.MAX_PAYLOAD


def test_only_its_asker_can_seal_it() -> None:
    with pytest.raises(BadSignature):
        seal_task(EVE, [RITA.id], asked())


def test_the_golden_vector_opens_and_is_made_again() -> None:
    (vector,) = json.loads((schema.FOLDER / "vectors.json").read_text())["sealed_tasks"]
    message = wire.decode(vector["message"].encode())
    made = seal_task(cast.ADA, [cast.BOB.id], message, random=lambda count: bytes(range(count)))
    assert wire.encode(made).decode() == vector["sealed"]
    opened = open_task(cast.BOB, vector["asker"], wire.decode(vector["sealed"].encode()))
    assert (opened.parts, opened.context) == (message.parts, message.context)
    assert verifies(
        vector["signature"],
        vector["space_id"],
        "task",
        vector["asker"],
        vector["destination"],
        vector["sealed"].encode(),
    )
