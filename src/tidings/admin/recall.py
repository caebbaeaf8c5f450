"""What was decided about agents, remembered outside of what a backup copies and puts back.

The ledger lies in the folder of the space. A copy of that folder which is put back has an older one, and would give a
revoked agent its rights again. So every row is written a second time below `marks/` (`Ledger.put`), bound to the id of
the space, and before anything is derived from the ledger the two are compared: of each key the later row holds, and no
key comes back that was cut. What was brought up to date is noted, and `status` says it until it is acknowledged. The
log is not looked at here: the administrator writes again what it lost, as for any log that went backwards.

If nothing is remembered (another machine), the ledger is believed, and what it took is remembered.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

import msgspec

from tidings.admin.agents import CUT, Issued, Ledger
from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError
from tidings.util.private_files import private_dir, write_private
from tidings.wire.names import is_agent_id

#: of what is said in one sentence of `status`
MOST_SAID = 20
KEPT = 1_000
log = logging.getLogger(__name__)


class Notes(msgspec.Struct):
    """What was brought up to date, until its owner has seen it."""

    space: str = ""
    at: str = ""
    said: list[str] = []


class Recall:
    """A ledger beside what is remembered of it."""

    def __init__(self, ledger: Ledger) -> None:
        assert ledger.outside is not None
        self.ledger = ledger
        self._outside = Ledger(private_dir(ledger.outside))
        self._remembered = self._read()
        #: rows that took something and are not remembered, or not as they are now
        self.unremembered: list[Issued] = []

    def _read(self) -> dict[str, Issued]:
        rows = {}
        for path in self._outside.folder.glob("U*.json"):
            if not is_agent_id(path.stem):
                continue
            try:
                row = self._outside.get(path.stem)
            except ConfigError as error:
                aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
                path.rename(aside)
                log.error("%s; what the space itself says of this agent holds, and this lies in %s", error, aside)
                continue
            if row is not None and row.id == path.stem:
                rows[row.id] = row
        return rows

    def compare(self) -> list[tuple[Issued | None, Issued]]:
        """Rows of the ledger that are older than what is remembered, with what is, by name."""
        rows = {row.id: row for row in self.ledger.rows()}
        for row in rows.values():
            known = self._remembered.get(row.id)
            if known is None:
                self.unremembered += [row] if row.void_until else []
            elif is_older(known, row):
                self.unremembered.append(row)
        older = [(rows.get(each.id), each) for each in self._remembered.values() if is_older(rows.get(each.id), each)]
        return sorted(older, key=lambda pair: (pair[1].name, pair[1].iat))

    def remember(self, row: Issued) -> None:
        self._outside.write(row)

    def follows(self, row: Issued) -> bool:
        """Does another key have its name by a rotation?"""
        return any(each.succeeds == row.id and each.state != "undone" for each in self._remembered.values())


def is_older(row: Issued | None, other: Issued) -> bool:
    """Is this state of a row older than the other? A cut is for good, so it is later than whatever lives."""
    if row is None:
        return True
    if (row.state in CUT) is not (other.state in CUT):
        return other.state in CUT
    return row.age < other.age


def words(before: Issued | None, row: Issued, is_followed: bool, has_creds: bool) -> str | None:
    """What it means for an agent that its row was brought up to date; None if nobody needs to hear it.

    Every agent may ask for the health of a space, so no channel is named.
    """
    again = f"`tidings agent rotate {row.name}` makes one if nobody has it"
    lacking = "" if has_creds else f" (its credential is not in the copy: {again})"
    if row.state in ("undone", "pending"):
        return None
    if row.state in CUT:
        if is_followed:
            return f"the key {row.name} had before its rotation stays void"
        return f"{row.name} stays revoked"
    if before is None and row.succeeds:
        return f"{row.name} has the key it was given since{lacking}"
    if before is None:
        return f"{row.name}, added since the copy, is an agent again{lacking}"
    if row.withheld and not before.withheld:
        return f"{row.name} may not post, as was decided since"
    return f"{row.name} has the access it was given since"


def _load(home: SpaceHome, space_id: str) -> Notes:
    try:
        found = msgspec.json.decode(home.recalled.read_bytes(), type=Notes)
    except (OSError, msgspec.MsgspecError):
        return Notes(space=space_id)
    return found if found.space == space_id else Notes(space=space_id)


def note_recalled(home: SpaceHome, space_id: str, said: list[str]) -> None:
    if said:
        notes = _load(home, space_id)
        notes.said = list(dict.fromkeys([*notes.said, *said]))[-KEPT:]
        notes.at = datetime.now(UTC).isoformat(timespec="seconds")
        write_private(home.recalled, msgspec.json.encode(notes).decode())


def problems(home: SpaceHome, space_id: str) -> list[str]:
    notes = _load(home, space_id)
    if not notes.said:
        return []
    more = len(notes.said) - MOST_SAID
    rest = f"; and {more} more, which `tidings logs admin` names" if more > 0 else ""
    return [
        "the folder of this space was put back from a copy, and what was decided about agents since holds "
        f"(noticed {notes.at}): {'; '.join(notes.said[:MOST_SAID])}{rest}; `tidings space acknowledge` once you have "
        "seen to it"
    ]


def acknowledge(home: SpaceHome, space_id: str) -> int:
    """The owner has seen it; answers whether there was something."""
    known = bool(_load(home, space_id).said)
    home.recalled.unlink(missing_ok=True)
    return int(known)
