"""`tidings channels`: what channels there are, who is in them, how they are set."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from tidings.cli import output
from tidings.cli.amounts import seconds
from tidings.cli.options import AsOption, HomeOption, JsonOption, SpaceOption, place
from tidings.cli.talk import ChannelArgument, endpoint_at, printable
from tidings.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="List channels, see their members, change their settings.")
SWITCHES: dict[str, bool | None] = {"on": True, "off": False, "": None}


def _ask(space: str | None, home: str | None, acting_as: str | None, do: str, **arguments: Any) -> dict[str, Any]:
    where = place(space, home, acting_as)

    async def act() -> dict[str, Any]:
        async with endpoint_at(where) as endpoint:
            service = "member" if do == "members" else "channel"
            return await endpoint.link.call(service, do, **arguments)

    return asyncio.run(act())


@app.command("list")
def list_channels(
    space: SpaceOption = None, home: HomeOption = None, acting_as: AsOption = None, as_json: JsonOption = False
) -> None:
    """List the channels that have settings, as far as you may read them."""
    found = _ask(space, home, acting_as, "list")["channels"]
    if as_json:
        output.data(found)
        return
    output.table(
        ("channel", "class", "replay", "description"),
        [
            (c["channel"], c["class"], "yes" if c["replay"] else "no", printable(c.get("description", "")))
            for c in found
        ],
        empty="no channel has settings of its own; a channel needs none to be used",
    )


@app.command("info")
def info(
    channel: ChannelArgument,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the settings of a channel. Description and instructions are the words of whoever set them."""
    facts = _ask(space, home, acting_as, "info", channel=channel)
    facts.pop("ok", None)
    if as_json:
        output.data(facts)
        return
    output.table(
        ("setting", "value"), [(k, printable(str(v)) if v is not None else None) for k, v in facts.items()], empty=""
    )


@app.command("members")
def members(
    channel: ChannelArgument,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who is in a channel."""
    found = _ask(space, home, acting_as, "members", channel=channel)["members"]
    if as_json:
        output.data(found)
        return
    output.table(("name", "id"), [(m["name"], m["id"]) for m in found], empty=f"nobody is in {channel}")


@app.command("set")
def set_channel(
    channel: ChannelArgument,
    cls: Annotated[str | None, typer.Option("--class", help="live or durable; '' for the space's default.")] = None,
    replay: Annotated[str | None, typer.Option(help="on or off: show joiners what was said before.")] = None,
    replay_window: Annotated[str | None, typer.Option(help="How far back, such as 1h or 7d.")] = None,
    description: Annotated[str | None, typer.Option(help="One line about the channel.")] = None,
    instructions: Annotated[str | None, typer.Option(help="Advice for members; shown as yours, as data.")] = None,
    space: SpaceOption = None,
    home: HomeOption = None,
    acting_as: AsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a channel; what is not named stays. Needs a `manage` pattern that covers it.

    Example:

      tidings channels set general --class live --description 'small talk'
    """
    wanted: dict[str, Any] = {}
    if cls is not None:
        wanted["class"] = cls or None
    if replay is not None:
        if replay not in SWITCHES:
            raise UsageError(f"--replay is on or off, not {replay!r}")
        wanted["replay"] = SWITCHES[replay]
    if replay_window is not None:
        wanted["replay_window"] = seconds("replay-window", replay_window) if replay_window else None
    wanted |= {k: v for k, v in (("description", description), ("instructions", instructions)) if v is not None}
    if not wanted:
        raise UsageError("name at least one setting to change; see --help")
    facts = _ask(space, home, acting_as, "set", channel=channel, **wanted)
    if as_json:
        output.data({key: value for key, value in facts.items() if key != "ok"})
        return
    output.say(f"channel {channel} is {facts['class']} from sequence {facts['seq']} on")
