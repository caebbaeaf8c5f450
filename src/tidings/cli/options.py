"""Options that many commands share, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from tidings.space.home import SpaceHome
from tidings.space.settings import Settings

SpaceOption = Annotated[str | None, typer.Option("--space", "-s", help="Space to talk to.", metavar="NAME")]
HomeOption = Annotated[str | None, typer.Option("--home", help="Directory of spaces.", metavar="DIR")]
AsOption = Annotated[str | None, typer.Option("--as", help="Agent to act as.", metavar="NAME")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass(frozen=True, slots=True)
class Place:
    """Settings, and the space they lead to."""

    settings: Settings
    home: SpaceHome

    @property
    def agent(self) -> str:
        return self.settings["as"]


def place(space: str | None = None, home: str | None = None, acting_as: str | None = None, **more: str | None) -> Place:
    settings = Settings({"space": space, "home": home, "as": acting_as, **more})
    return Place(settings, SpaceHome(settings.home, settings["space"]))
