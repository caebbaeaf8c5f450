"""Administration of a space: the only code that opens the operator's and the accounts' keys.

It runs in short-lived processes: `tidings agent ...`, `tidings space ...`, and the steps the supervisor starts as
children of its own. Every operation holds the admin lock, first finishes what an earlier one left undone, writes
its intention to the ledger, asks the steward for the record, and then pushes the derived account token. Whatever
is interrupted is found in the ledger and finished by the next one. If the ledger is older than what is remembered of it
outside of the space, it is brought up to date before anything else (`recall.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tidings.admin.agents import CUT, LIVE, AgentFile, Issued, Ledger, parse_agent_file
from tidings.admin.external import longest_lifetime, push_account_token
from tidings.admin.home import SpaceHome
from tidings.admin.invitations import Invitations
from tidings.admin.layout import Voided, check_layout, make_link_creds, make_pipeline_creds
from tidings.admin.link_registry import LinkLedger
from tidings.admin.recall import Recall, note_recalled, words
from tidings.contract.admin import GrantRequest, IssuedRequest, RevokeRequest, UnreadRequest
from tidings.contract.core import Request
from tidings.errors import (
    ConflictError,
    InvalidName,
    NameTaken,
    OutcomeUnknown,
    SpaceBusy,
    UnreachableError,
    UsageError,
)
from tidings.nats import jwt
from tidings.nats.client import Connection, close_quietly, connect
from tidings.nats.jetstream import JetStream
from tidings.rpc.control import ControlClient
from tidings.server.keyring import Keyring
from tidings.server.resolver import push_token
from tidings.server.streams import ensure_streams
from tidings.util import failpoints
from tidings.util.private_files import locked, read_plain, write_atomic, write_private
from tidings.wire.message import new_id
from tidings.wire.names import covers_any, lookalikes, unfit_to_grant
from tidings.wire.signing import KeyPair

#: after a narrowing, an agent that is connected has this long to fetch its new token before the old one is cut
NARROWING_GRACE = 2.0
#: how long somebody else's operation is waited for
LOCK_WITHIN = 60.0
log = logging.getLogger(__name__)
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Granted:
    """What an administrator's operation did."""

    row: Issued
    created: bool
    closed: list[str]
    note: str = ""
    #: who takes what is void now, in words; "" if nobody does
    untold: str = ""


class Administrator:
    """One admin operation on a running space. Use `administer(...)`."""

    def __init__(self, home: SpaceHome, keyring: Keyring) -> None:
        self.home = home
        self.info = home.read_info()
        self.subjects = self.info.subjects
        self.keyring = keyring
        self.ledger = Ledger(home.issued, outside=home.remembered / self.info.id)
        self.invitations = Invitations.below(home, self.info.id)
        self.links = LinkLedger.below(home, self.info.id)
        self.url = self.info.url
        #: who did not hear of the last token that was pushed, in words; "" if everybody did
        self.untold = ""
        self._stack = AsyncExitStack()
        self._control: ControlClient | None = None
        self._system: Connection | None = None

    # --- connections, opened when first needed ---

    async def _user(self, account: KeyPair, name: str, *, owner: bool) -> tuple[Connection, str]:
        token, key = self.keyring.short_lived(account, name, self.subjects if owner else None)
        connection = await connect(self.url, jwt.credentials(token, key), key.id, name=name, reconnect=False)
        self._stack.push_async_callback(close_quietly, connection)
        return connection, key.id

    async def call(self, request: Request[A], /, *, op: str | None = None) -> A:
        """Asks the steward as an administrator and returns the answer."""
        if self._control is None:
            connection, user_id = await self._user(self.keyring.core, "admin", owner=True)
            self._control = ControlClient(connection, self.subjects, user_id, timeout=30)
        return await self._control.call(request, op=op)

    async def close(self) -> None:
        await self._stack.aclose()

    # --- broker ---

    async def provision(self) -> list[str]:
        """Streams with their exact settings, and the AGENTS token derived afresh."""
        make_pipeline_creds(self.home, self.keyring)
        make_link_creds(self.home, self.keyring)
        connection, _ = await self._user(self.keyring.core, "provision", owner=False)
        info = self.info
        changes = await ensure_streams(JetStream(connection), self.subjects, info.budget, info.epoch, info.replicas)
        await self.push_revocations()
        await self.push_invitations()
        await self.push_links()
        return changes

    async def push_revocations(self) -> None:
        """Give the broker the account token derived from the ledger. One that does not run finds it at its start."""
        token = self.keyring.agents_token(self.subjects, self.ledger.revocations())
        await self.push(self.info.agents_account, token)

    async def push_invitations(self) -> None:
        """The same for those who were invited."""
        token = self.keyring.invite_token(self.subjects, self.invitations.revocations())
        await self.push(self.keyring.invite.id, token)

    async def push_links(self) -> None:
        """The same for the workers of links, our own among them."""
        voided = Voided.of(self.home, self.info.id).read()
        token = self.keyring.link_token(self.subjects, voided | self.links.revocations())
        await self.push(self.keyring.link.id, token)

    async def push(self, account: str, token: str) -> None:
        """Have the broker serve this token of an account, now or from its start on; of others' servers, every one."""
        info = self.info
        if info.mode:
            self.untold = await push_account_token(self.home, self.keyring, info, account)
            if self.untold:
                log.info("%s", self.untold)
            return
        if not info.servers and info.greeting() is None:
            write_private(self.home.resolver / f"{account}.jwt", token)
            return
        if self._system is None:
            self._system, _ = await self._user(self.keyring.system, "resolver", owner=False)
        await push_token(self._system, account, token)

    # --- a folder that was put back from a copy ---

    async def recall(self) -> list[str]:
        """Bring the ledger up to what is remembered outside of it, and the broker with it. Answers what was done."""
        recall = Recall(self.ledger)
        older = recall.compare()
        for row in recall.unremembered:
            recall.remember(row)
        if not older:
            return []
        told = (words(before, row, recall.follows(row), self._has_creds(row)) for before, row in older)
        said = [text for text in told if text is not None]
        note_recalled(self.home, self.info.id, said)  # first: whoever finishes this finds some of it done
        for _, row in older:
            self.ledger.write(row)
            if row.state not in CUT:
                self._rewrite_creds(row)
                if not row.withheld:
                    self.write_file(self._file_of(row))
            elif self._creds_match(row):
                self.home.agent_creds(row.name).unlink()
        await self.push_revocations()
        return said

    def _has_creds(self, row: Issued) -> bool:
        return row.state in CUT or bool(row.invited) or self._creds_match(row)

    # --- finishing what was interrupted ---

    async def finish(self) -> list[str]:
        """Complete or undo every row whose operation did not end. Answers what was done, in words."""
        done = []
        for row in self._outlived():
            await self.cut(row)
            done.append(f"cut the key {row.name} had before its rotation")
        for row in self.ledger.unfinished():
            if row.state == "revoking":
                await self._complete_revocation(row)
                done.append(f"finished the revocation of {row.name}")
            elif row.state == "changing" or row.invited or self._creds_match(row):
                done.append(await self._complete_add(row))
            else:
                await self._undo(row)
                done.append(f"undid an interrupted add of {row.name}: its key was never written")
        return done

    def _outlived(self) -> list[Issued]:
        """Keys whose successor is active: a rotation that ended before the cut."""
        followed = {row.succeeds for row in self.ledger.rows() if row.state == "active" and row.succeeds}
        return [row for row in self.ledger.rows() if row.id in followed and row.state == "active"]

    async def _complete_add(self, row: Issued) -> str:
        self._rewrite_creds(row)
        try:
            row, _ = await self._grant(row)
        except NameTaken:
            if row.state == "changing":
                raise
            await self._undo(row)
            return f"undid an interrupted add of {row.name}: the name went to another key"
        if not row.withheld:  # its file says what it may post once that is restored
            self.write_file(self._file_of(row))
        predecessor = self.ledger.get(row.succeeds) if row.succeeds else None
        if predecessor is not None and predecessor.state in LIVE:
            await self.cut(predecessor)
        await self.push_revocations()  # it may have been a narrowing
        self.ledger.put(row, state="active")
        return f"completed an interrupted change of {row.name}"

    async def _undo(self, row: Issued) -> None:
        await self._complete_revocation(row)
        self.ledger.put(row, state="undone", void_until=max(row.void_until, row.iat))

    def _creds_match(self, row: Issued) -> bool:
        path = self.home.agent_creds(row.name)
        if not path.exists():
            return False
        return jwt.split_credentials(path.read_text())[1].id == row.id

    async def reconcile(self) -> list[str]:
        """After a start: finish rows, write again what a log that went backwards has forgotten."""
        done = [*await self.finish()]
        rows = sorted(
            (row for row in self.ledger.rows() if row.state in ("revoked", "undone", "active")),
            key=self._reconcile_order(),
        )
        for chunk in (rows[i : i + 200] for i in range(0, len(rows), 200)):
            found = (await self.call(IssuedRequest(tuple(row.id for row in chunk)))).found
            for row in chunk:
                known = found.get(row.id)
                if row.state == "active" and (known is None or known.op != row.op or known.revoked):
                    again, _ = await self._grant(replace(row, succeeds=await self._known_predecessor(row)))
                    self.ledger.put(again, succeeds=row.succeeds)
                    done.append(f"wrote the access of {row.name} again: the log had lost it")
                elif row.state != "active" and known is not None and not known.revoked:
                    await self.call(RevokeRequest(row.id))
                    done.append(f"wrote the revocation of {row.name} again: the log had lost it")
        return done

    async def renew(self) -> list[str]:
        """New tokens for those whose own end before long; the steward hands them out, and nobody is cut. Answers names.

        The access record keeps the token it has: a renewal is no ruling.
        """
        due = self.ledger.due(time.time())
        for row in due:
            iat = max(int(time.time()), row.iat, row.void_until + 1)
            token = self._token(row.id, rights_of(row), iat, row.withheld, row.lifetime)
            self._rewrite_creds(self.ledger.put(row, token=token, iat=iat))
        return [row.name for row in due]

    def _reconcile_order(self) -> Callable[[Issued], int]:
        """Revocations first, because names move; but a predecessor after its successor, which inherits from it."""
        followed = {row.succeeds for row in self.ledger.rows() if row.succeeds}
        return lambda row: 1 if row.state == "active" else 2 if row.id in followed else 0

    async def _known_predecessor(self, row: Issued) -> str:
        """The nearest key before this one that the log still knows as an agent: whom to inherit from."""
        before = row.succeeds
        while before:
            known = (await self.call(IssuedRequest((before,)))).found.get(before)
            if known is not None and not known.revoked:
                return before
            older = self.ledger.get(before)
            before = older.succeeds if older else ""
        return ""

    # --- operations on agents ---

    async def add(self, agent: AgentFile, *, existing_ok: bool = False, lifetime: int = 0) -> Granted:
        """Provision an agent: ledger, key, access record, mailboxes, file. Same name again is refused or returned.

        `lifetime`: seconds for which its credential holds; another is made before, for as long as it is an agent.
        """
        agent = agent.checked()
        await self.finish()
        held = self.ledger.active(agent.name)
        if held is not None and existing_ok:
            return Granted(held, created=False, closed=[])
        self.check_free_name(agent.name)
        await self._check_steward(f"agent {agent.name} was not added")
        key = KeyPair.generate()
        row = await self.issue(agent, key.id, key, lifetime=lifetime)
        self.write_file(agent)
        return Granted(row, created=True, closed=[])

    async def _check_steward(self, nothing: str) -> None:
        """Nothing is written here that the steward would not hear of: while it is away there is nothing to undo."""
        try:
            await self.call(IssuedRequest())
        except UnreachableError as error:
            raise type(error)(f"{nothing}: {error}") from error

    def check_free_name(self, name: str) -> None:
        """A name is given once, and so that nobody can be taken for somebody else. A rotation keeps its own."""
        if (held := self.ledger.active(name)) is not None:
            raise NameTaken(f"agent {name} exists ({held.id}); `tidings agent access {name}` changes its rights")
        if why := unfit_to_grant(name):
            raise InvalidName(f"agent name {name!r} is not allowed: {why}; choose another")
        taken = [row.name for row in self.ledger.rows() if row.state in (*LIVE, "revoking")]
        if alike := lookalikes(name, taken):
            raise NameTaken(f"agent name {name!r} can be taken for {' or '.join(alike)}, which exists: choose another")

    async def issue(
        self,
        agent: AgentFile,
        agent_id: str,
        key: KeyPair | None = None,
        *,
        succeeds: str = "",
        withheld: str = "",
        invited: str = "",
        lifetime: int = 0,
    ) -> Issued:
        """Ledger, credential and access record of a new key. One that was `invited` has its key elsewhere."""
        lifetime = longest_lifetime(self.info, lifetime)
        iat = int(time.time())
        token = self._token(agent_id, agent, iat, withheld, lifetime)
        row = Issued(
            id=agent_id,
            name=agent.name,
            state="pending",
            op=new_id(),
            read=agent.read,
            post=agent.post,
            manage=agent.manage,
            roles=agent.roles,
            token=token,
            iat=iat,
            succeeds=succeeds,
            withheld=withheld,
            invited=invited,
            lifetime=lifetime,
        )
        self.ledger.put(row)
        failpoints.reach("add.after_ledger")
        if key is not None:
            write_private(self.home.agent_creds(agent.name), jwt.credentials(token, key))
        failpoints.reach("add.after_creds")
        return (await self._grant(row))[0]

    def _token(self, agent_id: str, agent: AgentFile, iat: int, withheld: str, lifetime: int) -> str:
        read, post = list(agent.read), list(agent.post)
        return self.keyring.agent_token(
            self.subjects, agent_id, agent.name, read, post, iat=iat, withheld=bool(withheld), lifetime=lifetime
        )

    async def _grant(self, row: Issued) -> tuple[Issued, list[str]]:
        request = GrantRequest(
            id=row.id,
            name=row.name,
            roles=row.roles,
            read=row.read,
            post=row.post,
            manage=row.manage,
            jwt=row.token,
            iat=row.iat,
            succeeds=row.succeeds or None,
            withheld=row.withheld,
        )
        granted = await self.call(request, op=row.op)
        failpoints.reach("add.after_grant")
        # a change ends when the old token is void, not before
        state = "changing" if row.state == "changing" else "active"
        return self.ledger.put(row, state=state, seq=granted.seq), list(granted.closed)

    async def set_access(
        self, name: str, agent: AgentFile, *, restore: bool | None = None, lifetime: int | None = None
    ) -> Granted:
        """New rights for an agent. Lost ones are cut after a grace in which its endpoint can fetch the new token.

        What was withheld from a flooder stays withheld until somebody decides about its posting: `restore`, by default
        whenever it may post somewhere.
        """
        await self.finish()
        row = self._active(name)
        restored = bool(agent.post) if restore is None else restore
        changed, closed, narrowed = await self._change(row, agent, "" if restored else row.withheld, lifetime)
        self.write_file(agent)
        await self._settle_change(narrowed)
        note, untold = ("narrowed", self.untold) if narrowed else ("widened", "")
        row = self.ledger.put(changed, state="active")
        return Granted(row, created=False, closed=closed, note=note, untold=untold)

    async def withhold(self, agent_id: str, why: str) -> Granted:
        """Take from a flooder the right to send. Its file keeps what it may post, for whoever restores it."""
        await self.finish()
        row = self.ledger.get(agent_id)
        if row is None or row.state != "active":
            raise UsageError(f"there is no active agent {agent_id} to withhold posting from")
        if row.withheld:
            return Granted(row, created=False, closed=[], note="withheld before")
        changed, closed, narrowed = await self._change(row, replace(rights_of(row), post=()), why)
        await self._settle_change(narrowed)
        return Granted(self.ledger.put(changed, state="active"), created=False, closed=closed, note="withheld")

    async def bar(self, agent_id: str, why: str) -> Granted:
        """Void the credential of an agent that took what others need, until its owner gives it another.

        The cut first, the record second, as with a revocation; it keeps its name, its channels and its mail.
        """
        row = self.ledger.get(agent_id)
        if row is None or row.state not in LIVE:
            raise UsageError(f"there is no active agent {agent_id} to bar")
        if row.barred:
            return Granted(row, created=False, closed=[], note="barred before")
        void_until = max(int(time.time()), row.iat)
        row = self.ledger.put(
            row,
            op=new_id(),
            post=(),
            void_until=void_until,
            withheld=f"{why}; its credential is void",
            state="changing",
        )
        await self.push_revocations()
        await self.finish()
        return Granted(self.ledger.get(agent_id) or row, created=False, closed=[], note="barred")

    async def _change(
        self, row: Issued, agent: AgentFile, withheld: str, lifetime: int | None = None
    ) -> tuple[Issued, list[str], bool]:
        """Ledger, credential and record of other rights. Answers the row, what was closed, and whether it narrowed."""
        lifetime = longest_lifetime(self.info, row.lifetime if lifetime is None else lifetime)
        briefer = bool(lifetime) and (not row.lifetime or lifetime < row.lifetime)  # what was copied ends as soon
        narrowed = _is_narrower(row, agent) or bool(withheld and not row.withheld) or briefer
        iat = max(int(time.time()), row.iat, row.void_until + 1)
        void_until = row.void_until
        if narrowed:
            void_until, iat = iat, iat + 1
        token = self._token(row.id, agent, iat, withheld, lifetime)
        changed = self.ledger.put(
            row,
            op=new_id(),
            read=agent.read,
            post=agent.post,
            manage=agent.manage,
            roles=agent.roles,
            token=token,
            iat=iat,
            void_until=void_until,
            withheld=withheld,
            lifetime=lifetime,
            state="changing",
        )
        failpoints.reach("access.after_ledger")
        self._rewrite_creds(changed)
        changed, closed = await self._grant(changed)
        return changed, closed, narrowed

    async def _settle_change(self, narrowed: bool) -> None:
        """A narrowing ends when the old token is void."""
        if narrowed:
            failpoints.reach("access.before_push")
            await asyncio.sleep(NARROWING_GRACE)
            await self.push_revocations()

    def _rewrite_creds(self, row: Issued) -> None:
        """The new token beside the key, if the key is here: an exported agent fetches it from its access record."""
        if self._creds_match(row):
            path = self.home.agent_creds(row.name)
            _, key = jwt.split_credentials(path.read_text())
            write_private(path, jwt.credentials(row.token, key))

    async def revoke(self, name: str) -> Granted:
        """Cut an agent for good: every key under its name, should a rotation have left two."""
        living = self.ledger.living(name) or [self._active(name)]
        row = [await self.cut(each) for each in living][-1]
        self.home.agent_creds(name).unlink(missing_ok=True)
        note = "" if row.state == "revoked" else "its record follows when the steward answers"
        return Granted(row, created=False, closed=[], note=note, untold=self.untold)

    async def cut(self, row: Issued) -> Issued:
        """The connection first, the record second: a cut must not wait for a steward that is away."""
        row = self.ledger.put(row, state="revoking", void_until=max(int(time.time()), row.iat))
        failpoints.reach("revoke.after_ledger")
        await self.push_revocations()
        failpoints.reach("revoke.after_push")
        try:
            await self.call(RevokeRequest(row.id))
        except (UnreachableError, OutcomeUnknown) as error:
            log.warning("what %s was given is void; its record follows when the steward answers (%s)", row.name, error)
            return row
        return self.ledger.put(row, state="revoked")

    async def _complete_revocation(self, row: Issued) -> None:
        row = self.ledger.put(row, void_until=max(row.void_until, row.iat))
        await self.push_revocations()
        await self.call(RevokeRequest(row.id))
        if self._creds_match(row):
            self.home.agent_creds(row.name).unlink()
        self.ledger.put(row, state="revoked")

    async def rotate(self, name: str, *, drop_unread: bool = False) -> Granted:
        """A new key under the same name, in the same channels; the old key is cut.

        What lies unread is for the old key and goes with it, so it is refused unless there is nothing or it may go:
        `drop_unread`. Then whoever it concerns is told, by the steward. The answer's note is what was dropped.
        """
        await self.finish()
        old = self._active(name)
        await self._check_steward(f"agent {name} has no new key")
        unread = (await self.call(UnreadRequest(old.id))).words
        if unread and not drop_unread:
            raise ConflictError(
                f"agent {name} keeps its key, because a new one cannot have what lies unread for it: {unread}. Let it "
                f"read first (`tidings inbox --as {name}`), or give that up with "
                f"`tidings agent rotate {name} --drop-unread`"
            )
        agent = self._file_of(old)  # rights come from what was granted, not from what a file says meanwhile
        key = KeyPair.generate()
        row = await self.issue(agent, key.id, key, succeeds=old.id, withheld=old.withheld, lifetime=old.lifetime)
        failpoints.reach("rotate.before_cut")
        await self.cut(old)
        return Granted(row, created=True, closed=[], note=unread, untold=self.untold)

    def _active(self, name: str) -> Issued:
        row = self.ledger.active(name)
        if row is None:
            gone = self.ledger.newest(name)
            raise UsageError(
                f"agent {name} was revoked" if gone else f"there is no agent {name} in space {self.info.name}"
            )
        return row

    # --- agent files ---

    def write_file(self, agent: AgentFile) -> Path:
        path = self.home.agents / f"{agent.name}.md"
        write_atomic(path, agent.render(), 0o600)
        return path

    def read_file(self, name: str) -> AgentFile:
        return read_agent_file(self.home, name)

    def _file_of(self, row: Issued) -> AgentFile:
        """The agent's file with the rights of a row: what an interrupted change had not come to write."""
        known = (self.home.agents / f"{row.name}.md").exists()
        agent = self.read_file(row.name) if known else AgentFile(row.name)
        return replace(agent, name=row.name, read=row.read, post=row.post, manage=row.manage, roles=row.roles)


def rights_of(row: Issued) -> AgentFile:
    """What was granted, whatever a file says meanwhile."""
    return AgentFile(row.name, row.roles, "", row.read, row.post, row.manage)


def read_agent_file(home: SpaceHome, name: str) -> AgentFile:
    path = home.agents / f"{name}.md"
    try:
        return parse_agent_file(read_plain(path), str(path))
    except FileNotFoundError:
        raise UsageError(f"there is no agent file {path}") from None


def _is_narrower(row: Issued, agent: AgentFile) -> bool:
    """Does the new access lack anything the old one had?"""
    lost_read = any(not covers_any(agent.read, pattern) for pattern in row.read)
    lost_post = any(not covers_any(agent.post, pattern) for pattern in row.post)
    return lost_read or lost_post


@asynccontextmanager
async def administer(home: SpaceHome, purpose: str) -> AsyncIterator[Administrator]:
    """Hold the admin lock with the keys open, for one operation."""
    home.read_info()
    async with _admin_lock(home.admin_lock, purpose):
        check_layout(home.read_info())
        administrator = Administrator(home, Keyring.load(home.keys))
        try:
            for each in await administrator.recall():
                log.warning("a folder was put back from an older copy: %s", each)
            yield administrator
        finally:
            await administrator.close()


@asynccontextmanager
async def _admin_lock(path: Path, purpose: str) -> AsyncIterator[None]:
    """The lock, waited for without holding up the loop: a host serves many agents with it."""
    until = time.monotonic() + LOCK_WITHIN
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(path, purpose))
                break
            except SpaceBusy:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(0.02)
        yield
