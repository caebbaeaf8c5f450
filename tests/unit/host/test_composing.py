"""From a request to a message that can leave, without a connection."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tidings.admin.identity import Identity
from tidings.client.publishing import Prepared
from tidings.contract.core import read_body
from tidings.contract.host import SendRequest
from tidings.errors import (
    AmbiguousPeer,
    DeniedError,
    InvalidName,
    MalformedMessage,
    TidingsError,
    TooLarge,
    UnknownPeer,
    UsageError,
)
from tidings.host.compose import DEFAULT_MAX_AGE, Composed, compose_request
from tidings.host.directory import Seen
from tidings.wire import signing
from tidings.wire.envelope import Received, open_record
from tidings.wire.message import ArtifactPart, DataPart, ExtensionPart, Mention, TextPart, new_id
from tidings.wire.roster import AgentEntry
from tidings.wire.seal import open_sealed
from tidings.wire.signing import ACCOUNT, KeyPair
from tidings.wire.subjects import Subjects

SPACE = KeyPair.generate(ACCOUNT).id
KEYS = {name: KeyPair.generate() for name in ("ada", "bob", "Carol", "eve", "EVE")}
SUBJECTS = Subjects("main")
ADA = Identity("ada", KEYS["ada"], SUBJECTS, SPACE, "", "nats://127.0.0.1:1", Path("none"), is_bundle=False)


def seen(rows: Iterable[AgentEntry], unheard: Mapping[str, str] | None = None) -> Seen:
    """A directory that last saw these."""
    return Seen(known=tuple(rows), unheard=unheard or {})


ROLES = {"ada": ("writer", "planner"), "bob": ("reviewer",)}
DIRECTORY = seen(AgentEntry(id=key.id, name=name, roles=ROLES.get(name, ())) for name, key in KEYS.items())
NOBODY = seen(())


def composed(directory: Seen = DIRECTORY, **fields: Any) -> Composed:
    return compose_request(read_request(json.dumps(fields).encode()), ADA, directory)


def read_request(body: bytes) -> SendRequest:
    request = SendRequest.operation.decode(read_body("message send", body, SendRequest.operation.limit))
    assert isinstance(request, SendRequest)
    return request


def opened(prepared: Prepared) -> Received:
    """What a reader makes of it."""
    fields = ((signing.SIGNATURE_HEADER, prepared.signature), ("Nats-Msg-Id", prepared.id))
    received = open_record(SUBJECTS, SPACE, prepared.subject, fields, prepared.payload)
    assert isinstance(received, Received), received
    return received


def test_nothing_at_all_is_not_sent() -> None:
    for nothing in ("", " \n"):
        with pytest.raises(UsageError, match="nothing to say"):
            composed(channel="general", text=nothing)
    assert composed(channel="general", text="", data=0).message.text == ""


def test_a_message_to_a_channel_is_what_its_readers_will_verify() -> None:
    made = composed(channel="general", text="hello", mentions=["bob", "carol", KEYS["bob"].id], priority="now")
    received = opened(made.prepared)
    assert (received.kind, received.destination, received.sender) == ("chat", "general", ADA.id)
    assert received.message == made.message
    assert (made.message.text, made.message.priority, made.shown) == ("hello", "now", "general")
    assert made.message.mentions == (Mention(KEYS["bob"].id, "bob"), Mention(KEYS["Carol"].id, "Carol"))
    assert made.message.sender.role == "writer"
    assert made.max_age == DEFAULT_MAX_AGE


@pytest.mark.parametrize("named", ["bob", "BOB", KEYS["bob"].id], ids=["name", "other case", "id"])
def test_a_message_to_an_agent_is_sealed_for_it(named: str) -> None:
    made = composed(agent=named, text="between us", context="a talk")
    received = opened(made.prepared)
    assert (received.kind, received.destination, made.shown) == ("dm", KEYS["bob"].id, "bob")
    assert b"between us" not in made.prepared.payload
    assert b"a talk" not in made.prepared.payload
    assert open_sealed(KEYS["bob"], ADA.id, received.message).text == "between us"
    assert made.message.text == "between us"


def test_an_id_needs_no_directory_and_a_name_does() -> None:
    made = composed(NOBODY, agent=KEYS["bob"].id, text="hello")
    assert (made.prepared.destination, made.shown) == (KEYS["bob"].id, KEYS["bob"].id)
    with pytest.raises(UnknownPeer, match="never seen from this host"):
        composed(NOBODY, agent="bob", text="hello")
    with pytest.raises(UnknownPeer, match="never seen from this host"):
        composed(NOBODY, channel="general", text="hello", mentions=["bob"])


def test_a_name_is_resolved_by_the_rules_and_in_the_words_of_the_roster() -> None:
    with pytest.raises(UnknownPeer, match=r"no agent 'bub' in this space; did you mean bob\?"):
        composed(agent="bub", text="hello")
    with pytest.raises(AmbiguousPeer, match="could be EVE, eve: say which"):
        composed(channel="general", text="hello", mentions=["Eve"])
    assert composed(agent="EVE", text="hello").prepared.destination == KEYS["EVE"].id


@pytest.mark.parametrize("by", ["name", "id"])
def test_an_agent_of_a_linked_space_is_written_to_only_where_direct_messages_pass(by: str) -> None:
    key = KeyPair.generate().id
    named = "bob@acme" if by == "name" else key
    here = AgentEntry(id=key, name="bob@acme", direct=False)
    with pytest.raises(DeniedError, match="bob@acme cannot be written to: the link with acme passes no"):
        composed(seen([*DIRECTORY.known, here]), agent=named, text="hello")
    passes = AgentEntry(id=key, name="bob@acme", direct=True)
    assert composed(seen([*DIRECTORY.known, passes]), agent=named, text="hello").prepared.destination == key
    assert composed(seen([*DIRECTORY.known, here]), channel="general", text="hello", mentions=["bob@acme"])


def test_a_task_carries_its_terms_and_does_not_wait_longer_than_its_deadline() -> None:
    made = composed(role="reviewer", text="look", deadline=60)
    received = opened(made.prepared)
    assert (received.kind, received.destination, made.warnings) == ("task", "reviewer", ())
    assert received.message.parts[1] == ExtensionPart(
        "dev.tidings.task", {"kind": "dev.tidings.task", "deadline_s": 60.0}
    )
    assert made.max_age == 60
    assert composed(role="reviewer", text="look", deadline=60, max_age=5).max_age == 5
    (warning,) = composed(role="tester", text="look").warnings
    assert warning == "nobody holds the role tester: the task waits until somebody does"
    (warning,) = composed(role="reviwer", text="look").warnings
    assert "did you mean reviewer?" in warning


def test_data_and_parts_travel_as_they_were_given() -> None:
    artifact = {
        "kind": "artifact",
        "name": "log.txt",
        "media_type": "text/plain",
        "digest": "sha256:" + "0" * 64,
        "size": 3,
    }
    widget = {"kind": "com.example.widget", "size": 3}
    made = composed(channel="general", data={"a": [1, None]}, parts=[artifact, widget, {"kind": "text", "text": "t"}])
    kinds = [type(part) for part in made.message.parts]
    assert kinds == [DataPart, ArtifactPart, ExtensionPart, TextPart]
    assert opened(made.prepared).message == made.message


def test_the_id_of_the_request_is_the_id_of_the_message() -> None:
    mid, before = new_id(), new_id()
    made = composed(channel="general", text="x", id=mid, reply_to=before)
    assert (made.prepared.id, made.message.id, made.message.reply_to) == (mid, mid, before)


WRONG: list[tuple[dict[str, Any], type[TidingsError], str]] = [
    ({"text": "x"}, UsageError, "exactly one of .* this names none"),
    ({"channel": "general", "agent": "bob", "text": "x"}, UsageError, "this names channel and agent"),
    ({"channel": "general"}, UsageError, "needs `text`, `data` or `parts`"),
    ({"channel": "general", "text": "x", "colour": "red"}, UsageError, "unknown field 'colour'"),
    ({"channel": "general", "text": 3}, UsageError, "`text`: expected str"),
    ({"channel": "a b", "text": "x"}, InvalidName, "channel 'a b' is not allowed"),
    ({"role": "a.b", "text": "x"}, InvalidName, "role 'a.b' is not allowed"),
    ({"agent": "", "text": "x"}, UsageError, "`agent` is the id or the name"),
    ({"channel": "general", "text": "x", "id": "7"}, UsageError, "`id` '7' is not a message id"),
    ({"channel": "general", "text": "x", "reply_to": "7"}, UsageError, "`reply_to` '7' is not a message id"),
    ({"channel": "general", "text": "x", "context": "a\nb"}, UsageError, "`context` is 1 to 256"),
    ({"channel": "general", "text": "x", "context": "x" * 257}, UsageError, "`context` is 1 to 256"),
    (
        {"channel": "general", "text": "x", "priority": "loud"},
        UsageError,
        "`priority`: invalid enum value 'loud'; use one of: low, next, now",
    ),
    (
        {"channel": "general", "text": "x", "mentions": ["bob"] * 33},
        UsageError,
        "`mentions`: expected array of length <= 32",
    ),
    ({"channel": "general", "text": "x", "max_age": 0}, UsageError, "`max_age`: expected float > 0"),
    ({"channel": "general", "text": "x", "max_age": 31 * 86_400}, UsageError, "`max_age`: expected float <= 2592000"),
    ({"channel": "general", "text": "x", "deadline": 5}, UsageError, "`deadline` is for tasks"),
    ({"role": "reviewer", "text": "x", "deadline": 31 * 86_400}, UsageError, "`deadline`: expected float <= 2592000"),
    ({"channel": "general", "parts": [{"kind": "text", "text": ""}] * 65}, UsageError, "at most 64 parts"),
    ({"channel": "general", "parts": [{"kind": "text", "text": "", "bold": 1}]}, UsageError, "has no field bold"),
    ({"channel": "general", "parts": [{"kind": "widget"}]}, MalformedMessage, "part kind 'widget' is unknown"),
    ({"channel": "general", "parts": [{"text": "x"}]}, MalformedMessage, "a part has no kind"),
    ({"channel": "general", "parts": [{"kind": "dev.tidings.sealed"}]}, UsageError, "made by Tidings only"),
    ({"channel": "general", "text": "x" * 300_000}, TooLarge, "send an artifact reference"),
    ({"agent": "bob", "text": "x" * 250_000}, TooLarge, "sealed, at most"),
]


@pytest.mark.parametrize(("fields", "error", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_what_cannot_be_sent_is_refused_in_a_sentence(
    fields: dict[str, Any], error: type[TidingsError], words: str
) -> None:
    with pytest.raises(error, match=words):
        composed(**fields)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "strict JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"channel": "a", "channel": "b", "text": "x"}', "strict JSON"),
        (b'{"channel": "a", "data": NaN}', "strict JSON"),
        (b'{"channel": "a", "text": "\\ud800"}', "strict JSON"),
        (b'{"channel": "a", "text": "x", "max_age": "5"}', "`max_age`: expected float"),
        (b'{"channel": "a", "text": "x", "max_age": true}', "`max_age`: expected float"),
    ],
)
def test_a_body_that_two_readers_could_read_differently_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_request(body)


def test_a_body_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(UsageError, match="the request has more than 2,097,152 bytes"):
        read_request(b" " * (2 * 1024 * 1024 + 1))
