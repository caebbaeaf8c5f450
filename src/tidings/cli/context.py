"""What every command needs, in one place: the options commands share, what they lead to, and how an answer is printed.

The first parameter of a command is its context. The annotation says which of the shared options the command takes:

    @app.command("members")
    def members(ctx: DirectContext, channel: ChannelArgument) -> None:
        found = act(ctx, lambda agent: agent.members(channel))
        ctx.end_if_json(found)
        output.table(("name", "id"), [(m["name"], m["id"]) for m in found], empty=f"nobody is in {channel}")
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer import Argument, Option

from tidings.admin.home import SpaceHome
from tidings.admin.settings import Settings
from tidings.cli import completion, output
from tidings.errors import UsageError
from tidings.wire.names import unmarked

if TYPE_CHECKING:
    from tidings.admin.identity import Identity
    from tidings.wire.signing import KeyPair

F = TypeVar("F", bound=Callable[..., None])
PRIORITIES = ("now", "next", "low")
#: above every row of the host's file and every sequence of a broker, and what both can still be asked about
MOST_COUNTED = 2**62
#: of an option that may be repeated
Names = list[str] | None

SpaceOption = Annotated[
    str | None, Option("--space", "-s", help="Space (main).", metavar="NAME", autocompletion=completion.spaces)
]
HomeOption = Annotated[str | None, Option("--home", help="Directory of spaces.", metavar="DIR")]
AsOption = Annotated[
    str | None, Option("--as", help="Agent to act as.", metavar="NAME", autocompletion=completion.agents)
]
DirectOption = Annotated[bool, Option("--direct", help="Go to the space without the host.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]


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


#: a hundred years, and what every language reads exactly
LONGEST, MOST_BYTES = 36_525 * 86_400, 2**53 - 1
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def seconds(name: str, text: str) -> int:
    return _amount(name, text, _SECONDS, "a time such as 3600, 90m, 12h or 7d", LONGEST)


def moment(name: str, text: str) -> datetime:
    """A point in time: so long ago, or a date with or without a time, in the zone of this machine unless told."""
    if re.fullmatch(r"\d+[a-z]*", text):
        return datetime.now(UTC) - timedelta(seconds=seconds(name, text))
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{name}={text!r} is neither a time ago such as 90m or 7d nor one such as 2026-11-16T09:00"
        ) from None


def byte_count(name: str, text: str) -> int:
    return _amount(name, text, _BYTES, "a size such as 1000000, 500M, 2G or 4GiB", MOST_BYTES)


def _amount(name: str, text: str, units: dict[str, int], like: str, most: int) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", text)
    if not match or match[2] not in units:
        raise UsageError(f"{name}={text!r} is not {like}")
    amount = int(match[1]) * units[match[2]]
    if amount > most:
        raise UsageError(f"{name}={text!r} is too large: at most {most:,}")
    return amount


CountOption = Annotated[int, Option("-n", "--count", help="At most this many.", callback=countable)]

ChannelArgument = Annotated[
    str, Argument(help="Channel.", metavar="CHANNEL", autocompletion=completion.channels, callback=unmarked)
]
AgentArgument = Annotated[
    str, Argument(help="Agent, by name or id.", metavar="AGENT", autocompletion=completion.agents)
]
NameArgument = Annotated[str, Argument(help="Name of the agent.", metavar="NAME", autocompletion=completion.agents)]
SpaceArgument = Annotated[str, Argument(help="Space.", metavar="NAME", autocompletion=completion.spaces)]
RoleArgument = Annotated[str, Argument(help="Role that should do it.", metavar="ROLE", autocompletion=completion.roles)]
TextArgument = Annotated[str, Argument(help="What to say; `-` reads standard input.", metavar="TEXT")]
PriorityOption = Annotated[str, Option(help="now, next or low.", autocompletion=completion.among(*PRIORITIES))]


@dataclass(frozen=True)
class Context:
    """The shared options as they were given, and the space and agent they lead to."""

    direct: bool = False
    space: str | None = None
    home_dir: str | None = None
    acting_as: str | None = None
    as_json: bool = False
    #: settings that other options of the command decide
    flags: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        output.remember_flags(**{"as": self.acting_as, "space": self.space, "home": self.home_dir})

    def at(self, **changes: Any) -> Context:
        """The same for another space or agent."""
        return replace(self, **changes)

    @cached_property
    def settings(self) -> Settings:
        settings = Settings({"space": self.space, "home": self.home_dir, "as": self.acting_as, **self.flags})
        for note in settings.notes:
            _note(note)
        return settings

    @cached_property
    def home(self) -> SpaceHome:
        return SpaceHome(self.settings.home, self.settings["space"])

    @property
    def agent(self) -> str:
        """The agent that the command acts as. A note says so if the working directory chose it."""
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
    def agent_key(self) -> KeyPair | None:
        """The key on disk: a name that was added again is another agent."""
        if (imported := self._imported()) is not None:
            return imported.key
        from tidings.nats import jwt
        from tidings.util.private_files import read_private

        path = self.home.agent_creds(self.agent)
        return jwt.split_credentials(read_private(path))[1] if path.exists() else None

    def require_key(self) -> KeyPair:
        if (key := self.agent_key) is None:
            name = f"agent {self.agent} in {self.home.name}"
            raise UsageError(f"there is no credential for {name}: `tidings agent add` it")
        return key

    def _imported(self) -> Identity | None:
        if not self.home.imported(self.agent).exists():
            return None
        from tidings.admin.identity import imported_identity

        return imported_identity(self.home, self.agent)

    def show_rows(self, answer: Any, columns: Sequence[str], rows: Iterable[output.Row], *, empty: str = "") -> None:
        """Prints a table, or with --json the answer."""
        output.data(answer) if self.as_json else output.table(columns, rows, empty=empty)

    def stream(self, answer: Any, text: str) -> None:
        """Prints one line of several, at once: the text, or with --json the answer."""
        output.line(json.dumps(answer) if self.as_json else text)
        sys.stdout.flush()

    def end_if_json(self, answer: Any) -> None:
        """With --json prints the answer and ends the command. What follows is for people."""
        if self.as_json:
            output.data(answer)
            raise typer.Exit


@functools.cache
def _note(text: str) -> None:
    """Said once, however often a command asks where it is."""
    output.say(f"note: {text}")


_OPTIONS: dict[str, Any] = {
    "direct": DirectOption,
    "space": SpaceOption,
    "home_dir": HomeOption,
    "acting_as": AsOption,
    "as_json": JsonOption,
}
OutputContext = Annotated[Context, ("as_json",)]
HomeContext = Annotated[Context, ("home_dir", "as_json")]
SpaceContext = Annotated[Context, ("space", "home_dir", "as_json")]
AgentContext = Annotated[Context, ("space", "home_dir", "acting_as", "as_json")]
DirectContext = Annotated[Context, ("direct", "space", "home_dir", "acting_as", "as_json")]
#: of commands that answer with sentences only
PlainHomeContext = Annotated[Context, ("home_dir",)]
PlainSpaceContext = Annotated[Context, ("space", "home_dir")]


class Group(typer.Typer):
    """Commands that take a context. Typer sees the shared options in its place."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"no_args_is_help": True, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        return lambda function: self._add(super(Group, self).command(name, **options), function)

    def callback(self, **options: Any) -> Callable[[F], F]:
        return lambda function: self._add(super(Group, self).callback(**options), function)

    def _add(self, register: Callable[[Callable[..., None]], object], function: F) -> F:
        register(_spread(function))
        return function


def _spread(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the options of its context in place of the context."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    names: tuple[str, ...] = ()
    if parameters and getattr(parameters[0].annotation, "__origin__", None) is Context:
        names = parameters.pop(0).annotation.__metadata__[0]

    def run(**given: Any) -> None:
        contexts = [Context(**{name: given.pop(name) for name in names})] if names else []
        function(*contexts, **given)

    shared = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Context, name), annotation=annotation)
        for name, annotation in _OPTIONS.items()
        if name in names
    )
    run.__signature__ = inspect.Signature([*parameters, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__name__ = function.__name__
    # help shows each indented line, such as an example, as a paragraph; lines indented further continue it
    text = re.sub(r"\n {3,}(?=\S)", " ", inspect.cleandoc(function.__doc__ or ""))
    run.__doc__ = re.sub(r"\n(?=  \S)", "\n\n", text) or None
    return run
