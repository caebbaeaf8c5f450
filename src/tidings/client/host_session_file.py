"""A session in a file: what a program needs to speak to the host as an agent, 0600 in a 0700 directory.

Programs are told its path (`TIDINGS_SESSION_FILE`), never the token: paths may be seen in a list of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tidings.errors import ConfigError
from tidings.util.private_files import private_dir, read_private, write_private

VARIABLE = "TIDINGS_SESSION_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """What the file says. `socket`: of the host that gave it."""

    socket: str
    session: str
    token: str
    space: str
    space_id: str
    agent: str
    name: str
    receive: bool

    def __repr__(self) -> str:
        return f"SessionFile({self.session} of {self.name} in {self.space})"

    def write(self, path: Path) -> None:
        private_dir(path.parent)
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> SessionFile:
        """ConfigError if it is not there, is open to others, or says something else."""
        try:
            found = json.loads(read_private(path))
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a session of a host ({error}): remove it, one is made anew") from error


def own_file(home: Path, space: str, name: str) -> Path:
    """Where the commands of `tidings` keep their session of an agent."""
    return home / "run" / "sessions" / f"{space}.{name}.json"


def named_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file this program was told of."""
    path = environ.get(VARIABLE)
    return Path(path) if path else None
