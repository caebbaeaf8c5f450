"""What an administrator does with links: agree on one, change it, end it.

    written down -> user of the other space's worker -> record by the steward -> on
    written down -> that user is cut at the broker   -> record by the steward -> off

Whatever is interrupted is found in the ledger and finished by the next one. The steward decides whether a record may be
written; what it refuses leaves everything as it was. Only here is the key of the account LINK used.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tidings.admin.administration import Administrator
from tidings.admin.external import longest_lifetime
from tidings.admin.link_registry import AgreedLink
from tidings.contract.admin import EndLinkRequest, LinkChangedAnswer, LinkRecordsRequest, SetLinkRequest
from tidings.errors import OutcomeUnknown, TidingsError, UnreachableError, UsageError
from tidings.nats import jwt
from tidings.util import failpoints
from tidings.wire.link_terms import LinkAcceptance, LinkOffer, limits_of
from tidings.wire.message import new_id
from tidings.wire.names import check_agent_id
from tidings.wire.rulings import Link
from tidings.wire.signing import KeyPair

#: fields of a record that are no terms of the link
_OWN = ("op", "v", "at", "link", "state", "origin", "peer")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Linked:
    """A link as it was set. `creds`: for the other space's worker, if its key was made here; kept nowhere."""

    row: AgreedLink
    creds: str = ""


class Linker:
    """Links under the admin lock."""

    def __init__(self, admin: Administrator) -> None:
        self.admin = admin
        self.ledger = admin.links

    async def set(self, terms: Link, *, make_peer: bool = False, line: str = "") -> Linked:
        """Agree on a link, or change one. `terms.peer`: the user of the other space's worker, by its public key; None:
        the one it has. `make_peer`: a new key for it, which is answered and not kept. `line`: the invitation by which
        it was accepted here."""
        await self.finish()
        before = self.ledger.get(terms.link)
        check_until(terms.until)
        key = KeyPair.generate() if make_peer else None
        peer = key.id if key is not None else terms.peer or (before.peer if before else "")
        row = self._row(terms, check_agent_id(peer) if peer else "", before)
        row = self.ledger.put(row, line=line or (before.line if before else ""))
        failpoints.reach("link.after_ledger")
        try:
            row = await self._write(row)
        except (UnreachableError, OutcomeUnknown):
            raise  # found in the ledger by whoever comes next
        except TidingsError:
            self.ledger.put(before) if before is not None else self.ledger.forget(terms.link)
            raise
        return Linked(row, jwt.credentials(row.token, key) if key is not None else "")

    def _row(self, terms: Link, peer: str, before: AgreedLink | None) -> AgreedLink:
        void, fields = dict(before.void) if before else {}, msgspec.to_builtins(terms)
        if before is not None and before.peer and before.peer != peer:
            void[before.peer] = max(int(time.time()), before.iat)
        return self._with_token(
            AgreedLink(
                link=terms.link,
                origin=terms.origin,
                state="setting",
                op=new_id(),
                terms={name: value for name, value in fields.items() if name not in _OWN},
                peer=peer,
                void=void,
            )
        )

    def _with_token(self, row: AgreedLink) -> AgreedLink:
        """A new token for the user, which ends with the link if that does, and before where nobody can be cut."""
        if not row.peer:
            return row
        until, lifetime = row.terms.get("until"), longest_lifetime(self.admin.info, 0)
        iat = max(int(time.time()), row.void.get(row.peer, -1) + 1)
        ends = [each for each in (until, iat + lifetime if lifetime else None) if each is not None]
        token = self.admin.keyring.peer_token(
            self.admin.subjects, row.peer, row.link, iat=iat, expires=min(ends) if ends else None
        )
        return replace(row, token=token, iat=iat, lifetime=lifetime)

    async def _write(self, row: AgreedLink) -> AgreedLink:
        """Have the record written, and whoever it no longer names cut."""
        request = SetLinkRequest.operation.decode(
            {"link": row.link, "origin": row.origin, "peer": row.peer or None, **row.terms}
        )
        answer: LinkChangedAnswer = await self.admin.call(request, op=row.op)
        failpoints.reach("link.after_record")
        if row.void:
            await self.admin.push_links()
        return self.ledger.put(row, state="on", seq=answer.seq)

    async def end(self, link: str, why: str = "") -> AgreedLink:
        """The other space's worker is cut, and what it sent is admitted no more. Ended again it stays ended."""
        await self.finish(but=link)
        row = self.ledger.get(link)
        if row is None:
            raise UsageError(f"there is no link {link} in space {self.admin.info.name}")
        if row.state == "off":
            return self.ledger.put(row, why="") if row.why else row  # its owner has seen why
        return await self._cut(row, why)

    async def _cut(self, row: AgreedLink, why: str) -> AgreedLink:
        """The connection first, the record second: a cut must not wait for a steward that is away."""
        void = row.void | ({row.peer: max(int(time.time()), row.iat)} if row.peer else {})
        row = self.ledger.put(row, state="ending", op=new_id(), void=void, why=why)
        failpoints.reach("unlink.after_ledger")
        await self.admin.push_links()
        failpoints.reach("unlink.after_push")
        try:
            return await self._complete_end(row)
        except (UnreachableError, OutcomeUnknown) as error:
            log.warning("link %s is cut; its record follows when the steward answers (%s)", row.link, error)
            return row

    async def _complete_end(self, row: AgreedLink) -> AgreedLink:
        answer = await self.admin.call(EndLinkRequest(row.link), op=row.op)
        return self.ledger.put(row, state="off", seq=answer.seq)

    async def finish(self, but: str = "") -> list[str]:
        """Complete what was interrupted. Answers what was done, in words."""
        done = []
        for row in self.ledger.unfinished():
            if row.link == but:
                continue
            if row.state == "setting":
                done.append(await self._complete_set(row))
            else:
                await self.admin.push_links()
                await self._complete_end(row)
                done.append(f"finished the end of link {row.link}")
        return done

    async def _complete_set(self, row: AgreedLink) -> str:
        try:
            await self._write(row)
        except (UnreachableError, OutcomeUnknown):
            raise
        except TidingsError as error:
            await self._cut(row, f"its record was refused: {error}")
            return f"ended link {row.link}, whose change was interrupted: {error}"
        return f"completed an interrupted change of link {row.link}"

    async def reconcile(self) -> list[str]:
        """After a start: what was interrupted, and what a log that went backwards has forgotten."""
        done = await self.finish()
        rows = [row for row in self.ledger.rows() if row.state in ("on", "off")]
        known = (await self.admin.call(LinkRecordsRequest())).links if rows else {}
        # ends first: a link that was made anew since stands in the way of the one it replaced
        for row in sorted(rows, key=lambda row: row.state == "on"):
            found = known.get(row.link)
            if row.state == "on" and (found is None or found.op != row.op):
                done.append(await self._write_again(row))
            elif row.state == "off" and found is not None and found.state == "on":
                await self._complete_end(replace(row, op=new_id()))
                done.append(f"wrote the end of link {row.link} again: the log had lost it")
        return done

    async def _write_again(self, row: AgreedLink) -> str:
        """A link that cannot be as it was keeps nothing else from starting."""
        try:
            await self._write(replace(row, op=new_id()))
        except (UnreachableError, OutcomeUnknown):
            raise
        except TidingsError as error:
            log.warning("link %s, which the log had lost, could not be written again: %s", row.link, error)
            return f"link {row.link} lets nothing pass: the log had lost it, and it could not be written again: {error}"
        return f"wrote link {row.link} again: the log had lost it"

    def renew(self) -> list[str]:
        """New tokens for users whose own end before long; their spaces' workers fetch them. Answers the links."""
        due = [row for row in self.ledger.rows() if row.is_due(time.time())]
        for row in due:
            self.ledger.put(self._with_token(row))
        return [row.link for row in due]


def check_until(until: int | None) -> None:
    if until is not None and until <= time.time():
        raise UsageError("the link would have ended already: name a later time, or none")


def terms_of(row: AgreedLink) -> Link:
    """The record that a row stands for."""
    fields: dict[str, Any] = {"op": row.op, "link": row.link, "origin": row.origin, "peer": row.peer or None}
    return msgspec.convert({**fields, "state": "on", **row.terms}, Link)


def link_record(
    peer: LinkOffer | LinkAcceptance, name: str, channels: dict[str, str], shares: tuple[str, ...], **limits: Any
) -> Link:
    """Our record of a link with the space that made `peer`; `limits` that are not named are those it states."""
    return Link(
        op="-",
        link=peer.link,
        state="on",
        origin=peer.space_id,
        space=name,
        steward=peer.steward,
        channels=channels,
        shares=shares,
        peer=peer.user,
        **{**limits_of(peer), **limits},
    )
