"""`tidings keys`: new keys for the roles of a space, and for its certificate authority."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidings.cli import output
from tidings.cli.completion import among
from tidings.cli.context import Context, Group, SpaceContext
from tidings.errors import UsageError

if TYPE_CHECKING:
    from tidings.admin.administration import Administrator

app = Group(help="New keys for the steward, the pipeline and the certificate authority.")
ROLES = ("steward", "pipeline", "authority")


@app.callback()
def keys() -> None:
    pass


@app.command("rotate")
def rotate(
    ctx: SpaceContext,
    role: Annotated[
        str, typer.Argument(help="steward, pipeline or authority.", metavar="ROLE", autocompletion=among(*ROLES))
    ],
    finish: Annotated[
        bool, typer.Option("--finish", help="authority: the one that was announced takes its place.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="authority: both steps at once, as if its key had leaked.")
    ] = False,
) -> None:
    """Give a role of the space a new key; the old one is void.

    Agents have `tidings agent rotate` for that, and links with other spaces `tidings link renew`.

    `steward`: a new signing key, which readers follow by themselves, and a new credential; it is away for a moment.

    `pipeline`: a new credential; durable delivery starts again by itself, on a Spark cluster of yours by you.

    `authority`: in two steps, because agents elsewhere trust the old one. The first announces another: whoever connects
    learns to trust both, and who is connected within the hour. Some days later `--finish` makes it the one; agents that
    did not connect in between need a new invitation or bundle then.

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
    said, facts = _authority(ctx, finish, now) if role == "authority" else asyncio.run(_role(ctx, role))
    output.data({"role": role, **facts}) if ctx.as_json else output.say(said)
    output.hint("tidings status")


async def _role(ctx: Context, role: str) -> tuple[str, dict[str, Any]]:
    from tidings.admin.administration import administer

    async with administer(ctx.home, f"rotating the key of the {role}") as admin:
        return await (_pipeline(admin) if role == "pipeline" else _steward(admin))


async def _pipeline(admin: Administrator) -> tuple[str, dict[str, Any]]:
    from tidings.admin.rotation import rotate_pipeline

    made = await rotate_pipeline(admin)
    return f"the pipeline is {made} from now on, and its old credential is void", {"id": made}


async def _steward(admin: Administrator) -> tuple[str, dict[str, Any]]:
    from tidings.admin.rotation import rotate_steward

    answer = await rotate_steward(admin)
    said = (
        f"from sequence {answer['seq']} on the steward signs with {answer['steward_key']}; its old credential is void"
    )
    return said, {"seq": answer["seq"], "steward_key": answer["steward_key"]}


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
