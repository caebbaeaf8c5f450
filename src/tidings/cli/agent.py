"""`tidings agent`: who may be in a space, and what they may read and post."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tidings.admin.agents import LIVE, AgentFile, Issued, Ledger, as_patterns, parse_agent_file
from tidings.cli import output
from tidings.cli.connection import administer
from tidings.cli.context import (
    Context,
    Group,
    HomeContext,
    NameArgument,
    PlainSpaceContext,
    SpaceContext,
    YesOption,
    seconds,
)
from tidings.errors import ConflictError, StoreError, UnreachableError, UsageError
from tidings.util.private_files import read_plain
from tidings.wire.names import check_agent_name
from tidings.wire.records import moment

if TYPE_CHECKING:
    from tidings.admin.administration import Administrator

app = Group(help="Add, list, change and revoke the agents of a space.")

ReadOption = Annotated[list[str] | None, Option("--read", "-r", help="Channel or pattern it may read.")]
PostOption = Annotated[list[str] | None, Option("--post", "-p", help="Channel or pattern it may post to.")]
ManageOption = Annotated[list[str] | None, Option("--manage", help="Channels whose settings it may change.")]
RoleOption = Annotated[list[str] | None, Option("--role", help="Role whose tasks it may take.")]
FileOption = Annotated[Path | None, Option("--file", "-f", help="Agent file (Markdown with front matter).")]

ExpiresOption = Annotated[
    str | None, Option(help="How long its credential is valid, such as 7d; or never.", metavar="TIME")
]

DEFAULT_CHANNEL = ("general",)
SHORTEST = 3_600


@app.command("add")
def add(
    ctx: SpaceContext,
    name: Annotated[str | None, Argument(help="Name of the agent.", metavar="NAME")] = None,
    read: ReadOption = None,
    post: PostOption = None,
    manage: ManageOption = None,
    role: RoleOption = None,
    description: Annotated[str, Option(help="One line about it.")] = "",
    expires: ExpiresOption = None,
    file: FileOption = None,
) -> None:
    """Provision an agent: a key, an access record and a credential, issued together.

    Examples:
      tidings agent add ada                              may read and post to general
      tidings agent add bob --read 'team.>' --post team.backend --role reviewer
      tidings agent add --file agents/ada.md             card and access from its front matter
      tidings agent add far --expires 7d                 renewed by itself, unless it was away for so long
    """
    rights = named_rights(read, post, manage, role)
    agent = _described(ctx, name, file, rights | ({"description": description} if description else {}))
    lifetime = lifetime_of(expires) or 0
    granted = administer(ctx, f"adding {agent.name}", lambda admin: admin.add(agent, lifetime=lifetime))
    creds = ctx.home.agent_creds(agent.name)
    ctx.end_if_json({**_public(granted.row), "creds": str(creds)})
    output.say(f"agent {agent.name} may read {listed(agent.read)} and post to {listed(agent.post)}")
    output.line(granted.row.id)
    output.say(f"its credential is {creds}")
    output.hint(f"tidings agent show {agent.name}")


def lifetime_of(expires: str | None) -> int | None:
    if expires is None or expires == "never":
        return None if expires is None else 0
    wanted = seconds("--expires", expires)
    if wanted < SHORTEST:
        raise UsageError("a credential holds for an hour at least (`--expires 1h`), or for ever (`--expires never`)")
    return wanted


def named_rights(
    read: list[str] | None, post: list[str] | None, manage: list[str] | None, role: list[str] | None
) -> dict[str, Any]:
    """The rights that were named, as fields of an agent file. What was not named is not in it."""
    patterns = {"read": read, "post": post, "manage": manage}
    rights = {name: as_patterns(each) for name, each in patterns.items() if each is not None}
    return rights if role is None else {**rights, "roles": tuple(dict.fromkeys(role))}


def _described(ctx: Context, name: str | None, file: Path | None, changes: dict[str, Any]) -> AgentFile:
    if file is not None:
        try:
            agent = parse_agent_file(read_plain(file), str(file))
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from error
        if name and name != agent.name:
            raise UsageError(f"{file} describes {agent.name}, not {name}")
    elif name:
        everything = (">",) if ctx.home.read_info().open else DEFAULT_CHANNEL
        agent = AgentFile(name, read=everything, post=everything)
    else:
        raise UsageError("name the agent, or give its file: `tidings agent add NAME` or `--file FILE`")
    return replace(agent, **changes).checked()


def _public(row: Issued) -> dict[str, Any]:
    return {
        "name": row.name,
        "id": row.id,
        "state": row.state,
        "roles": list(row.roles),
        "read": list(row.read),
        "post": list(row.post),
        "manage": list(row.manage),
        "withheld": row.withheld,
        "seq": row.seq,
        "expires": moment(row.iat + row.lifetime) if row.lifetime else None,
    }


def listed(patterns: tuple[str, ...]) -> str:
    return ", ".join(patterns) or "nothing"


@app.command("list")
def list_agents(ctx: SpaceContext, every: Annotated[bool, Option("--all", help="Revoked ones too.")] = False) -> None:
    """List the agents of a space.

    Examples:
      tidings agent list
      tidings agent list --all --json
    """
    ctx.home.read_info()
    shown = [row for row in Ledger(ctx.home.issued).rows() if every or row.state in LIVE]
    rows = sorted(shown, key=lambda row: (row.name, row.iat))
    ctx.end_if_json([_public(row) for row in rows])
    output.table(
        ("name", "id", "state", "roles", "read", "post"),
        [(row.name, row.id[:12] + "…", row.state, row.roles, row.read, row.post) for row in rows],
        empty=f"space {ctx.home.name} has no agents yet: `tidings agent add NAME`",
    )
    for row in rows:
        _say_withheld(row)
    output.hint(f"tidings agent show {rows[0].name}" if rows else "tidings agent add NAME")


@app.command("show")
def show(ctx: SpaceContext, name: NameArgument) -> None:
    """Show one agent: access, channels it is in, persona.

    Example:
      tidings agent show ada
    """
    row = _row(ctx, name)
    path = ctx.home.agents / f"{name}.md"
    facts = {**_public(row), "channels": _channels(ctx, row), "file": str(path)}
    ctx.end_if_json(facts)
    output.table(("what", "value"), list(facts.items()))
    _say_withheld(row)
    if path.exists() and (persona := parse_agent_file(read_plain(path), str(path)).persona):
        output.line(f"\n{persona}")
    output.hint(f"tidings agent access {name}")


def _say_withheld(row: Issued) -> None:
    if row.withheld:
        output.say(f"{row.name} may not post {row.withheld}; `tidings agent access {row.name} --post ...` restores it")


def _row(ctx: Context, name: str) -> Issued:
    ctx.home.read_info()
    row = Ledger(ctx.home.issued).newest(name)
    if row is None:
        raise UsageError(f"there is no agent {name} in space {ctx.home.name}: `tidings agent list`")
    return row


def _channels(ctx: Context, row: Issued) -> list[str] | None:
    """What the agent is in, or None when the space is not running."""

    from tidings.contract.admin import TableRequest

    async def find(admin: Administrator) -> list[str]:
        offset: int | None = 0
        while offset is not None:
            page = await admin.call(TableRequest(offset=offset))
            if row.id in page.table.members:
                return sorted(page.table.members[row.id])
            offset = page.next
        return []

    try:
        return administer(ctx, f"showing {row.name}", find)
    except UnreachableError:
        return None


@app.command("access")
def access(
    ctx: SpaceContext,
    name: NameArgument,
    read: ReadOption = None,
    post: PostOption = None,
    manage: ManageOption = None,
    role: RoleOption = None,
    expires: ExpiresOption = None,
    file: FileOption = None,
) -> None:
    """Show or change what an agent may read and post. A list that is given replaces the old one.

    Examples:
      tidings agent access ada                                show
      tidings agent access ada --read general --read 'team.>'
      tidings agent access ada --post ''                      may post nowhere
    """
    row = _row(ctx, name)
    rights = named_rights(read, post, manage, role)
    if not rights and file is None and expires is None:
        ctx.end_if_json(_public(row))
        held = [("read", row.read), ("post", row.post), ("manage", row.manage), ("roles", row.roles)]
        output.table(("right", "patterns"), held)
        _say_withheld(row)
        output.hint(f"tidings agent access {row.name} --read general")
        return
    current = AgentFile(name, row.roles, "", row.read, row.post, row.manage)
    path = ctx.home.agents / f"{name}.md"
    if path.exists():
        kept = parse_agent_file(read_plain(path), str(path))
        current = replace(current, description=kept.description, persona=kept.persona, extra=kept.extra)
    wanted = _described(ctx, name, file, rights) if file else replace(current, **rights).checked()
    # saying what it may post, even that it is nothing, ends what was withheld for a flood
    restore = post is not None or file is not None
    granted = administer(
        ctx,
        f"changing {name}",
        lambda admin: admin.set_access(name, wanted, restore=restore, lifetime=lifetime_of(expires)),
    )
    ctx.end_if_json({**_public(granted.row), "closed": granted.closed, "note": granted.note, "untold": granted.untold})
    output.say(f"agent {name} may read {listed(wanted.read)} and post to {listed(wanted.post)} ({granted.note})")
    if granted.untold:
        output.say(f"its older credential is void, but {granted.untold}")
    if granted.closed:
        output.say(
            f"it is no longer in {', '.join(granted.closed)}: what it was owed there does not come any more, and "
            "giving access again does not open it, it has to join again (and is told so); what it had already fetched "
            "is out of reach"
        )
    output.hint(f"tidings agent show {name}")


@app.command("revoke")
def revoke(ctx: SpaceContext, name: NameArgument, yes: YesOption = False) -> None:
    """Cut an agent for good: its connection, its memberships, its mailboxes.

    Example:
      tidings agent revoke ada --yes
    """
    _row(ctx, name)
    output.confirm(yes, f"Revoke {name} in space {ctx.home.name}? This cannot be undone.")
    granted = administer(ctx, f"revoking {name}", lambda admin: admin.revoke(name))
    ctx.end_if_json({**_public(granted.row), "note": granted.note, "untold": granted.untold})
    came = f", but {granted.untold}" if granted.untold else " and its connection is cut"
    output.say(f"agent {name} is revoked{came}{'; ' + granted.note if granted.note else ''}")
    output.hint("tidings agent list --all")


@app.command("rotate")
def rotate(
    ctx: SpaceContext,
    name: NameArgument,
    drop_unread: Annotated[bool, Option("--drop-unread", help="Drop unread messages; their senders are told.")] = False,
) -> None:
    """Give an agent a new key under the same name, in the same channels; the old key is cut.

    What lies unread was for the old key, and no other opens it: then this is refused, with how much it is.

    Examples:
      tidings agent rotate ada
      tidings agent rotate ada --drop-unread             the key has leaked: what is unread is not waited for
    """
    held = _unread_at_host(ctx, _row(ctx, name))
    if held and not drop_unread:
        raise ConflictError(
            f"agent {name} keeps its key, because a new one cannot have what lies unread in the inbox of the host: "
            f"{held}. Let it read first (`tidings inbox --as {name}`), or give that up with "
            f"`tidings agent rotate {name} --drop-unread`"
        )
    granted = administer(ctx, f"rotating {name}", lambda admin: admin.rotate(name, drop_unread=drop_unread))
    dropped = "; ".join(each for each in (granted.note, held and f"{held} in the inbox of the host") if each)
    ctx.end_if_json({**_public(granted.row), "dropped": dropped, "untold": granted.untold})
    came = f"void, but {granted.untold}" if granted.untold else "cut"
    output.say(f"agent {name} has a new key; the old one is {came}")
    if dropped:
        output.say(f"what was unread is dropped: {dropped}")
    if granted.note:
        output.say(f"{name} and the senders of direct messages are told")
    output.line(granted.row.id)
    output.hint(f"tidings agent export {name} --output {name}.tidings.json")


def _unread_at_host(ctx: Context, row: Issued) -> str:
    """What the host of this home received for a key and nobody read: it is kept under that key."""
    from tidings.host.inbox import unread_of
    from tidings.host.schema import SCHEMA
    from tidings.util.database_snapshot import look

    file = ctx.home.home / "host.db"
    if row.state not in LIVE or not file.exists():
        return ""
    space_id = ctx.home.read_info().id
    try:
        counts = look(file, SCHEMA, lambda c: unread_of(c, space_id, row.id))
    except StoreError as error:  # boundary: whoever needs a new key gets one, whatever became of the inbox
        output.say(f"note: what the host holds for {row.name} is not known: {error}")
        return ""
    count = sum(n for kind, n in counts.items() if kind != "notice")
    return f"{count} message{'' if count == 1 else 's'}" if count else ""


@app.command("import")
def import_agent(
    ctx: HomeContext,
    file: Annotated[Path, Argument(help="Bundle, written by `tidings agent export`.", metavar="FILE")],
) -> None:
    """Take an agent that was exported elsewhere: from then on commands, the host and MCP can be it, under its name.

    The file is copied into the home (0600); remove the original if nobody else needs it. Importing a bundle of the same
    agent again replaces the copy.

    Examples:
      tidings agent import ada.tidings.json
      tidings who --space main --as ada
    """
    from tidings.admin.identity import bundle_identity
    from tidings.util.private_files import private_dir, read_private, write_private

    found = bundle_identity(file.absolute())
    ctx = ctx.at(space=found.subjects.space, acting_as=found.name)
    if ctx.home.exists and ctx.home.read_info().id != found.space_id:
        raise ConflictError(
            f"{ctx.home.home} has another space {ctx.home.name} of its own: import {file} into another home (--home)"
        )
    if ctx.home.agent_creds(found.name).exists():
        raise ConflictError(f"agent {found.name} of space {ctx.home.name} is in this home already")
    kept = ctx.home.imported(found.name)
    if kept.exists() and bundle_identity(kept).space_id != found.space_id:
        raise ConflictError(
            f"{kept} is of another space that is called {ctx.home.name}: "
            f"`tidings agent forget {found.name} --space {ctx.home.name}` first"
        )
    for folder in (ctx.home.home, kept.parent.parent, kept.parent):
        private_dir(folder)
    write_private(kept, read_private(file.absolute()))
    facts = {"name": found.name, "id": found.id, "space": ctx.home.name, "space_id": found.space_id}
    ctx.end_if_json({**facts, "url": found.address, "bundle": str(kept)})
    output.say(f"agent {found.name} of space {ctx.home.name} ({found.address}) can be used here")
    output.line(found.id)
    output.hint(f"tidings who --space {ctx.home.name} --as {found.name}")


@app.command("address")
def address(
    ctx: SpaceContext,
    name: Annotated[str | None, Argument(help="Name of an imported agent.", metavar="NAME")] = None,
    url: Annotated[list[str] | None, Option(help="New address of its space; may be repeated.", metavar="URL")] = None,
    bundle: Annotated[Path | None, Option(help="A bundle to change instead.", metavar="FILE")] = None,
) -> None:
    """Where the space of an imported agent is; with `--url`, from now on. Key, credential and trust stay as they are.

    Host and port are enough; trust and encryption stay. Running programs use it as soon as the old address fails.

    Examples:
      tidings agent address far --space main                        show it
      tidings agent address far --url 192.0.2.8                     its server moved
      tidings agent address far --url 192.0.2.8 --url wss://mesh.example:443
    """
    from tidings.admin.identity import bundle_identity, move_bundle

    path = bundle.absolute() if bundle else _imported(ctx, name)
    found = move_bundle(path, url) if url else bundle_identity(path)
    ctx.end_if_json({"name": found.name, "space": found.subjects.space, "url": found.address, "bundle": str(path)})
    if url:
        output.say(f"agent {found.name} reaches space {found.subjects.space} at {found.address} from now on")
    else:
        output.line(found.address)
    output.hint(f"tidings doctor connection {f'--bundle {bundle}' if bundle else f'--as {found.name}'}")


def _imported(ctx: Context, name: str | None) -> Path:
    if name is None:
        raise UsageError("whose address? `tidings agent address NAME`, or --bundle FILE")
    kept = ctx.home.imported(check_agent_name(name))
    if kept.exists():
        return kept
    if ctx.home.agent_creds(name).exists():
        raise UsageError(
            f"agent {name} is of space {ctx.home.name} in this home, and follows it: `tidings up --listen` or "
            "`--port` changes where it is"
        )
    raise UsageError(f"no agent {name} of a space {ctx.home.name} was imported into {ctx.home.home}")


@app.command("forget")
def forget(ctx: SpaceContext, name: NameArgument) -> None:
    """Forget an agent that was imported: its bundle is removed from this home. Where its space runs nothing changes.

    Example:
      tidings agent forget ada --space main
    """
    kept = ctx.home.imported(check_agent_name(name))
    try:
        kept.unlink()
    except FileNotFoundError:
        raise UsageError(f"no agent {name} of a space {ctx.home.name} was imported into {ctx.home.home}") from None
    ctx.end_if_json({"name": name, "space": ctx.home.name, "forgotten": str(kept)})
    output.say(f"agent {name} of space {ctx.home.name} is forgotten here; where its space runs it may go on")


@app.command("export")
def export(
    ctx: PlainSpaceContext,
    name: NameArgument,
    to: Annotated[Path | None, Option("--output", "-o", help="File to write (0600); else standard output.")] = None,
    url: Annotated[list[str] | None, Option(help="Address it will use; may be repeated.", metavar="URL")] = None,
) -> None:
    """Write everything an agent needs elsewhere: address, trust anchor, credential. It is a secret.

    A space that listens (`tidings up --listen ADDR`) is reached over TLS, and the bundle says whom to trust. One that
    does not is on loopback only: an agent elsewhere needs a tunnel, and `--url` names its near end.

    Examples:
      tidings agent export ada --output ada.tidings.json
      tidings agent export ada --url nats://127.0.0.1:7422 --output ada.tidings.json
      tidings agent export ada --url tls://10.0.0.7 --url tls://mesh.example:4222 -o ada.tidings.json
    """
    from tidings.admin.listening import address_for
    from tidings.util.private_files import read_private, write_private

    if to is not None and (to.is_symlink() or (to.exists() and not to.is_file())):
        raise UsageError(f"{to} is not a plain file: name one that is, or a new one")
    info = ctx.home.read_info()
    row = _row(ctx, name)
    if row.state != "active":
        raise UsageError(f"agent {name} is {row.state}, so there is nothing to export")
    if row.invited and not ctx.home.agent_creds(name).exists():
        raise UsageError(row.elsewhere)
    bundle = {
        "tidings": 1,
        "space": info.name,
        "space_id": info.id,
        "steward_key": info.steward_key,
        "url": address_for(info, url or []),
        "agent": {"name": row.name, "id": row.id},
        "creds": read_private(ctx.home.agent_creds(name)),
    }
    text = json.dumps(bundle, indent=1) + "\n"
    if to is None:
        output.line(text.rstrip())
        return
    write_private(to.absolute(), text)
    output.say(f"wrote {to}; whoever has it is {name}")
    output.hint("tidings who")
