"""Letting records of a peer in: judged, looked for in the index, put into the log here, and what became of each.

Nothing is written into the ledger here, and nothing is remembered that a worker which dies would miss: what it had let
in is found in the index by the next one. What blocks more than one record is raised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tidings import errors
from tidings.errors import TidingsError
from tidings.links import local_index
from tidings.links.definition import LinkDefinition
from tidings.links.link_store import BookedLink, Disposed
from tidings.links.local_index import IndexState
from tidings.links.obligations import LATE, NOT_LISTED
from tidings.links.ports import AdmittedAt, Destination, LinkAdmission, OriginIdentity, Verify
from tidings.links.validation import Admit, Omit, Refuse, Verdict, disposed, judge, order
from tidings.wire.links import LinkedRecord

log = logging.getLogger(__name__)

#: bytes that a record takes in the log beside its payload, about
BESIDE = 400
#: message ids that may be burnt before a record is put aside
IDS_TRIED = 3
#: failures nobody has a class for before the record they happen to is put aside
UNCLEAR_TRIES = 3
#: answers that say that this record will never be taken
_RECORD = (errors.WireError, errors.UsageError, errors.IdBurned)
#: answers that say nothing of the record they are given for
_CLEAR = (
    errors.UnreachableError,
    errors.OutcomeUnknown,
    errors.NotLookedFor,
    errors.DeniedError,
    errors.UnhealthyError,
)


class _Landed(NamedTuple):
    """Where a record is now, and over which link it came."""

    seq: int
    link: str


class Admitter:
    """Of one direction of a link."""

    def __init__(
        self, definition: LinkDefinition, ledger: BookedLink, destination: Destination, verify: Verify
    ) -> None:
        self._definition, self._ledger, self._destination, self._verify = definition, ledger, destination, verify
        #: bytes that were put into the log here, until somebody writes them down
        self.added = 0
        self._unclear: Counter[OriginIdentity] = Counter()
        #: were not taken while something later of their sender was
        self._overtaken: set[OriginIdentity] = set()

    async def dispose(
        self,
        records: Sequence[LinkedRecord],
        index: IndexState,
        check: Callable[[], Awaitable[None]],
        *,
        listed: bool = False,
        refusal: TidingsError | None = None,
    ) -> list[Disposed]:
        """What becomes of each, in their order. What is to be in the log here is in it when this returns. `check` is
        asked before anything is put there, and after: it raises if that does not count. `listed`: only in channels of
        ours that are listed it does. `refusal` is raised if anything would be put there."""
        signed = await self._verify(records)
        verdicts = [_judged(record, good, self._definition) for record, good in zip(records, signed, strict=True)]
        to_admit = [each for each in verdicts if isinstance(each, Admit)]
        space, names = self._definition.space, {each.identity for each in to_admit}
        here = await self._ledger.read(lambda c: local_index.present(c, space, names))
        first: dict[OriginIdentity, Admit] = {}
        for each in to_admit:
            first.setdefault(each.identity, each)
        new = order([each for name, each in first.items() if name not in here])
        closed = await self._destination.unlisted({each.ours for each in new}) if listed and new else ()
        not_listed = {each.identity: _not_listed(each) for each in new if each.ours in closed}
        new = [each for each in new if each.ours not in closed]
        if new and refusal is not None:
            raise refusal
        if new:
            await check()
        landed = not_listed | await self._admit(new, index.epoch)
        if new:
            await check()
        done: list[Disposed] = []
        for verdict in verdicts:
            if not isinstance(verdict, Admit):
                done.append(_left_out(verdict))
                continue
            each, name, known = verdict, verdict.identity, here.get(verdict.identity)
            if (known.hash if known is not None else first[name].hash) != each.hash:
                done.append(_put_aside(each, "id_reused", "another message of this sender has the same id"))
                continue
            found = _Landed(known.seq, known.link) if known is not None else landed[name]
            if isinstance(found, Refuse):
                done.append(_put_aside(each, found.reason, found.words))
            else:
                mine = found.link == self._definition.link and first[name] is each
                late = LATE if mine and name in self._overtaken else ""
                done.append(disposed(each, "admitted" if mine else "duplicate", late, found.seq))
                self._overtaken.discard(name)
        return done

    async def _admit(self, batch: Sequence[Admit], epoch: str) -> dict[OriginIdentity, _Landed | Refuse]:
        """Put them into the log here. What blocks more than one of them is raised: nothing is known of the rest, and
        the index says next time what became of it."""
        landed: dict[OriginIdentity, _Landed | Refuse] = {}
        for attempt in range(IDS_TRIED):
            if not batch:
                return landed
            asked = []
            for each in batch:
                mid = await self._ledger.message_id(self._definition.space, *each.identity, str(attempt))
                asked.append(LinkAdmission(each.record, each.ours, mid))
            answers = await self._destination.admit(asked, epoch)
            self._overtaken |= _overtaken(batch, answers)
            burnt: list[Admit] = []
            for each, answer in zip(batch, answers, strict=True):
                found = await self._answered(each, answer)
                if found is None:
                    burnt.append(each)
                else:
                    landed[each.identity] = found
            batch = burnt
        for each in batch:
            words = "the log has something else under each message id that was tried"
            landed[each.identity] = Refuse(each.record, "id_burned", words)
        return landed

    async def _answered(self, each: Admit, answer: AdmittedAt | TidingsError) -> _Landed | Refuse | None:
        """Where it is, or why it never will be; None if its message id was somebody else's."""
        if isinstance(answer, AdmittedAt):
            self._unclear.pop(each.identity, None)
            if not answer.duplicate:
                self.added += len(each.record.payload) + BESIDE
                return _Landed(answer.seq, self._definition.link)
            page = await self._destination.index(answer.seq - 1)
            row = page.rows[0] if page.rows else None
            # it may have been removed since; another link of this ledger may have seen it before
            if row is None or row.seq != answer.seq:
                return await self._known_at(each, answer.seq)
            return _Landed(answer.seq, row.link) if (row.identity, row.hash) == (each.identity, each.hash) else None
        if not isinstance(answer, _RECORD):
            if isinstance(answer, _CLEAR):
                raise answer
            self._unclear[each.identity] += 1
            if self._unclear[each.identity] < UNCLEAR_TRIES:
                raise answer
            del self._unclear[each.identity]
        return Refuse(each.record, answer.code, str(answer))

    async def _known_at(self, each: Admit, seq: int) -> _Landed | None:
        space, name = self._definition.space, each.identity
        known = (await self._ledger.read(lambda c: local_index.present(c, space, [name]))).get(name)
        return _Landed(seq, known.link) if known is not None and (known.hash, known.seq) == (each.hash, seq) else None


def _judged(record: LinkedRecord, signed: bool, definition: LinkDefinition) -> Verdict:
    try:
        return judge(record, signed, definition)
    except Exception as error:  # Boundary: a record that we stumble over must not stop those behind it.
        log.exception("record %d of link %s could not be judged", record.seq, definition.link)
        return Refuse(record, "unexpected", f"{type(error).__name__}: {error}")


def _left_out(verdict: Omit | Refuse) -> Disposed:
    if isinstance(verdict, Omit):
        return disposed(verdict, "omitted", verdict.reason)
    return disposed(verdict, "quarantined", verdict.reason, words=verdict.words)


def _not_listed(verdict: Admit) -> Refuse:
    name = verdict.ours
    words = f"channel {name} is not listed here: `tidings channels set {name}` lists it, and then this is let in"
    return Refuse(verdict.record, NOT_LISTED, words)


def _put_aside(verdict: Admit, reason: str, words: str) -> Disposed:
    return disposed(verdict, "quarantined", reason, words=words)


def _overtaken(batch: Sequence[Admit], answers: Sequence[AdmittedAt | TidingsError]) -> set[OriginIdentity]:
    """Records that were not taken, though a later one of their sender was."""
    found, taken = set[OriginIdentity](), set[str]()
    for each, answer in zip(reversed(batch), reversed(answers), strict=True):
        if isinstance(answer, AdmittedAt):
            taken.add(each.record.sender)
        elif each.record.sender in taken:
            found.add(each.identity)
    return found
