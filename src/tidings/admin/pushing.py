"""Tokens of accounts that change while a space lives on servers that others run: who is revoked.

An administrator writes the newest token of an account below `external/pushed/` and gives it to every server;
`supervisor/keepers.py` gives it again to those that come back. Which server took which is kept in
`external/servers.json`, under the name that its configuration gives it: one that is known and did not answer is said,
until it is told or the owner says that it is gone. One without a name has another after every start, and is told like
the others, but not missed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from tidings.admin.home import SIGNING, SpaceHome, SpaceInfo
from tidings.errors import BrokerUnreachable, ConfigError
from tidings.nats import jwt
from tidings.nats.client import Connection, close_quietly, connect
from tidings.util.private_files import private_dir, write_private

#: seconds within which a server answers
ANSWER = 5.0
#: name of a server -> account -> what it took last
Servers = dict[str, dict[str, str]]


class Server(NamedTuple):
    """One that answered. `id` is another after each start."""

    id: str
    name: str

    @property
    def is_named(self) -> bool:
        return self.name != self.id


@asynccontextmanager
async def system_user(home: SpaceHome, info: SpaceInfo) -> AsyncIterator[Connection]:
    """As whom the administrator lets us push the tokens of two accounts, and nothing else."""
    creds = home.keys / "system.creds"
    _, key = jwt.split_credentials(creds.read_text())
    connection = await connect(info.url, creds, key.id, name="tokens", reconnect=False)
    try:
        yield connection
    finally:
        await close_quietly(connection)


async def push_to_all(
    system: Connection, account: str, token: str, known: Iterable[str] = (), within: float = ANSWER
) -> set[Server]:
    """Give every server a token; answers those that took it. Those whose names are `known` are waited for."""
    inbox = system.new_inbox()
    subscription = await system.subscribe(inbox)
    took: set[Server] = set()
    awaited = set(known)
    clock = asyncio.get_running_loop().time
    deadline, last = clock() + within, clock() + within
    try:
        await system.publish(f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.UPDATE", token.encode(), reply=inbox)
        while (left := min(deadline, last) - clock()) > 0:
            try:
                message = await subscription.next(left)
            except TimeoutError:
                break
            if message.status is not None:
                raise BrokerUnreachable(f"no server takes the token of account {account}: may its user push it?")
            said = json.loads(message.data)
            if said.get("data", {}).get("code") != 200:
                raise ConfigError(f"a server refused the token of account {account}: {said.get('error') or said}")
            took.add(Server(str(said["server"]["id"]), str(said["server"].get("name") or said["server"]["id"])))
            awaited -= {each.name for each in took}
            # one that nobody knew of yet answers with the others
            last = deadline if awaited else clock() + 0.5
    finally:
        await subscription.unsubscribe()
    return took


def keep_token(home: SpaceHome, account: str, token: str) -> None:
    """The newest of an account, for whoever gives it to servers that come back."""
    for folder in (home.external, home.external / "pushed"):
        private_dir(folder)
    write_private(home.external / "pushed" / f"{account}.jwt", token)


async def tell_servers(home: SpaceHome, info: SpaceInfo, account: str, token: str) -> str:
    """Give every server the token of an account. Answers which do not have it now, in words; "" if all do."""
    known = set(_servers(home))
    async with system_user(home, info) as system:
        took = await push_to_all(system, account, token, known)
    if not took:
        raise BrokerUnreachable(f"no server took the token of account {account}: nobody was cut")
    note_told(home, {account: token}, took)
    silent = sorted(known - {each.name for each in took})
    if not silent:
        return ""
    return (
        f"{len(took)} of {len(took) + len(silent)} servers were told: {', '.join(silent)} did not answer, and may take "
        "what is void until `tidings up` has told it; `tidings status` says so until then"
    )


def pushed_tokens(home: SpaceHome) -> dict[str, str]:
    """The newest token of each account that changes while a space runs."""
    return {path.stem: path.read_text() for path in sorted((home.external / "pushed").glob("A*.jwt"))}


# --- who was told what ---


def note_told(home: SpaceHome, tokens: Mapping[str, str], took: Iterable[Server]) -> None:
    """These servers have these tokens."""
    before = _servers(home)
    told = {account: _said_by(token) for account, token in tokens.items()}
    after = before | {each.name: before.get(each.name, {}) | told for each in took if each.is_named}
    if after != before:
        _write(home, after)


def untold(home: SpaceHome, info: SpaceInfo) -> list[str]:
    """Names of servers that were known and have not taken what was pushed last."""
    if info.mode != SIGNING:
        return []
    newest = {account: _said_by(token) for account, token in pushed_tokens(home).items()}
    return sorted(name for name, has in _servers(home).items() if newest.items() - has.items())


def problems(home: SpaceHome, info: SpaceInfo) -> list[str]:
    """What is to be said of servers that were not told who is revoked."""
    if not (silent := untold(home, info)):
        return []
    return [
        f"server{'' if len(silent) == 1 else 's'} {', '.join(silent)} did not hear yet who is revoked, and may let "
        "them in: `tidings up` tells a server within a second of its return; one that is gone for good is forgotten by "
        "`tidings space acknowledge`"
    ]


def forget_untold(home: SpaceHome, info: SpaceInfo) -> int:
    """The owner says that they are gone. Answers how many there were; one that comes back is told all the same."""
    gone = set(untold(home, info))
    if gone:
        _write(home, {name: has for name, has in _servers(home).items() if name not in gone})
    return len(gone)


def _said_by(token: str) -> str:
    """What a token says of its account. It is signed anew at every start, and that is no news."""
    return hashlib.sha256(json.dumps(jwt.decode(token)["nats"], sort_keys=True).encode()).hexdigest()


def _servers(home: SpaceHome) -> Servers:
    try:
        known = json.loads((home.external / "servers.json").read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}  # before, it was a list of ids


def _write(home: SpaceHome, servers: Servers) -> None:
    write_private(home.external / "servers.json", json.dumps(servers, indent=1, sort_keys=True) + "\n")
