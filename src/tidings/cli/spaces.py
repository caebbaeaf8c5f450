"""`tidings space` and `tidings keys`: the spaces of this home, their settings, and new keys for their roles."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tidings.cli import output, systemd
from tidings.cli.completion import among
from tidings.cli.connection import administer
from tidings.cli.context import (
    Context,
    Group,
    HomeContext,
    PlainHomeContext,
    PlainSpaceContext,
    SpaceArgument,
    SpaceContext,
    YesOption,
    byte_count,
    seconds,
)
from tidings.errors import UsageError

if TYPE_CHECKING:
    from tidings.admin.administration import Administrator

app = Group(help="List, set, remove spaces.")

_ON_OFF = {"on": "on", "off": "off"}
#: setting -> section of the space record, field in it, and the values it may have or what reads its text
SETTINGS: dict[str, tuple[str, str, dict[str, Any] | Callable[[str, str], int]]] = {
    "class": ("defaults", "class", {"live": "live", "durable": "durable", "": None}),
    "replay": ("defaults", "replay", {"on": True, "off": False, "": None}),
    "replay_window": ("defaults", "replay_window", seconds),
    "channels": ("", "channels", {"open": "open", "listed": "listed"}),
    "deliver": ("parts", "deliver", _ON_OFF),
    "archive": ("parts", "archive", _ON_OFF),
    "keep_age": ("", "keep_age", seconds),
    "keep_bytes": ("", "keep_bytes", byte_count),
    "keep_unread": ("", "keep_unread", seconds),
    "quota.records": ("", "quota_records", byte_count),
    "quota.bytes": ("", "quota_bytes", byte_count),
    "retention.receipts": ("", "keep_receipts", seconds),
}


@app.command("list")
def list_all(ctx: HomeContext) -> None:
    """List the spaces of this home and whether they run.

    Example:
      tidings space list
    """
    from tidings.admin.home import SpaceHome, list_spaces
    from tidings.util.private_files import lock_holder

    found = [SpaceHome(ctx.home.home, name) for name in list_spaces(ctx.home.home)]
    rows = [(each.name, bool(lock_holder(each.up_lock)), each.read_info().address) for each in found]
    ctx.end_if_json([{"space": name, "running": running, "url": url} for name, running, url in rows])
    output.table(("space", "running", "url"), rows, empty="there is no space yet: `tidings up` creates one")
    output.hint("tidings status" if rows else "tidings up")


@app.command("show")
def show(ctx: SpaceContext) -> None:
    """Show the settings of a space: the defaults of its channels, what is kept, which parts are on.

    Examples:
      tidings space show
      tidings space show --space lab --json
    """
    from tidings.contract.admin import TableRequest

    settings = administer(ctx, "showing the space", lambda admin: admin.call(TableRequest())).table.space
    ctx.end_if_json(settings)
    output.table(("setting", "value"), _flat(settings).items())
    output.hint("tidings space set class=live")


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Every setting by its name."""
    return {name: (record[at] if at else record).get(field) for name, (at, field, _) in SETTINGS.items()}


@app.command("set")
def set_settings(
    ctx: SpaceContext,
    assignments: Annotated[list[str], Argument(help="setting=value ...", metavar="SETTING=VALUE...")],
) -> None:
    """Change settings of a space; what is not named stays.

    Settings: class=live|durable, replay=on|off, replay_window=1h, channels=open|listed, deliver=on|off,
    archive=off (there is no archive yet), keep_age=7d, keep_bytes=1G, keep_unread=14d (mail that nobody reads is given
    up after that, and told), quota.records=1000 and quota.bytes=16M (what one sender may publish each second for long;
    0: no limit), retention.receipts=30d. An empty value goes back to the default.

    Examples:
      tidings space set class=live
      tidings space set keep_age=7d deliver=off
    """
    import msgspec

    from tidings.contract.admin import ChangeSpaceRequest
    from tidings.contract.agents import SpaceSettingsAnswer

    change = ChangeSpaceRequest.operation.decode(parse_settings(assignments))
    answer: SpaceSettingsAnswer = administer(ctx, "changing the space", lambda admin: admin.call(change))
    ctx.end_if_json(answer.space)
    kept = ", ".join(f"{name} {value}" for name, value in _flat(msgspec.to_builtins(answer.space)).items() if value)
    output.say(f"space {ctx.home.name} changed at sequence {answer.seq}: {kept}")
    output.hint("tidings space show")


def parse_settings(assignments: list[str]) -> dict[str, Any]:
    """`setting=value` words as the fields of a space record."""
    fields: dict[str, Any] = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not equals or name not in SETTINGS:
            raise UsageError(f"{each!r} is not a setting; use SETTING=VALUE with one of {', '.join(SETTINGS)}")
        section, field, read = SETTINGS[name]
        if callable(read):
            found = read(name, value) if value else None
        elif value in read:
            found = read[value]
        else:
            raise UsageError(f"{name} is one of {', '.join(map(repr, read))}, not {value!r}")
        (fields.setdefault(section, {}) if section else fields)[field] = found
    return fields


@app.command("acknowledge")
def acknowledge(ctx: PlainSpaceContext) -> None:
    """Say that you have seen to a log that went backwards, or to a copy that was put back; `status` stops warning.

    Example:
      tidings space acknowledge
    """
    from tidings.contract.admin import AcknowledgeRequest

    count = administer(ctx, "acknowledging", lambda admin: admin.call(AcknowledgeRequest())).acknowledged
    output.say(f"acknowledged {count} problem{'' if count == 1 else 's'} of space {ctx.home.name}")
    output.hint("tidings status")


@app.command("rotate-key")
def rotate_key(ctx: PlainSpaceContext) -> None:
    """Give the steward a new signing key. The old key signs the record that names it, so readers follow.

    Example:
      tidings space rotate-key
    """
    from tidings.admin.rotation import rotate_signing_key

    answer = administer(ctx, "rotating the steward's signing key", rotate_signing_key)
    output.say(f"from sequence {answer.seq} on the steward of {ctx.home.name} signs with {answer.steward_key}")
    output.hint("tidings status")


@app.command("install")
def install(ctx: PlainSpaceContext) -> None:
    """Write a systemd unit of this user that keeps a space up, and start it if systemd answers.

    The space runs as it was last started (`tidings up --listen ...` is remembered). Doing it again changes nothing that
    is right. Without systemd the file is written all the same.

    Example:
      tidings space install --space main
    """
    ctx.home.read_info()
    for sentence in systemd.install(systemd.space_unit(ctx.home.home, ctx.home.name), _running(ctx)):
        output.say(sentence)
    output.hint("tidings status")


def _running(ctx: Context) -> int | None:
    """The process that keeps it up, if one does."""
    from tidings.util.private_files import lock_holder

    return ctx.home.read_state().get("pid") if lock_holder(ctx.home.up_lock) else None


@app.command("uninstall")
def uninstall(ctx: PlainSpaceContext) -> None:
    """Stop the systemd unit of a space and remove it. The space itself stays on disk.

    Example:
      tidings space uninstall --space main
    """
    for sentence in systemd.uninstall(systemd.space_unit(ctx.home.home, ctx.home.name)):
        output.say(sentence)
    output.hint("tidings status")


@app.command("move")
def move(
    ctx: SpaceContext,
    server: Annotated[str | None, Option(help="Servers of a NATS that others run.", metavar="URL[,URL]")] = None,
    operator_key: Annotated[Path | None, Option(help="Seed of its operator signing key.", metavar="FILE")] = None,
    system_creds: Annotated[Path | None, Option(help="Its system user that may push tokens.", metavar="FILE")] = None,
    replicas: Annotated[int | None, Option(help="Of every stream: 1, 3 or 5.")] = None,
    back: Annotated[bool, Option("--back", help="From there to a broker of its own.")] = False,
) -> None:
    """Move a space that is down to a NATS that others run, or back, with every record, mailbox and credential.

    Streams are copied and compared record by record; what is left behind is kept. Agents elsewhere find the space by
    `tidings agent address NAME --url ...`, or by a bundle with both addresses. Let hosts send what waits in their
    outboxes first (`tidings outbox list --state pending`).

    Examples:
      tidings space move --server tls://n1:4222,tls://n2:4222 --operator-key op.nk --system-creds push.creds
      tidings space move --back
    """
    ctx.home.read_info()
    if replicas not in (None, 1, 3, 5):
        raise UsageError(f"{replicas} replicas are not possible: 1, 3 or 5")
    moved = asyncio.run(_move(ctx, server, operator_key, system_creds, replicas, back=back))
    ctx.end_if_json({"records": moved.records, "kept": str(moved.kept) if moved.kept else None})
    info = ctx.home.read_info()
    output.say(f"space {info.name} lives at {info.address} now, with {sum(moved.records.values()):,} records")
    if moved.kept:
        output.say(f"what it had here is kept in {moved.kept}: remove it once you are content")
    output.hint("tidings up")


async def _move(
    ctx: Context, server: str | None, key: Path | None, creds: Path | None, replicas: int | None, *, back: bool
) -> Any:
    from tidings.admin.external import check_servers
    from tidings.admin.moving import move_back, move_out

    if back:
        return await move_back(ctx.home, output.say)
    if server is None or key is None or creds is None:
        raise UsageError(
            "name the servers, an operator signing key and a system user of theirs (--server, --operator-key, "
            "--system-creds): without the key, credentials that agents have could not be voided there"
        )
    check_servers(server)
    return await move_out(ctx.home, server, (str(key), str(creds)), replicas, output.say)


@app.command("remove")
def remove(ctx: PlainHomeContext, name: SpaceArgument, yes: YesOption = False) -> None:
    """Delete a space with everything in it: messages, keys, agents. Refused while it runs.

    Example:
      tidings space remove lab --yes
    """
    ctx = ctx.at(space=name)
    ctx.home.read_info("`tidings space list` shows those there are")
    output.confirm(yes, f"Delete space {name} and everything in it?")
    ctx.home.remove()
    output.say(f"space {name} is gone")
    output.hint("tidings space list")


keys = Group(help="New keys for the steward, the pipeline and the certificate authority.")
ROLES = ("steward", "pipeline", "authority")


@keys.command("rotate")
def rotate_role(
    ctx: SpaceContext,
    role: Annotated[str, Argument(help="steward, pipeline, authority.", metavar="ROLE", autocompletion=among(*ROLES))],
    finish: Annotated[bool, Option("--finish", help="authority: the one that was announced takes its place.")] = False,
    now: Annotated[bool, Option("--now", help="authority: both steps at once, as if its key had leaked.")] = False,
) -> None:
    """Give a role of the space a new key; the old one is void.

    Agents have `tidings agent rotate` for that, and links with other spaces `tidings link renew`.
      `steward`: a new signing key, which readers follow, and a new credential; it is away for a moment.
      `pipeline`: a new credential; durable delivery restarts, but on a Spark cluster of yours you restart it.
      `authority`: in two steps. The first announces another one, which agents learn to trust when they connect. Some
        days later `--finish` puts it in place; agents that did not connect in between need a new invitation or bundle.

    Examples:
      tidings keys rotate pipeline
      tidings keys rotate authority                      then, after some days:
      tidings keys rotate authority --finish
    """
    if role not in ROLES:
        raise UsageError(
            f"{role!r} has no key that is rotated here: {', '.join(ROLES)}; agents: `tidings agent rotate`, links: "
            "`tidings link renew`"
        )
    if (finish or now) and role != "authority":
        raise UsageError(f"--finish and --now are for the authority: `tidings keys rotate {role}` is one step")
    ctx.home.read_info()
    if role == "authority":
        said, facts = _authority(ctx, finish, now)
    else:
        rotate = _pipeline if role == "pipeline" else _steward
        said, facts = administer(ctx, f"rotating the key of the {role}", rotate)
    output.data({"role": role, **facts}) if ctx.as_json else output.say(said)
    output.hint("tidings status")


async def _pipeline(admin: Administrator) -> tuple[str, dict[str, Any]]:
    from tidings.admin.rotation import rotate_pipeline

    made = await rotate_pipeline(admin)
    return f"the pipeline is {made} from now on, and its old credential is void", {"id": made}


async def _steward(admin: Administrator) -> tuple[str, dict[str, Any]]:
    from tidings.admin.rotation import rotate_steward

    answer = await rotate_steward(admin)
    said = f"from sequence {answer.seq} on the steward signs with {answer.steward_key}; its old credential is void"
    return said, {"seq": answer.seq, "steward_key": answer.steward_key}


def _authority(ctx: Context, finish: bool, now: bool) -> tuple[str, dict[str, Any]]:
    from tidings.admin.listening import announce_authority, change_authority

    if finish and now:
        raise UsageError("--now does both steps, so it needs no --finish")
    if not finish:
        info = announce_authority(ctx.home)
        said = (
            f"authority {_short(info.authority_next)} is announced: whoever connects from now on trusts both. In some "
            "days `tidings keys rotate authority --finish` makes it the one"
        )
        facts = {"step": "announced", "authority": _short(info.authority), "next": _short(info.authority_next)}
    if finish or now:
        info = change_authority(ctx.home)
        said = (
            f"authority {_short(info.authority)} is the one from now on, and the old one is trusted no more; agents "
            "that did not connect since it was announced need a new invitation or bundle"
        )
        facts = {"step": "finished", "authority": _short(info.authority)}
    return said, facts


def _short(authority: str) -> str:
    return hashlib.sha256(base64.b64decode(authority)).hexdigest()[:16]
