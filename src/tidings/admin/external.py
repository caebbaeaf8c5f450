"""A space on a NATS that others run: what its administrator must add, and whether it is there.

The space makes its own account keys, as everywhere. The tokens of these accounts are the administrator's to sign; with
an operator signing key of theirs Tidings signs them, and pushes the one of the agents' account whenever somebody is
revoked. What CORE exports can be imported with a token that CORE signed for one account, so no other tenant of the
server can read or write a space.

`describe` writes what is to be added, `missing_line` looks at the running server and names the first thing that is not
as it must be. Nothing here changes a server; what is pushed to them is in `pushing.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tidings.admin.agents import Ledger
from tidings.admin.home import SIGNED_ELSEWHERE, SIGNING, SpaceHome, SpaceInfo, greeted
from tidings.admin.invitations import Invitations
from tidings.admin.link_registry import LinkLedger
from tidings.admin.pushing import ANSWER, keep_token, system_user, tell_servers
from tidings.contract.admin import OfferRequest
from tidings.errors import AuthRevoked, BrokerUnreachable, TidingsError, UsageError
from tidings.nats import jwt
from tidings.nats.address import parse_addresses, shown
from tidings.nats.client import Connection, close_quietly, connect
from tidings.nats.errors import ApiError, NatsError, Unwritable
from tidings.nats.jetstream import JetStream
from tidings.server.config import RESERVE
from tidings.server.keyring import Keyring
from tidings.server.nats_server import MINIMUM_VERSION
from tidings.server.streams import storage_needed
from tidings.util.private_files import private_dir, read_private, write_private
from tidings.wire.signing import KeyPair
from tidings.wire.subjects import LINK_SERVICE, Subjects

MAX_PAYLOAD = 1024 * 1024
CONTROL_LINE = 65_536
#: a token as large as agents with many patterns have
LARGE_TOKEN = 30_000
MOST_STREAMS = 8
#: seconds for which a credential holds where nobody can be cut: whoever is revoked is out when it ends
SHORT_LIVED = 900


def check_servers(text: str) -> None:
    try:
        parse_addresses(text)
    except Unwritable as error:
        raise UsageError(f"--server: {error}") from error


def operator_key_in(key: Path, creds: Path) -> tuple[KeyPair, str]:
    """The administrator's operator signing key, and the credentials of their user for tokens of accounts."""
    seed, said = read_private(key).strip(), read_private(creds)
    try:
        found = KeyPair(seed)
        jwt.split_credentials(said)
    except (ValueError, TidingsError) as error:
        raise UsageError(
            f"{key} must hold the seed of an operator signing key, and {creds} credentials: {error}"
        ) from None
    if not found.id.startswith("O"):
        raise UsageError(f"{key} holds no operator signing key: its seed begins with SO, and its public key with O")
    return found, said


def use_operator_key(home: SpaceHome, key: Path, creds: Path) -> None:
    """Remember them."""
    found, said = operator_key_in(key, creds)
    write_private(home.keys / "operator.seed", found.seed + "\n")
    write_private(home.keys / "system.creds", said)


def live_on(
    home: SpaceHome,
    servers: str,
    *,
    replicas: int | None = None,
    sync_seconds: int | None = None,
    operator_key: tuple[str, str] | None = None,
) -> SpaceInfo:
    """Remember where a new space lives. `operator_key`: that of the administrator, and their system user, as files."""
    info = home.read_info()
    if operator_key is not None:
        use_operator_key(home, *map(Path, operator_key))
    if replicas is None:
        replicas = info.replicas if info.mode else replicas_of(servers)
    mode = SIGNING if operator_key is not None or info.mode == SIGNING else SIGNED_ELSEWHERE
    changes: dict[str, Any] = {"sync_seconds": sync_seconds} if sync_seconds else {}
    return home.update_info(servers=servers, replicas=replicas, mode=mode, **changes)


def replicas_of(servers: str) -> int:
    """Three if one of these servers says that it is one of several."""
    said = greeted(servers)
    if said is None:
        raise BrokerUnreachable(f"no NATS server answers at {shown(servers)}: is the address right, and does it run?")
    return 3 if said.get("cluster") else 1


def signs_itself(info: SpaceInfo) -> bool:
    """Was an operator signing key given? Then a revocation is pushed, and takes effect at once."""
    return info.mode == SIGNING


def danger_of_replicas(info: SpaceInfo) -> str:
    """What is to be said of a space with replicas while servers have the fault; "" of one without."""
    if info.replicas == 1:
        return ""
    return (
        "with replicas any agent that may post can stop the space for good, by one header: a fault of nats-server "
        "2.15.1, see SECURITY.md; `--replicas 1` when you create it, unless all agents are trusted"
    )


def longest_lifetime(info: SpaceInfo, wanted: int) -> int:
    """How long a credential of an agent may hold; 0: for ever."""
    return min(wanted or SHORT_LIVED, SHORT_LIVED) if info.mode == SIGNED_ELSEWHERE else wanted


def account_tokens(home: SpaceHome, keyring: Keyring, info: SpaceInfo) -> dict[str, str]:
    """The accounts' tokens by id, signed with the operator signing key."""
    return {key: jwt.account_jwt(keyring.operator, key, spec) for key, spec in _specs(home, keyring, info).items()}


def _specs(home: SpaceHome, keyring: Keyring, info: SpaceInfo) -> dict[str, jwt.AccountSpec]:
    revoked, uninvited = Ledger(home.issued).revocations(), Invitations.below(home, info.id).revocations()
    unlinked, disk = LinkLedger.below(home, info.id).revocations(), storage_needed(info.budget)
    return keyring.shared_specs(info.subjects, revoked, uninvited, unlinked, disk=disk, replicas=info.replicas)


async def push_account_token(home: SpaceHome, keyring: Keyring, info: SpaceInfo, account: str) -> str:
    """Give every server the token of an account as it is now. Answers who does not have it, in words; "" if all do."""
    token = account_tokens(home, keyring, info)[account]
    keep_token(home, account, token)
    if signs_itself(info):
        return await tell_servers(home, info, account, token)
    minutes = SHORT_LIVED // 60
    return f"nobody is cut: the servers cannot be told, and what was given out ends by itself within {minutes} minutes"


# --- what is to be added ---


def describe(home: SpaceHome, keyring: Keyring, info: SpaceInfo, then: str = "tidings up") -> Path:
    """Write what the administrator is to add, and what to type `then`; answers where."""
    private_dir(home.external)
    specs = _specs(home, keyring, info)
    signs = signs_itself(info)
    tokens = account_tokens(home, keyring, info) if signs else {}
    for key, spec in specs.items():
        claims = {"sub": key, "name": spec.name, "nats": {**jwt.account_claims(spec), "version": 2}}
        write_private(home.external / f"{spec.name}.json", json.dumps(claims, indent=1) + "\n")
        if signs:
            write_private(home.external / f"{key}.jwt", tokens[key])
    path = home.external / "README.txt"
    write_private(path, _instructions(info, specs, f"{then} --space {info.name}", signs=signs))
    return path


def _instructions(info: SpaceInfo, specs: dict[str, jwt.AccountSpec], then: str, *, signs: bool) -> str:
    pushed = [key for key, spec in specs.items() if spec.name.startswith(("AGENTS_", "INVITE_", "LINK_"))]
    pushes = "\n    ".join(f"$SYS.REQ.ACCOUNT.{key}.CLAIMS.{verb}" for key in pushed for verb in ("UPDATE", "LOOKUP"))
    names = "\n".join(f"    {spec.name:<20} {key}" for key, spec in specs.items())
    return f"""A space of Tidings, {info.name!r}, is to live on {info.address}. Its administrator adds:

1. In the configuration of every server (nats-server 2.15 or newer, operator mode):

    max_control_line: {CONTROL_LINE}
    max_payload: {MAX_PAYLOAD}
    jetstream {{ store_dir: "...", sync_interval: "1s" }}
    feature_flags {{ js_ack_fc_v2: false }}
    resolver {{ type: full, dir: "...", interval: "5s" }}

   sync_interval cannot be asked for: say what it is with `tidings up --sync-interval`; unless you do, 2 minutes are
   assumed, and hosts keep what they sent for as long.

{_SIGNED if signs else _TO_BE_SIGNED}

{names}

   CORE needs JetStream: R{info.replicas}, disk_storage: {storage_needed(info.budget)}, streams: {MOST_STREAMS} or more
   (the claims beside this file have {jwt.ROOM_FOR_STREAMS}), consumers without a limit (two for each agent). Its
   streams are made by Tidings. What it exports needs an activation token, so that no other account of your servers can
   import it.

3. With an operator signing key only: a user of the system account that may publish

    {pushes}

   and subscribe its own inbox: _INBOX_<its public key, which begins with U>.> Nothing else.

{_danger(info)}Then: {then}
"""


def _danger(info: SpaceInfo) -> str:
    return f"Know that {words}.\n\n" if (words := danger_of_replicas(info)) else ""


_SIGNED = """2. Put the tokens beside this file (<account>.jwt, signed with the operator signing key you gave) into your
   resolver: into its directory of every server before it starts, or as the payload of a request to
   $SYS.REQ.CLAIMS.UPDATE by a user of your system account. Later changes of the agents' account are pushed by Tidings
   with the credentials you gave, so whoever is revoked is cut at once:"""
_TO_BE_SIGNED = """2. Sign a token for each account with your operator key, and put it into your resolver. Its claims
   are beside this file (<name>.json; iss, iat and jti are yours to add):"""


# --- what is there ---


async def missing_line(home: SpaceHome, keyring: Keyring) -> str | None:
    """The first thing that the server lacks, in words; None if the space can live there."""
    return await Checks(home, keyring, home.read_info()).missing()


class Checks:
    """Each answers what is missing, or None."""

    def __init__(self, home: SpaceHome, keyring: Keyring, info: SpaceInfo) -> None:
        self.home, self.keyring, self.info = home, keyring, info
        self.subjects: Subjects = info.subjects

    async def missing(self) -> str | None:
        for look in (self.server, self.jetstream, self.agents, self.pipeline, self.links, self.pushes, self.invited):
            if (words := await look()) is not None:
                return words
        return None

    @asynccontextmanager
    async def _user(self, account: KeyPair, name: str, *, padding: int = 0) -> AsyncIterator[tuple[Connection, str]]:
        """Somebody with every right in an account, whose token is longer by about so much."""
        token, key = self.keyring.short_lived(account, f"{name}{'x' * padding}")
        connection = await connect(self.info.url, jwt.credentials(token, key), key.id, name=name, reconnect=False)
        try:
            yield connection, key.id
        finally:
            await close_quietly(connection)

    def _no_account(self, account: str) -> str:
        return (
            f"account {account}_{self.info.name}: its token is not there, or not signed by the operator of this server"
        )

    async def server(self) -> str | None:
        try:
            async with self._user(self.keyring.core, "check") as (core, _):
                said = dict(core.info)
        except AuthRevoked:
            return self._no_account("CORE")
        version = tuple(int(part) for part in str(said.get("version", "0")).split("-")[0].split("."))
        if version < MINIMUM_VERSION:
            return f"nats-server 2.15 or newer: this one is {said.get('version')}"
        if int(said.get("max_payload", 0)) < MAX_PAYLOAD:
            return f"max_payload: {MAX_PAYLOAD} (it is {said.get('max_payload')})"
        if self.info.replicas > 1 and not said.get("cluster"):
            return f"a cluster: {self.info.replicas} replicas were asked for and this server is alone (--replicas 1)"
        return None

    async def jetstream(self) -> str | None:
        try:
            async with self._user(self.keyring.core, "check") as (core, _):
                said = await self._jetstream_info(core)
        except ApiError as error:
            return f"JetStream in account CORE_{self.info.name}: {error.description}"
        limits, tier = said["limits"], f"R{self.info.replicas}"
        if tiers := said.get("tiers"):
            if tier not in tiers:
                return (
                    f"a tier {tier} in the limits of account CORE_{self.info.name} (it has {', '.join(sorted(tiers))})"
                )
            limits = tiers[tier]["limits"]
        return self._short_of(limits)

    async def _jetstream_info(self, core: Connection) -> dict[str, Any]:
        try:
            return dict(await JetStream(core).api("INFO"))
        except BrokerUnreachable as error:  # so it is also where an account asks for more than a server has
            needed = storage_needed(self.info.budget) / 1e9
            raise BrokerUnreachable(
                f"JetStream of {self.info.address} does not answer account CORE_{self.info.name}: do its servers have "
                f"{needed:.1f} GB left for it (else their log says `insufficient storage resources`), and a leader?"
            ) from error

    def _short_of(self, limits: dict[str, Any]) -> str | None:
        needed = {
            "disk_storage": ("max_storage", storage_needed(self.info.budget)),
            "disk_max_stream_bytes": ("storage_max_stream_bytes", self.info.budget + RESERVE),
            "streams": ("max_streams", MOST_STREAMS),
        }
        for line, (name, least) in needed.items():
            has = int(limits.get(name, -1))
            unbounded = has < 0 or (has == 0 and name == "storage_max_stream_bytes")
            if not unbounded and has < least:
                return f"{line}: {least} in the limits of account CORE_{self.info.name} (it is {has})"
        return None

    async def agents(self) -> str | None:
        """Are they let in, with tokens as large as some have, and reach CORE?"""
        try:
            async with self._user(self.keyring.agents, "check") as (agents, agent_id):
                if not await self._is_served(agents, self.subjects.control("health", agent_id), hears=True):
                    return f"the imports of account AGENTS_{self.info.name}, each with its activation token"
        except AuthRevoked:
            return self._no_account("AGENTS")
        try:
            async with self._user(self.keyring.agents, "check", padding=LARGE_TOKEN):
                return None
        except (TidingsError, NatsError):
            return f"max_control_line: {CONTROL_LINE} (tokens of agents with many patterns are longer than it takes)"

    async def _is_served(self, user: Connection, asked: str, *, hears: bool) -> bool:
        """Does CORE hear what a user asks, and, if it is one that `hears`, the user what CORE publishes live?"""
        heard = asyncio.Event()
        async with self._user(self.keyring.core, "check") as (core, _):

            async def answer(message: Any) -> None:
                await core.publish(message.reply, b"{}")

            async def hear(_message: Any) -> None:
                heard.set()

            await core.subscribe(asked, cb=answer)
            await user.subscribe(self.subjects.live_roster, cb=hear)
            await core.flush()
            await user.flush()
            try:
                for _ in range(20):  # what is subscribed here is known elsewhere in a moment
                    await core.publish(self.subjects.live_roster, b"{}")
                    try:
                        await user.request(asked, b"{}", timeout=1)
                        if hears:
                            await asyncio.wait_for(heard.wait(), 0.5)
                    except (NatsError, TimeoutError):
                        await asyncio.sleep(0.1)
                    else:
                        return True
            except OSError:
                pass
        return False

    async def pipeline(self) -> str | None:
        try:
            async with self._user(self.keyring.pipe, "check") as (pipe, _):
                await JetStream(pipe).api("STREAM.INFO.none")
        except AuthRevoked:
            return self._no_account("PIPE")
        except ApiError as error:
            if "not enabled" not in error.description:
                return None
        except TidingsError:
            pass
        return f"the imports of account PIPE_{self.info.name}, each with its activation token"

    async def links(self) -> str | None:
        """Does CORE hear what the worker of a linked space asks?"""
        try:
            async with self._user(self.keyring.link, "check") as (link, link_id):
                if await self._is_served(link, self.subjects.control(LINK_SERVICE, link_id), hears=False):
                    return None
        except AuthRevoked:
            return self._no_account("LINK")
        return f"the imports of account LINK_{self.info.name}, each with its activation token"

    async def invited(self) -> str | None:
        """Is whoever was invited let in, and heard by CORE? With a signing key its token is pushed first."""
        if signs_itself(self.info):
            return None
        try:
            async with self._user(self.keyring.invite, "check") as (guest, guest_id):
                if await self._is_served(
                    guest, self.subjects.control(OfferRequest.operation.service, guest_id), hears=False
                ):
                    return None
        except AuthRevoked:
            return self._no_account("INVITE")
        except (TidingsError, NatsError):  # too many came with a line at once: they are known there
            return None
        return f"the imports of account INVITE_{self.info.name}, each with its activation token"

    async def pushes(self) -> str | None:
        if not signs_itself(self.info):
            return None
        for account in (self.info.agents_account, self.keyring.invite.id, self.keyring.link.id):
            try:
                async with system_user(self.home, self.info) as system:
                    await system.request(f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP", b"", timeout=ANSWER)
            except (TidingsError, NatsError, TimeoutError) as error:
                return (
                    f"a user of the system account that may publish $SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP and "
                    "UPDATE, and subscribe its own inbox: the one that was given does not "
                    f"({error or type(error).__name__})"
                )
        return None
