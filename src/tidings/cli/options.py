"""Options and arguments that many commands share, each spelled once, and what they resolve to."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.admin.home import SpaceHome
from tidings.admin.settings import Settings
from tidings.cli import completion, output
from tidings.errors import UsageError
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.admin.identity import Identity

PRIORITIES = ("now", "next", "low")
#: above every row of the host's file and every sequence of a broker, and what both can still be asked about
MOST_COUNTED = 2**62

SpaceOption = Annotated[
    str | None,
    typer.Option("--space", "-s", help="Space to talk to.", metavar="NAME", autocompletion=completion.spaces),
]
HomeOption = Annotated[str | None, typer.Option("--home", help="Directory of spaces.", metavar="DIR")]
AsOption = Annotated[
    str | None, typer.Option("--as", help="Agent to act as.", metavar="NAME", autocompletion=completion.agents)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def countable(given: Any) -> Any:
    """Rows, sequences and counts, one or several, that the host's file and the broker can count with."""
    for number in given if isinstance(given, list | tuple) else [given]:
        if number is not None and not 1 <= number < MOST_COUNTED:
            raise UsageError(
                f"{str(number)[:32]} is out of range: rows, sequences and counts are at least 1 and below 2^62"
            )
    return given


def duration(given: float | None) -> float | None:
    """Seconds: `nan` is no number, and `inf` never ends."""
    if given is not None and not (math.isfinite(given) and given >= 0):
        raise UsageError(f"{given:g} is no number of seconds: give one that ends, 0 or more")
    return given


CountOption = Annotated[int, typer.Option("-n", "--count", help="At most this many.", callback=countable)]

ChannelArgument = Annotated[
    str, typer.Argument(help="Channel.", metavar="CHANNEL", autocompletion=completion.channels, callback=unmarked)
]
AgentArgument = Annotated[
    str, typer.Argument(help="Agent, by name or id.", metavar="AGENT", autocompletion=completion.agents)
]
NameArgument = Annotated[
    str, typer.Argument(help="Name of the agent.", metavar="NAME", autocompletion=completion.agents)
]
SpaceArgument = Annotated[str, typer.Argument(help="Space.", metavar="NAME", autocompletion=completion.spaces)]
RoleArgument = Annotated[
    str, typer.Argument(help="Role that should do it.", metavar="ROLE", autocompletion=completion.roles)
]
TextArgument = Annotated[str, typer.Argument(help="What to say; `-` reads standard input.", metavar="TEXT")]
PriorityOption = Annotated[str, typer.Option(help="now, next or low.", autocompletion=completion.among(*PRIORITIES))]


@dataclass(frozen=True, slots=True)
class Place:
    """Settings, and the space they lead to."""

    settings: Settings
    home: SpaceHome

    @property
    def agent(self) -> str:
        """Whom the command acts as. If the working directory chose that it is said: whoever prepared it did."""
        if self.settings.chosen_by_folder:
            _note(self.settings.chosen_by_folder)
        return self.settings["as"]

    def check(self) -> None:
        """Is there anything to talk to: a space of this home, or an agent of one elsewhere?"""
        if self._imported() is None:
            self.home.read_info(
                f"create it with `tidings up --space {self.home.name}`, or be an agent of one elsewhere: "
                "`tidings agent import FILE`"
            )

    @property
    def space_id(self) -> str:
        imported = self._imported()
        return imported.space_id if imported else self.home.read_info().id

    @property
    def agent_id(self) -> str | None:
        """Whose key is on disk: a name that was added again is another agent."""
        if (imported := self._imported()) is not None:
            return imported.id
        from tidings.nats import jwt
        from tidings.util.private_files import read_private

        path = self.home.agent_creds(self.agent)
        return jwt.split_credentials(read_private(path))[1].id if path.exists() else None

    def _imported(self) -> Identity | None:
        if not self.home.imported(self.agent).exists():
            return None
        from tidings.admin.identity import imported_identity

        return imported_identity(self.home, self.agent)


@functools.cache
def _note(text: str) -> None:
    """Said once, however often a command asks where it is."""
    output.say(f"note: {text}")


def place(space: str | None = None, home: str | None = None, acting_as: str | None = None, **more: str | None) -> Place:
    settings = Settings({"space": space, "home": home, "as": acting_as, **more})
    output.remember_flags(**{"as": acting_as, "space": space, "home": home})
    for note in settings.notes:
        _note(note)
    return Place(settings, SpaceHome(settings.home, settings["space"]))
