"""Who an endpoint is: a name, a key, a credential, and the space it belongs to.

An identity is found in the home of this user, or read from a bundle that `tidings agent export` wrote. The
credential and the address are read again at every connect: a widening or narrowing replaces the one, a server that
moved the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidings.admin.administration import administer
from tidings.admin.agents import AgentFile, Ledger
from tidings.admin.home import SpaceHome
from tidings.errors import AuthRevoked, ConfigError, ConflictError, DeniedError, TidingsError, UsageError, WireError
from tidings.nats import jwt
from tidings.nats.address import moved, parse_addresses, shown, with_authority
from tidings.util.private_files import check_private, read_plain, read_private, write_private
from tidings.wire.names import check_agent_name, check_token
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import Subjects

OPEN_ACCESS = (">",)
#: the version of a bundle
BUNDLE = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """An agent of a space, with what it needs to connect and to trust."""

    name: str
    key: KeyPair
    subjects: Subjects
    space_id: str
    steward_key: str
    url: str
    path: Path
    is_bundle: bool
    #: says where its space is now: an address may change while a program runs
    follow: Callable[[], str] | None = None
    id: str = field(init=False)

    def __post_init__(self) -> None:
        # They are read from a file that somebody else may have written, and become names of files and subjects.
        check_agent_name(self.name)
        check_token(self.space_id, "space id")
        object.__setattr__(self, "id", self.key.id)

    @property
    def address(self) -> str:
        """Where its space is, for people."""
        return shown(self.url)

    def url_now(self) -> str:
        """Where its space is now: one that began to listen, or that moved, has another address than it had."""
        try:
            return self.url if self.follow is None else self.follow()
        except TidingsError:  # being written, or gone: what was true is tried
            return self.url

    def credentials(self) -> str:
        """The creds text as it is on disk now."""
        text = read_private(self.path)
        return str(json.loads(text)["creds"]) if self.is_bundle else text

    def token(self) -> str:
        return jwt.split_credentials(self.credentials())[0]

    def keep_trust(self, authority: bytes) -> bool:
        """Let the address of a bundle trust these, if it trusts an authority of its own. Answers whether it changed."""
        bundle = json.loads(read_private(self.path)) if self.is_bundle else {"url": self.url}
        renewed = with_authority(bundle["url"], authority)
        if not self.is_bundle or renewed == bundle["url"]:
            return False
        write_private(self.path, json.dumps(bundle | {"url": renewed}, indent=1) + "\n")
        return True

    def keep_token(self, token: str) -> None:
        """Replace the token on disk; the key stays."""
        creds = jwt.credentials(token, self.key)
        if self.is_bundle:
            bundle = json.loads(read_private(self.path))
            write_private(self.path, json.dumps(bundle | {"creds": creds}, indent=1) + "\n")
        else:
            write_private(self.path, creds)


async def local_identity(home: SpaceHome, name: str) -> Identity:
    """An agent of a space in this home, or one that was imported into it; in an open space one that does not exist is
    provisioned."""
    if (imported := imported_identity(home, name)) is not None:
        return imported
    info = home.read_info()
    if home.imported(name).exists() and not home.agent_creds(name).exists():
        raise ConflictError(
            f"agent {name} was imported from another space {info.name} than the one in {home.home}: import it into "
            f"another home (--home), or `tidings agent forget {name} --space {info.name}`"
        )
    await ensure_agent(home, name)
    path = home.agent_creds(name)
    _, key = jwt.split_credentials(read_private(path))
    trusted = (info.id, info.steward_key, info.url)
    return Identity(name, key, info.subjects, *trusted, path, is_bundle=False, follow=lambda: home.read_info().url)


def imported_identity(home: SpaceHome, name: str) -> Identity | None:
    """The agent that `tidings agent import` took, unless this home has one of that name itself."""
    path = home.imported(name)
    if not path.exists() or home.agent_creds(name).exists():
        return None
    found = bundle_identity(path)
    # a space of the same name that was made here since is another one
    return found if not home.exists or home.read_info().id == found.space_id else None


def bundle_identity(path: Path) -> Identity:
    """An agent from an exported bundle; whether others may read it matters of a file that is one."""
    try:
        bundle = json.loads(read_plain(path))
        if not isinstance(bundle, dict):
            raise ValueError("it is not a JSON object")
        if bundle.get("tidings", BUNDLE) != BUNDLE:
            raise ValueError(f"its version is {bundle['tidings']}, and this Tidings reads {BUNDLE}")
        _, key = jwt.split_credentials(bundle["creds"])
        name = bundle["agent"]["name"]
        subjects = Subjects(bundle["space"])
        anchor = (bundle["space_id"], bundle["steward_key"], bundle["url"])
        _check_url(bundle["url"])
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError, WireError) as error:
        raise ConfigError(f"{path} is not a bundle written by `tidings agent export` ({error})") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    check_private(path)
    if key.id != bundle["agent"]["id"]:
        raise UsageError(f"{path} names agent {bundle['agent']['id']} but holds the key of {key.id}")
    return Identity(name, key, subjects, *anchor, path, is_bundle=True, follow=lambda: bundle_identity(path).url)


def _check_url(url: str) -> None:
    for address in parse_addresses(url):
        if address.tls:
            address.context()  # what it trusts can be read


def move_bundle(path: Path, urls: Sequence[str]) -> Identity:
    """The agent of a bundle, whose space has other addresses from now on. Key, credential and trust stay."""
    held = bundle_identity(path)
    url = moved(held.url, urls)
    _check_url(url)
    bundle = json.loads(read_private(path))
    write_private(path, json.dumps(bundle | {"url": url}, indent=1) + "\n")
    return bundle_identity(path)


async def ensure_agent(home: SpaceHome, name: str) -> bool:
    """Makes sure that `name` has a credential here. Returns whether one was made.

    An open space is no second security model. The agent gets a key, an access record and a credential like any other;
    what is open is only who may ask for them: every program of the same user on this machine.
    """
    info = home.read_info()
    newest = Ledger(home.issued).newest(name)
    if newest is not None and newest.state == "active" and home.agent_creds(name).exists():
        return False
    if newest is not None and newest.state in ("revoking", "revoked"):
        raise AuthRevoked(f"agent {name} was revoked; only `tidings agent add {name}` brings the name back")
    if newest is not None and newest.invited and not home.agent_creds(name).exists():
        raise DeniedError(newest.elsewhere)
    if not info.open and not home.agent_creds(name).exists():
        raise DeniedError(
            f"there is no agent {name} in space {info.name}, and the space is not open: "
            f"`tidings agent add {name} --space {info.name}`"
        )
    async with administer(home, f"provisioning {name}") as admin:
        if not info.open:
            await admin.finish()  # its add was interrupted; the credential is here already
            return False
        agent = AgentFile(name, read=OPEN_ACCESS, post=OPEN_ACCESS, description="provisioned on first use")
        return (await admin.add(agent, existing_ok=True)).created
