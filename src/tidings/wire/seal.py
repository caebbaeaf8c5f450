"""Sealed direct messages and tasks: only the agents concerned can read the body; all others hold ciphertext.

    shared     X25519 of the two agents' converted ed25519 keys
    key        BLAKE2b-256, keyed with `shared`, of "td1-seal\\n<sender>\\n<target>"
    sealed     XChaCha20-Poly1305, random 24-byte nonce, additional data "td1-seal\\n<target>\\n<message id>"

A sealed message is an ordinary signed message with one part of kind `dev.tidings.sealed` (`v`, `n` nonce, `ct`
ciphertext). Inside, as strict JSON, are parts, mentions, reply_to and context; id, ts, from and priority stay visible
outside. An agent's id is its key, so nobody needs to be asked for one. There is **no forward secrecy**: whoever gets
one of the two seeds reads everything that was ever sealed between the two. Who writes to whom, when and how much is
not hidden. The sender can open what it sealed, too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec
from nacl import bindings
from nacl.exceptions import CryptoError

from tidings.errors import BadSignature, InvalidName, MalformedMessage, TooLarge
from tidings.wire import message as wire
from tidings.wire import strict_json
from tidings.wire.message import MAX_PAYLOAD, ExtensionPart, Mention, Message, Part, TextPart
from tidings.wire.names import check_agent_id, is_agent_id
from tidings.wire.signing import KeyPair

SEALED_KIND = "dev.tidings.sealed"
VERSION = 1
NONCE_BYTES = 24
#: what stays visible around the ciphertext never takes more than this
_OUTSIDE = 1024
TAG_BYTES = 16
#: the plaintext whose base64 still fits a payload
MAX_SEALED = (MAX_PAYLOAD - _OUTSIDE) // 4 * 3 - TAG_BYTES
_INSIDE = ("parts", "mentions", "reply_to", "context")


class _Inside(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is sealed of a message, in the order in which it is written."""

    parts: tuple[Part, ...]
    mentions: tuple[Mention, ...] = ()
    reply_to: str | None = None
    context: str | None = None


def is_sealed(message: Message) -> bool:
    return len(message.parts) == 1 and message.parts[0].kind == SEALED_KIND


def seal_message(key: KeyPair, target_id: str, message: Message, *, nonce: bytes | None = None) -> Message:
    """`message`, of the holder of `key`, sealed for `target_id`. `nonce` is for golden vectors; never give one."""
    if message.sender.id != key.id:
        raise BadSignature(f"message {message.id} is from {message.sender.id}: only its sender can seal it")
    plaintext = inside_of(message)
    if len(plaintext) > MAX_SEALED:
        raise TooLarge(
            f"this message has {len(plaintext)} bytes; sealed, at most {MAX_SEALED} fit: send an artifact reference"
        )
    nonce = nonce or os.urandom(NONCE_BYTES)
    ciphertext = encrypt(key, check_agent_id(target_id), message.id, plaintext, nonce)
    body = {"v": VERSION, "n": base64.b64encode(nonce).decode(), "ct": base64.b64encode(ciphertext).decode()}
    return wire.around(message, ExtensionPart(SEALED_KIND, body))


def encrypt(key: KeyPair, target_id: str, message_id: str, plaintext: bytes, nonce: bytes) -> bytes:
    """The ciphertext of whatever is to be inside, with its tag."""
    return bytes(
        bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(
            plaintext, _bound_to(target_id, message_id), nonce, pair_key(key, key.id, target_id)
        )
    )


def inside_of(message: Message) -> bytes:
    if message.raw and all(type(part) is TextPart for part in message.parts):  # text, and read back once
        return msgspec.json.encode(_Inside(message.parts, message.mentions, message.reply_to, message.context))
    document = wire.document(message)
    return strict_json.write({name: document[name] for name in _INSIDE if name in document})


def open_sealed(key: KeyPair, sender_id: str, message: Message, *, target_id: str | None = None) -> Message:
    """What `sender_id` sealed for the holder of `key`; `raw` stays the bytes that were signed and stored.

    BadSignature if it was not sealed by this sender for this target under this id; MalformedMessage if what is inside
    is not a message. A sender reads its own by naming the `target_id`.
    """
    if not is_sealed(message):
        raise MalformedMessage(f"message {message.id} is not sealed")
    part = message.parts[0]
    assert isinstance(part, ExtensionPart)
    nonce, ciphertext = _unpacked(part.body)
    target = target_id or key.id
    try:
        pair = pair_key(key, sender_id, target)
        plaintext = bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(
            ciphertext, _bound_to(target, message.id), nonce, pair
        )
    except (CryptoError, InvalidName, ValueError) as error:
        raise BadSignature(f"message {message.id} was not sealed by {sender_id} for {target}") from error
    return with_inside(message, plaintext)


def _unpacked(body: dict[str, Any]) -> tuple[bytes, bytes]:
    if body.get("v") != VERSION:
        raise MalformedMessage(f"a sealed part of version {str(body.get('v'))[:20]!r} cannot be opened")
    try:
        nonce, ciphertext = (base64.b64decode(body[name], validate=True) for name in ("n", "ct"))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise MalformedMessage("a sealed part needs `n` and `ct` in base64") from error
    if len(nonce) != NONCE_BYTES or len(ciphertext) < TAG_BYTES:
        raise MalformedMessage("a sealed part has a nonce of 24 bytes and a ciphertext with its tag")
    return nonce, ciphertext


def with_inside(outer: Message, plaintext: bytes) -> Message:
    """Only what belongs inside is taken from inside: it cannot change who says it, when, or under which id."""
    inside = strict_json.loads(plaintext)
    if not isinstance(inside, dict):
        raise MalformedMessage("what was sealed is not a JSON object")
    visible = {name: value for name, value in wire.document(outer).items() if name not in _INSIDE}
    taken = {name: inside[name] for name in _INSIDE if name in inside}
    try:
        opened = wire.decode(strict_json.write(visible | taken))
    except TooLarge as error:
        raise MalformedMessage(f"what was sealed is larger than a message: {error}") from error
    return msgspec.structs.replace(opened, raw=outer.raw)


def _bound_to(target_id: str, message_id: str) -> bytes:
    return f"td1-seal\n{target_id}\n{message_id}".encode()


@lru_cache(maxsize=4_096)
def pair_key(key: KeyPair, sender_id: str, target_id: str) -> bytes:
    """The key of one direction of a pair: what one sealed cannot be turned around as the other's."""
    other = target_id if key.id == sender_id else sender_id
    both = f"td1-seal\n{sender_id}\n{target_id}".encode()
    return hashlib.blake2b(both, key=key.shared_with(other), digest_size=32).digest()


# --- task seal ---
# Sealed tasks: only those who may do it can read the body, whichever of them gets it; for tasks that go over a link.
#
#     content    XChaCha20-Poly1305 under a random key; additional data "td1-task\n<message id>"
#     each key   that random key, under the key of asker and reader (`seal.py`); additional data
#                "td1-task-key\n<reader>\n<message id>"
#
# A sealed task is an ordinary signed message whose first part is of kind `dev.tidings.sealed-task` (`v`, `n` nonce,
# `ct` ciphertext, `keys`: reader -> nonce and sealed key). Who can read it is therefore known to both spaces, which
# hand it to nobody else. What the stewards have to know of a task (its deadline) is a part beside it. Inside are the
# other parts, mentions, reply_to and context. The asker is one of the readers, and so can open what it asked.


SEALED_TASK = "dev.tidings.sealed-task"
#: a part of the asker's signed message, for what a steward has to know of a task
TASK_PART = "dev.tidings.task"
#: agents one task is sealed for, its asker too
MOST_READERS = 64
KEY_BYTES = 32
#: bytes that stay visible for each reader: its id and its key
_EACH = 172


def is_sealed_task(message: Message) -> bool:
    return message.parts[0].kind == SEALED_TASK


def seal_task(
    key: KeyPair, readers: Iterable[str], message: Message, *, random: Callable[[int], bytes] = os.urandom
) -> Message:
    """`message`, of the holder of `key`, sealed for these agents and itself. `random` is for golden vectors; never give
    one."""
    if message.sender.id != key.id:
        raise BadSignature(f"message {message.id} is from {message.sender.id}: only its sender can seal it")
    ids = list(dict.fromkeys((key.id, *map(check_agent_id, readers))))[:MOST_READERS]
    hidden, terms = _split(message)
    plaintext = inside_of(msgspec.structs.replace(message, parts=hidden, raw=b""))
    most = (MAX_PAYLOAD - _OUTSIDE - _EACH * len(ids)) // 4 * 3 - TAG_BYTES
    if len(plaintext) > most:
        raise TooLarge(f"this task has {len(plaintext)} bytes; sealed, at most {most} fit: send an artifact reference")
    secret, nonce = random(KEY_BYTES), random(NONCE_BYTES)
    sealed = _encrypt(plaintext, _content(message.id), nonce, secret)
    keys = {each: _wrapped(key, each, message.id, secret, random(NONCE_BYTES)) for each in ids}
    body = {"kind": SEALED_TASK, "v": VERSION, "n": _text(nonce), "ct": _text(sealed), "keys": keys}
    parts = (ExtensionPart(SEALED_TASK, body), *terms)
    return msgspec.structs.replace(message, parts=parts, mentions=(), reply_to=None, context=None, raw=b"")


def readers_of(message: Message) -> tuple[str, ...]:
    """Who can open a sealed task; MalformedMessage if it does not say it in the one way."""
    keys = _body(message).get("keys")
    if not isinstance(keys, dict) or not 0 < len(keys) <= MOST_READERS or not all(map(is_agent_id, keys)):
        raise MalformedMessage(f"a sealed task names up to {MOST_READERS} agents that can open it")
    return tuple(keys)


def open_task(key: KeyPair, asker: str, message: Message) -> Message:
    """What `asker` sealed, for the holder of `key` among others; `raw` stays the bytes that were signed.

    BadSignature if it was not sealed by this asker for this agent; MalformedMessage if what is inside is no message.
    """
    body, own = _body(message), key.id
    if own not in readers_of(message):
        raise BadSignature(f"task {message.id} was not sealed for {own}")
    try:
        wrapped = _bytes(body["keys"][own])
        pair = pair_key(key, asker, own)
        secret = _decrypt(wrapped[NONCE_BYTES:], _key_of(own, message.id), wrapped[:NONCE_BYTES], pair)
        plaintext = _decrypt(_bytes(body.get("ct")), _content(message.id), _bytes(body.get("n")), secret)
    except (CryptoError, InvalidName, ValueError, TypeError) as error:
        raise BadSignature(f"task {message.id} was not sealed by {asker} for {own}") from error
    _, terms = _split(message)
    opened = with_inside(message, plaintext)
    return msgspec.structs.replace(opened, parts=(*opened.parts, *terms))


def _split(message: Message) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """What is hidden, and what the stewards have to know."""
    hidden = tuple(each for each in message.parts if each.kind not in (TASK_PART, SEALED_TASK))
    return hidden, tuple(each for each in message.parts if each.kind == TASK_PART)


def _body(message: Message) -> dict[str, Any]:
    part = message.parts[0]
    if not isinstance(part, ExtensionPart) or part.kind != SEALED_TASK:
        raise MalformedMessage(f"task {message.id} is not sealed")
    if part.body.get("v") != VERSION:
        raise MalformedMessage(f"a sealed task of version {str(part.body.get('v'))[:20]!r} cannot be opened")
    return part.body


def _wrapped(key: KeyPair, reader: str, message_id: str, secret: bytes, nonce: bytes) -> str:
    return _text(nonce + _encrypt(secret, _key_of(reader, message_id), nonce, pair_key(key, key.id, reader)))


def _encrypt(plaintext: bytes, bound: bytes, nonce: bytes, key: bytes) -> bytes:
    return bytes(bindings.crypto_aead_xchacha20poly1305_ietf_encrypt(plaintext, bound, nonce, key))


def _decrypt(ciphertext: bytes, bound: bytes, nonce: bytes, key: bytes) -> bytes:
    return bytes(bindings.crypto_aead_xchacha20poly1305_ietf_decrypt(ciphertext, bound, nonce, key))


def _content(message_id: str) -> bytes:
    return f"td1-task\n{message_id}".encode()


def _key_of(reader: str, message_id: str) -> bytes:
    return f"td1-task-key\n{reader}\n{message_id}".encode()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise ValueError("not base64") from error
