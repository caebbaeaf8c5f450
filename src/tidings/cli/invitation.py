"""`tidings invite`, `tidings accept` and `tidings invitation`: an agent on another machine, by one line to paste."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from tidings.cli import output
from tidings.cli.agent import (
    DEFAULT_CHANNEL,
    ManageOption,
    PostOption,
    ReadOption,
    RoleOption,
    lifetime_of,
    listed,
    named_rights,
)
from tidings.cli.connection import administer
from tidings.cli.context import Context, Group, HomeContext, SpaceContext, seconds
from tidings.errors import UsageError
from tidings.wire.names import check_agent_name

if TYPE_CHECKING:
    from tidings.admin.administration import Administrator
    from tidings.admin.invitations import Invitation

app = Group(help="Invitations that were made: list and revoke them.")


def invite(
    ctx: SpaceContext,
    name: Annotated[str | None, Argument(help="Name of the agent (whoever accepts chooses).", metavar="NAME")] = None,
    read: ReadOption = None,
    post: PostOption = None,
    manage: ManageOption = None,
    role: RoleOption = None,
    description: Annotated[str, Option(help="One line about it.")] = "",
    expires: Annotated[str, Option(help="For how long it can be accepted: 10m, 1h, 7d.", metavar="TIME")] = "1h",
    uses: Annotated[int, Option(help="How many agents may accept it.")] = 1,
    agent_expires: Annotated[str | None, Option(help="How long its credential is valid: 7d.", metavar="TIME")] = None,
    replace: Annotated[bool, Option("--replace", help="Give an existing agent a new key, made there.")] = False,
    url: Annotated[str | None, Option(help="Address by which it reaches the space.", metavar="URL")] = None,
) -> None:
    """Invite an agent from another machine: prints a line that `tidings accept` takes there.

    The line is a secret until it is used: give it to one person, by a way you trust. It opens nothing but the place it
    promises; the agent's key is made where it is accepted, and never travels. The space must listen for other machines
    (`tidings up --listen ADDR`); one that does not can only invite on its own machine.

    Examples:
      tidings invite bob                                   may read and post to general
      tidings invite bob --read 'team.>' --post team.backend --role reviewer --expires 1d
      tidings invite bob --replace                         bob lost its key; what is unread for it is dropped, and told
      tidings invite --uses 5                              five agents, each with a name of its own choice
      tidings invite bob --url tls://broker.example:4222   reached by another name than this machine knows
    """
    from tidings.admin.invitations import Invitation
    from tidings.admin.inviting import Inviter

    rights = named_rights(read, post, manage, role)
    if replace and (name is None or rights or agent_expires is not None):
        raise UsageError(
            "--replace is for an agent that exists, with the rights it has: `tidings invite NAME --replace`"
        )
    everything = (">",) if ctx.home.read_info().open else DEFAULT_CHANNEL
    promised = Invitation(
        id="",
        issued=0,
        expires=0,
        uses=uses,
        name=(name or "") if replace or name is None else check_agent_name(name),
        description=description,
        lifetime=lifetime_of(agent_expires) or 0,
        **{"read": everything, "post": everything, **rights},
    )
    holds = seconds("--expires", expires)

    def make(admin: Administrator, reach: Any) -> tuple[Invitation, object]:
        inviter = Inviter(admin)
        return inviter.invite(inviter.replacing(promised.name, 1) if replace else promised, holds, reach)

    made, line = make_line(ctx, "inviting an agent", url, make)
    ctx.end_if_json({**_public(made), "line": line})
    whom = made.name or (f"{uses} agents" if uses > 1 else "an agent")
    by = output.moment(made.expires)
    output.say(f"{whom} may read {listed(made.read)} and post to {listed(made.post)}, accepted by {by}")
    output.line(line)
    output.hint("tidings invitation list")


def make_line(
    ctx: Context, purpose: str, url: str | None, make: Callable[[Administrator, Any], tuple[Invitation, object]]
) -> tuple[Invitation, str]:
    """Makes an invitation and the line to paste. A note says so if the line works on this machine only."""
    from tidings.admin.inviting import reach_of

    async def run(admin: Administrator) -> tuple[Invitation, str]:
        made, line = make(admin, reach_of(admin, url))
        if not (ctx.as_json or admin.info.listen or admin.info.ws or admin.info.servers):
            output.say(
                "note: this space listens on this machine only, so the line works here: `tidings up --listen ADDR`"
            )
        return made, str(line)

    return administer(ctx, purpose, run)


def accept(
    ctx: HomeContext,
    line: Annotated[str | None, Argument(help="The invitation; else read from standard input.", metavar="LINE")] = None,
    name: Annotated[str | None, Option(help="What to be called, if it leaves that to you.", metavar="NAME")] = None,
) -> None:
    """Accept an invitation: from then on commands, the host, MCP and programs here can be that agent.

    A key is made here and stays here. If you are interrupted, or the space is away, accept the same line again. Others
    on this machine may see the arguments of a command: leave the line out and paste it when asked, to keep it to
    yourself.

    Examples:
      tidings accept 'tidings:main@192.0.2.7:4222#AQEk...'
      tidings accept --name bob                            asks for the line, or reads it from a pipe
      tidings who --space main --as bob
    """
    from tidings.admin.accepting import accept as accept_line
    from tidings.wire.invitations import check_kind, parse_invitation

    invited = parse_invitation(read_line(line))
    check_kind(invited, for_link=False)
    ctx = ctx.at(space=invited.space, acting_as=name)
    wanted = check_agent_name(name) if name is not None else ""
    found = asyncio.run(accept_line(ctx.home, invited, wanted, output.say))
    ctx.end_if_json({"name": found.name, "id": found.id, "space": invited.space, "url": found.address})
    output.say(f"you are agent {found.name} of space {invited.space} ({found.address})")
    output.line(found.id)
    output.hint(f"tidings who --space {invited.space} --as {found.name}")


def read_line(line: str | None) -> str:
    if line is not None and line != "-":
        return line
    if sys.stdin.isatty():
        output.say("paste the invitation:")
    return sys.stdin.readline(4_096) if sys.stdin.isatty() else sys.stdin.read(65_536)


@app.command("list")
def list_invitations(
    ctx: SpaceContext, every: Annotated[bool, Option("--all", help="Used, expired and revoked ones too.")] = False
) -> None:
    """List the invitations of a space. The line itself is shown once, when it is made.

    Of one for a link, `read` is what the other space may read, and `post` what comes from there.

    Examples:
      tidings invitation list
      tidings invitation list --all --json
    """
    known = [each for each in _known(ctx) if every or each.state(time.time()) == "open"]
    ctx.end_if_json([_public(each) for each in known])
    rows = [
        (
            each.id[:12],
            "link" if each.link else "agent",
            _name(each) or "-",
            each.state(time.time()),
            f"{len(each.taken)} of {each.uses}",
            output.moment(each.expires),
            *_rights(each),
        )
        for each in known
    ]
    output.table(
        ("invitation", "for", "name", "state", "used", "until", "read", "post"),
        rows,
        empty=f"space {ctx.home.name} has no open invitations: `tidings invite NAME`",
    )
    output.hint("tidings invitation revoke ID" if rows else "tidings invite NAME")


@app.command("revoke")
def revoke(
    ctx: SpaceContext,
    invitation: Annotated[str, Argument(help="The invitation, or the name it is for.", metavar="ID")],
) -> None:
    """Revoke an invitation: nobody can accept it any more. An agent it already made stays (`tidings agent revoke`), and
    so does a link (`tidings link remove`).

    Examples:
      tidings invitation revoke UDXB5CKSO4DC
      tidings invitation revoke bob
    """
    from tidings.admin.inviting import Inviter

    chosen = _meant(_known(ctx), invitation)

    async def end(admin: Administrator) -> tuple[Invitation, str]:
        return await Inviter(admin).revoke(admin.invitations.get(chosen.id) or chosen), admin.untold

    found, untold = administer(ctx, "revoking an invitation", end)
    ctx.end_if_json({**_public(found), "untold": untold})
    kind = "link" if found.link else "agent"
    made = f"; {len(found.taken)} accepted it before and stay: `tidings {kind} list`" if found.taken else ""
    output.say(f"invitation {found.id[:12]}{f' of {_name(found)}' if _name(found) else ''} is revoked{made}")
    if untold:
        output.say(f"{untold}; the steward refuses whoever comes with it")
    output.hint("tidings invitation list --all")


def _known(ctx: Context) -> list[Invitation]:
    from tidings.admin.invitations import Invitations

    return Invitations.below(ctx.home, ctx.home.read_info().id).all()


def _meant(known: list[Invitation], text: str) -> Invitation:
    found = [each for each in known if each.id.startswith(text.upper()) and len(text) >= 4]
    found = found or [each for each in known if _name(each) == text and each.state(time.time()) == "open"]
    if len(found) != 1:
        many = f"{len(found)} invitations are" if found else "no invitation is"
        raise UsageError(f"{many} meant by {text!r}: `tidings invitation list --all` shows them with their ids")
    return found[0]


def _name(invitation: Invitation) -> str:
    """Of the agent, or of the other space."""
    return invitation.link.called if invitation.link else invitation.name


def _rights(invitation: Invitation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What whoever accepts may read here, and what comes from there."""
    if invitation.link is None:
        return invitation.read, invitation.post
    from tidings.wire.link_terms import read_offer

    offer = read_offer(invitation.link.offer, invitation.link.signature)
    return offer.shares, tuple(invitation.link.takes.values())


def _public(invitation: Invitation) -> dict[str, Any]:
    read, post = _rights(invitation)
    link = {"link": invitation.link.link, "takes": invitation.link.takes} if invitation.link else {}
    return {
        "id": invitation.id,
        "name": _name(invitation),
        **link,
        "state": invitation.state(time.time()),
        "uses": invitation.uses,
        "taken": list(invitation.taken),
        "issued": output.moment(invitation.issued),
        "expires": output.moment(invitation.expires),
        "roles": list(invitation.roles),
        "read": list(read),
        "post": list(post),
        "manage": list(invitation.manage),
        "why": invitation.why,
    }
