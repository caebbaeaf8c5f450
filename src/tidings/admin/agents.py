"""Agents on disk: the file people write, and the ledger of what was issued.

`agents/<name>.md` is the agent as people describe it (front matter: card and access; body: persona).
`agents/issued/<id>.json` is what was granted to a key, written before the grant is asked for, so that an add that
was interrupted is found and completed or undone. Account tokens are derived from the ledger, never edited: a
revocation is a row here before it is anything else. Each row is written a second time outside of what a backup copies:
`recall.py` says what for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidings.errors import ConfigError, UsageError
from tidings.util.private_files import private_dir, read_plain, write_private
from tidings.wire.names import check_agent_name, check_pattern, check_role, is_agent_id, unmarked

#: pending: being added. changing: was active, is being given other rights. undone: an add that never was
State = Literal["pending", "active", "changing", "revoking", "revoked", "undone"]
LIVE: tuple[State, ...] = ("pending", "active", "changing")
#: for good: no key comes back from there
CUT: tuple[State, ...] = ("revoking", "revoked", "undone")


@dataclass(frozen=True, slots=True)
class AgentFile:
    """An agent as people describe it."""

    name: str
    roles: tuple[str, ...] = ()
    description: str = ""
    read: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    persona: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def checked(self) -> AgentFile:
        check_agent_name(self.name)
        for role in self.roles:
            check_role(role)
        for pattern in (*self.read, *self.post, *self.manage):
            check_pattern(pattern)
        return self

    def render(self) -> str:
        card: dict[str, Any] = {"name": self.name}
        for key in ("roles", "read", "post", "manage"):
            if values := getattr(self, key):
                card[key] = list(values)
        if self.description:
            card["description"] = self.description
        body = f"\n{self.persona.strip()}\n" if self.persona.strip() else ""
        import yaml  # only who writes or reads such a file pays for it

        return f"---\n{yaml.safe_dump(card | self.extra, sort_keys=False)}---\n{body}"


def parse_agent_file(text: str, where: str) -> AgentFile:
    """Read an agent file; every refusal names the file and the field."""
    import yaml

    if not text.startswith("---\n"):
        raise UsageError(f"{where} is not an agent file: it must begin with a line `---` and YAML")
    front, fence, body = text[4:].partition("\n---")
    if not fence:
        raise UsageError(f"{where} has no closing `---` after its front matter")
    try:
        card = yaml.safe_load(front)
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: the front matter is not YAML: {error}") from error
    if not isinstance(card, dict) or not isinstance(card.get("name"), str):
        raise UsageError(f"{where}: the front matter needs at least `name: ...`")
    lists = {key: _strings(card.pop(key, None), key, where) for key in ("roles", "read", "post", "manage")}
    if isinstance(role := card.pop("role", None), str):
        lists["roles"] = (*lists["roles"], role)
    agent = AgentFile(
        name=card.pop("name"),
        description=str(card.pop("description", "") or ""),
        persona=body.partition("\n")[2].strip(),
        extra=card,
        **lists,
    )
    return agent.checked()


def _strings(value: object, key: str, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where}: `{key}` must be a list of names, such as `{key}: [general]`")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Issued:
    """What was granted to one key."""

    id: str
    name: str
    state: State
    op: str
    read: tuple[str, ...] = ()
    post: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    #: the user token in force and its issue second
    token: str = ""
    iat: int = 0
    #: tokens issued at or before this second are void (revocation, narrowing, rotation)
    void_until: int = 0
    seq: int = 0
    succeeds: str = ""
    #: why and since when it may send nothing; posting that is granted again ends it
    withheld: str = ""
    #: the invitation that its key accepted; that key is elsewhere, and was never here
    invited: str = ""
    #: seconds for which a token of it holds; another is made when half of them are over. 0: for ever
    lifetime: int = 0
    #: how often this row was written
    version: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """Orders two states of one row. Seconds first: a copy of the row that was put back has counted less."""
        return max(self.iat, self.void_until), self.version

    def is_due(self, now: float) -> bool:
        """Is it time for another token?"""
        return (
            self.state == "active" and not self.barred and bool(self.lifetime) and now >= self.iat + self.lifetime / 2
        )

    @property
    def elsewhere(self) -> str:
        """That its key is not here, and what can be done about it."""
        return (
            f"agent {self.name} was invited, and its key is where it accepted: act as it there, or give it a key here "
            f"with `tidings agent rotate {self.name}`, which cuts the other"
        )

    @property
    def barred(self) -> bool:
        """Its token is void and nobody gave it another."""
        return bool(self.withheld) and self.void_until >= self.iat


class Ledger:
    """The rows of `agents/issued`. `outside`: where whoever changes them writes them a second time."""

    def __init__(self, folder: Path, outside: Path | None = None) -> None:
        self.folder = folder
        self.outside = outside

    def rows(self) -> list[Issued]:
        return [self._load(path) for path in sorted(self.folder.glob("U*.json")) if is_agent_id(path.stem)]

    def get(self, agent_id: str) -> Issued | None:
        path = self.folder / f"{agent_id}.json"
        return self._load(path) if path.exists() else None

    def active(self, name: str) -> Issued | None:
        """The key that holds a name now."""
        held = [row for row in self.rows() if row.name == name and row.state in LIVE]
        # during a rotation two keys do; the successor is the one
        followed = {row.succeeds for row in held}
        return next((row for row in held if row.id not in followed), None)

    def living(self, name: str) -> list[Issued]:
        """Every key under a name that is not cut for good."""
        return [row for row in self.rows() if row.name == name and row.state in (*LIVE, "revoking")]

    def newest(self, name: str) -> Issued | None:
        """The key that holds a name, or held it last."""
        held = [row for row in self.rows() if row.name == name]
        return self.active(name) or (max(held, key=lambda row: row.iat) if held else None)

    def put(self, row: Issued, **changes: Any) -> Issued:
        """Write a row. Inside first: if the second write is interrupted, it does not look like a copy put back."""
        before = self.get(row.id)
        version = max(row.version, before.version if before else 0) + 1
        row = replace(row, **changes, version=version)
        self.write(row)
        if self.outside is not None:
            private_dir(self.outside)
            Ledger(self.outside).write(row)
        return row

    def write(self, row: Issued) -> None:
        """As it is, and here alone."""
        write_private(self.folder / f"{row.id}.json", json.dumps(asdict(row), indent=1) + "\n")

    def renewed(self, agent_id: str, since: int) -> Issued | None:
        """The row of an agent whose token was made anew after that second, as those that end are."""
        row = self.get(agent_id)
        return row if row is not None and row.state == "active" and row.lifetime and row.iat > since else None

    def due(self, now: float) -> list[Issued]:
        """Those whose token ends before long."""
        return [row for row in self.rows() if row.is_due(now)]

    def unfinished(self) -> list[Issued]:
        return [row for row in self.rows() if row.state in ("pending", "changing", "revoking")]

    def revocations(self) -> dict[str, int]:
        """For the AGENTS account token: key -> second up to which its tokens are void."""
        return {row.id: row.void_until for row in self.rows() if row.void_until}

    @staticmethod
    def _load(path: Path) -> Issued:
        try:
            return msgspec.json.decode(read_plain(path), type=Issued)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} is damaged: {error}; restore it from a backup") from error


def as_patterns(values: Iterable[str]) -> tuple[str, ...]:
    """Patterns as given on a command line: repeated flags, commas allowed, order kept, no repeats."""
    flat = [unmarked(part.strip()) for value in values for part in value.split(",") if part.strip()]
    return tuple(dict.fromkeys(check_pattern(pattern) for pattern in flat))
