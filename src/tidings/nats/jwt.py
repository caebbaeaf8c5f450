"""NATS JWTs (version 2), by hand: operator, accounts, users, revocations.

The public libraries for this were read and either accept forged tokens or drop revocations without a word, so these
are the few claims we need, spelled out. The server is the validator; golden vectors freeze our bytes. This module
does not know which rights a role has (`grants.py`) nor where keys live (`keyring.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidings.errors import WireError
from tidings.nats.core import Auth
from tidings.nats.errors import AuthRefused
from tidings.wire.signing import KeyPair, verify

UNLIMITED = -1
#: activations are made anew with every token of an account, and are the same each time
ACTIVATED = 1_700_000_000
#: of an account on servers that others run; a space has fewer
ROOM_FOR_STREAMS = 16
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}

Claims = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a user may publish and subscribe. Empty `allow` lists would mean "everything", so they are refused."""

    publish: Sequence[str]
    subscribe: Sequence[str]
    #: may answer a request on the reply subject it came with (services only)
    responses: bool = False
    deny_publish: Sequence[str] = ()

    def claims(self) -> Claims:
        if not self.publish or not self.subscribe:
            raise ValueError("a user without publish or subscribe subjects would be allowed everything")
        pub: Claims = {"allow": sorted(self.publish)}
        if self.deny_publish:
            pub["deny"] = sorted(self.deny_publish)
        claims: Claims = {"pub": pub, "sub": {"allow": sorted(self.subscribe)}}
        if self.responses:
            claims["resp"] = {"max": 1, "ttl": 60_000_000_000}
        return claims


@dataclass(frozen=True, slots=True)
class UserLimits:
    subscriptions: int = UNLIMITED
    payload: int = UNLIMITED
    expires: int | None = None


@dataclass(frozen=True, slots=True)
class AccountLimits:
    jetstream: bool = False
    connections: int = UNLIMITED
    #: bytes on disk of streams with so many replicas, on a server that others share; 0: as much as there is
    disk: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class AccountSpec:
    """The claims of an account; everything that distinguishes SYS, CORE and AGENTS."""

    name: str
    limits: AccountLimits = field(default_factory=AccountLimits)
    exports: Sequence[Claims] = ()
    imports: Sequence[Claims] = ()
    #: subject -> what the broker makes of it when a user of the account publishes to it
    mappings: Mapping[str, str] = field(default_factory=dict)
    revocations: Mapping[str, int] = field(default_factory=dict)


def operator_jwt(operator: KeyPair, name: str, system_account: str, *, iat: int | None = None) -> str:
    return encode(operator, operator.id, name, {"type": "operator", "system_account": system_account}, iat=iat)


def account_jwt(operator: KeyPair, account_id: str, spec: AccountSpec, *, iat: int | None = None) -> str:
    return encode(operator, account_id, spec.name, account_claims(spec), iat=iat)


def account_claims(spec: AccountSpec) -> Claims:
    """What the token of an account says, whoever signs it."""
    limits: Claims = {
        "subs": UNLIMITED,
        "data": UNLIMITED,
        "payload": UNLIMITED,
        "imports": UNLIMITED,
        "exports": UNLIMITED,
        "wildcards": True,
        "conn": spec.limits.connections,
        "leaf": 0,
    }
    if spec.limits.jetstream and spec.limits.disk:
        bounded = {
            "mem_storage": 0,
            "disk_storage": spec.limits.disk,
            "streams": ROOM_FOR_STREAMS,
            "consumer": UNLIMITED,
        }
        limits["tiered_limits"] = {f"R{spec.limits.replicas}": bounded}
    elif spec.limits.jetstream:
        limits |= {
            "mem_storage": UNLIMITED,
            "disk_storage": UNLIMITED,
            "streams": UNLIMITED,
            "consumer": UNLIMITED,
        }
    claims: Claims = {"type": "account", "limits": limits}
    if spec.exports:
        claims["exports"] = list(spec.exports)
    if spec.imports:
        claims["imports"] = list(spec.imports)
    if spec.mappings:
        claims["mappings"] = {source: [{"subject": made}] for source, made in sorted(spec.mappings.items())}
    if spec.revocations:
        claims["revocations"] = dict(sorted(spec.revocations.items()))
    return claims


def activation_jwt(exporter: KeyPair, importer: str, subject: str, kind: str) -> str:
    """What one account needs to import an export that asks for a token: nobody else can use it."""
    claims = {"type": "activation", "subject": subject, "kind": kind}
    return encode(exporter, importer, subject, claims, iat=ACTIVATED)


def user_jwt(
    account: KeyPair,
    user_id: str,
    name: str,
    permissions: Permissions | None,
    limits: UserLimits | None = None,
    *,
    iat: int | None = None,
) -> str:
    """A user's token. `permissions=None` means everything in its account: short-lived admin processes only."""
    limits = limits or UserLimits()
    return encode(account, user_id, name, user_claims(permissions, limits), iat=iat, expires=limits.expires)


def user_claims(permissions: Permissions | None, limits: UserLimits) -> Claims:
    claims: Claims = {"type": "user", "subs": limits.subscriptions, "data": UNLIMITED, "payload": limits.payload}
    return claims | (permissions.claims() if permissions else {"pub": {}, "sub": {}})


def encode(
    issuer: KeyPair, subject: str, name: str, nats: Claims, *, iat: int | None = None, expires: int | None = None
) -> str:
    text = unsigned(issuer.id, subject, name, nats, iat=int(time.time()) if iat is None else iat, expires=expires)
    return with_signature(text, issuer.sign(text.encode()))


def unsigned(issuer: str, subject: str, name: str, nats: Claims, *, iat: int, expires: int | None = None) -> str:
    """Header and claims of a token: what its issuer signs."""
    body: Claims = {"iat": iat, "iss": issuer, "name": name, "sub": subject, "nats": {**nats, "version": 2}}
    if expires is not None:
        body["exp"] = expires
    body["jti"] = base64.b32encode(hashlib.sha256(_compact(body)).digest()).decode().rstrip("=")
    return f"{_b64(_compact(_HEADER))}.{_b64(_compact(body))}"


def with_signature(text: str, signature: bytes) -> str:
    return f"{text}.{_b64(signature)}"


def decode(token: str) -> Claims:
    """The claims of a token whose signature verifies under its own issuer. Who the issuer is, the caller checks."""
    try:
        head, body, signature = token.split(".")
        header, claims = json.loads(_unb64(head)), json.loads(_unb64(body))
        issuer = claims["iss"]
        good = header == _HEADER and verify(issuer, f"{head}.{body}".encode(), _unb64(signature))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError("this text is not a NATS JWT") from error
    if not good:
        raise WireError("this NATS JWT is not signed by its issuer")
    return dict(claims)


def expiry_of(token: str) -> int | None:
    """The second at which a token ends; None if it does not."""
    end = decode(token).get("exp")
    return int(end) if end else None


def credentials(token: str, key: KeyPair) -> str:
    """The text of a creds file, as every NATS client reads it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "The seed below is a secret: who has it is this agent.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{key.seed}\n------END USER NKEY SEED------\n\n"
        "*************************************************************\n"
    )


def split_credentials(text: str) -> tuple[str, KeyPair]:
    """Token and key pair out of a creds file's text."""
    lines = [line.strip() for line in text.splitlines()]
    try:
        token = lines[lines.index("-----BEGIN NATS USER JWT-----") + 1]
        seed = lines[lines.index("-----BEGIN USER NKEY SEED-----") + 1]
    except (ValueError, IndexError) as error:
        raise WireError("this is not a NATS credentials file: a JWT or a seed block is missing") from error
    return token, KeyPair(seed)


def signed(token: str, key: KeyPair) -> Auth:
    """How a user proves to the broker who it is: the token, and the server's nonce signed by the key that it names."""

    def answer(info: Mapping[str, Any]) -> dict[str, str]:
        nonce = info.get("nonce")
        if not isinstance(nonce, str) or not nonce:
            raise AuthRefused("this server asks for no proof: it is not the broker of a space")
        return {"jwt": token, "sig": _b64(key.sign(nonce.encode()))}

    return answer


def _compact(value: Claims) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
