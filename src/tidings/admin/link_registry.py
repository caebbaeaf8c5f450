"""Links on disk: what was agreed with which space, and the user that its worker is at our broker.

`links/<link>.json` is written before the steward is asked for the record, so that what was interrupted is found and
finished, and so that a log that was set back can be given its link records again. The token of the account LINK is
derived from here. Each row is written a second time outside of what a backup copies, and a user that was cut stays so
when an older copy is put back. No seed is kept: the worker of the other space has the key of its user.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidings.admin.home import SpaceHome
from tidings.errors import ConfigError
from tidings.util.private_files import private_dir, read_plain, write_private
from tidings.wire.names import is_token

#: setting: the record is asked for. ending: its user is cut, and the record that says so is asked for
LinkState = Literal["setting", "on", "ending", "off"]


@dataclass(frozen=True, slots=True)
class AgreedLink:
    """One link, as its owner last decided about it."""

    link: str
    origin: str
    state: LinkState
    #: the operation that wrote its record, or is to write it
    op: str
    #: the other fields of the record
    terms: dict[str, Any] = field(default_factory=dict)
    #: the user of the other space's worker, its token and the second that was made; empty: it reads nothing here
    peer: str = ""
    token: str = ""
    iat: int = 0
    #: seconds for which a token holds, where nobody can be cut; 0: until the link ends
    lifetime: int = 0
    #: users it had -> second up to which their tokens are void
    void: dict[str, int] = field(default_factory=dict)
    seq: int = 0
    #: why it ended, if nobody asked for that
    why: str = ""
    version: int = 0
    #: the invitation by whose line it was accepted here; empty: it was offered here
    line: str = ""

    def is_due(self, now: float) -> bool:
        """Is it time for another token?"""
        return self.state == "on" and bool(self.lifetime) and now >= self.iat + self.lifetime / 2

    def takes(self, now: float) -> bool:
        """Does anything come in over it, so that a worker is needed?"""
        until = self.terms.get("until")
        named = self.terms.get("channels") or self.terms.get("beyond") or self.terms.get("roster") == "on"
        return self.state in ("setting", "on") and bool(named) and (until is None or now < until)


class LinkLedger:
    """Those of one space. `outside`: where they are written a second time."""

    def __init__(self, folder: Path, outside: Path) -> None:
        self.folder, self.outside = folder, outside

    @classmethod
    def below(cls, home: SpaceHome, space_id: str) -> LinkLedger:
        return cls(home.linked, home.remembered / space_id / "links")

    def get(self, link: str) -> AgreedLink | None:
        """The later of what is here and what is remembered; who is void in either is."""
        found = [row for row in (self._read(at / f"{link}.json") for at in (self.folder, self.outside)) if row]
        if not found:
            return None
        later, void = max(found, key=lambda row: row.version), dict[str, int]()
        for row in found:
            for user, until in row.void.items():
                void[user] = max(until, void.get(user, 0))
        return replace(later, void=void)

    def rows(self) -> list[AgreedLink]:
        names = {path.stem for at in (self.folder, self.outside) for path in at.glob("*.json") if is_token(path.stem)}
        return [row for row in map(self.get, sorted(names)) if row is not None]

    def of_peer(self, user: str) -> AgreedLink | None:
        """The link whose worker is this user now."""
        return next((row for row in self.rows() if row.peer == user), None)

    def put(self, row: AgreedLink, **changes: Any) -> AgreedLink:
        before = self.get(row.link)
        version = max(row.version, before.version if before else 0) + 1
        row = replace(row, **changes, version=version)
        text = json.dumps(asdict(row), indent=1) + "\n"
        for folder in (self.outside, self.folder):  # outside first: an older copy put back never hides it
            private_dir(folder.parent)
            private_dir(folder)
            write_private(folder / f"{row.link}.json", text)
        return row

    def forget(self, link: str) -> None:
        """A link that never was: its record was refused."""
        for folder in (self.folder, self.outside):
            (folder / f"{link}.json").unlink(missing_ok=True)

    def unfinished(self) -> list[AgreedLink]:
        return [row for row in self.rows() if row.state in ("setting", "ending")]

    def revocations(self) -> dict[str, int]:
        """For the token of their account: user -> second up to which its tokens are void."""
        return {user: until for row in self.rows() for user, until in row.void.items()}

    @staticmethod
    def _read(path: Path) -> AgreedLink | None:
        try:
            return msgspec.json.decode(read_plain(path), type=AgreedLink)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore it from a backup") from error
