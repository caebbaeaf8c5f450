"""Sealed tasks: only those who may do it can read the body, whichever of them gets it; for tasks that go over a link.

    content    XChaCha20-Poly1305 under a random key; additional data "td1-task\\n<message id>"
    each key   that random key, under the key of asker and reader (`seal.py`); additional data
               "td1-task-key\\n<reader>\\n<message id>"

A sealed task is an ordinary signed message whose first part is of kind `dev.tidings.sealed-task` (`v`, `n` nonce, `ct`
ciphertext, `keys`: reader -> nonce and sealed key). Who can read it is therefore known to both spaces, which hand it to
nobody else. What the stewards have to know of a task (its deadline) is a part beside it. Inside are the other parts,
mentions, reply_to and context. The asker is one of the readers, and so can open what it asked.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from nacl import bindings
from nacl.exceptions import CryptoError

from tidings.errors import BadSignature, InvalidName, MalformedMessage, TooLarge
from tidings.wire.keys import KeyPair
from tidings.wire.message import MAX_PAYLOAD, ExtensionPart, Message, Part
from tidings.wire.names import check_agent_id, is_agent_id
from tidings.wire.seal import NONCE_BYTES, TAG_BYTES, inside_of, pair_key, with_inside

SEALED_TASK = "dev.tidings.sealed-task"
#: a part of the asker's signed message, for what a steward has to know of a task
TASK_PART = "dev.tidings.task"
VERSION = 1
#: agents one task is sealed for, its asker too
MOST_READERS = 64
KEY_BYTES = 32
#: of what stays visible: the message around it, and each reader with its key
_OUTSIDE, _EACH = 1_024, 172


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
