"""`tidings link quarantine`: records of a link that were received and not let in."""

from __future__ import annotations

import base64
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tidings.cli import link_words, output
from tidings.cli.context import CountOption, Group, SpaceContext, countable
from tidings.cli.link_asking import NOBODY, LinkArgument, asked, meant, name_of
from tidings.errors import UsageError

SeqArgument = Annotated[
    int, typer.Argument(help="Record, by its sequence in the other log.", metavar="SEQ", callback=countable)
]


LifeOption = Annotated[
    int | None, typer.Option("--life", help="Which one, if several records have this sequence: as `list` shows it.")
]


class NameFirst(TyperGroup):
    """`quarantine acme list` is the same as `quarantine list acme`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


app = Group(
    cls=NameFirst,
    help="Records of a link that were received and not let in: look, try them again, or give them up.",
)


@app.command("list")
def quarantine_list(ctx: SpaceContext, name: LinkArgument, count: CountOption = 50) -> None:
    """List the records of a link that were received and not let in, oldest first, and why.

    Examples:
      tidings link quarantine list acme
      tidings link quarantine list acme -n 500 --json
    """
    row = meant(ctx, name)
    answer, _ = asked(ctx, "quarantined", link=row.link, limit=count)
    ctx.end_if_json(answer["records"])
    rows = [
        (
            f"{each['seq']} (life {each['life']})" if each["life"] else each["seq"],
            each["reason"],
            each["channel"],
            each["sender"][:12],
            output.size(each["bytes"]),
            each["attempts"],
            output.age(each["since"]),
            each["words"],
        )
        for each in answer["records"]
    ]
    output.table(
        ("record", "reason", "channel", "sender", "size", "tried", "since", "words"),
        rows,
        empty=f"nothing of {name_of(row)} is in quarantine",
    )
    if answer["count"] > len(rows):
        output.say(f"{answer['count'] - len(rows):,} more: `tidings link quarantine list {name_of(row)} -n 10000`")
    output.hint(f"tidings link quarantine show {name_of(row)} SEQ" if rows else f"tidings link show {name_of(row)}")


@app.command("show")
def quarantine_show(ctx: SpaceContext, name: LinkArgument, seq: SeqArgument, life: LifeOption = None) -> None:
    """Show one record that was not let in, with its bytes.

    Examples:
      tidings link quarantine show acme 1204
    """
    row = meant(ctx, name)
    record = asked(ctx, "quarantined_record", link=row.link, seq=seq, life=life)[0]["record"]
    ctx.end_if_json(record)
    payload = base64.b64decode(record.pop("payload"))
    record["since"] = link_words.moment(record["since"])
    record["said_at"] = link_words.moment(record["said_at"])
    output.table(("what", "value"), record.items(), empty="")
    output.line()
    output.line(_readable(payload))
    output.hint(f"tidings link quarantine retry {name_of(row)} {seq}")


def _readable(payload: bytes) -> str:
    """What others wrote must not reach a terminal as commands to it."""
    text = payload.decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


@app.command("retry")
def quarantine_retry(
    ctx: SpaceContext,
    name: LinkArgument,
    seqs: Annotated[
        list[int] | None, typer.Argument(help="Records; or --all.", metavar="SEQ", callback=countable)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Try records in quarantine again, now: perhaps what made them unfit is over.

    Examples:
      tidings link quarantine retry acme 1204 1205
      tidings link quarantine retry acme --all
    """
    row = meant(ctx, name)
    if bool(seqs) == every:
        raise UsageError(f"say which records of {name_of(row)} to try, or --all")
    answer, by_worker = asked(ctx, "retry", link=row.link, seqs=None if every else seqs)
    ctx.end_if_json({"link": row.link, **answer, "worker": by_worker})
    if not answer["count"]:
        output.say(f"nothing of {name_of(row)} is in quarantine")
        return
    tried = f"{answer['count']:,} records of {name_of(row)} are tried again"
    output.say(tried if by_worker else f"{tried} once a worker carries the link; {NOBODY}")
    output.hint(f"tidings link quarantine list {name_of(row)}")


@app.command("drop")
def quarantine_drop(
    ctx: SpaceContext,
    name: LinkArgument,
    seq: SeqArgument,
    reason: Annotated[str, typer.Option(help="Why; it is kept with what was left out.")],
    life: LifeOption = None,
) -> None:
    """Give up a record in quarantine for good; it is named as left out, with the reason.

    Examples:
      tidings link quarantine drop acme 1204 --reason "forged, says their operator"
    """
    row = meant(ctx, name)
    answer, _ = asked(ctx, "drop", link=row.link, seq=seq, reason=reason, life=life)
    ctx.end_if_json({"link": row.link, "seq": seq, **answer})
    output.say(f"record {seq} of {name_of(row)} is given up; {answer['left']:,} are left in quarantine")
    output.hint(f"tidings link quarantine list {name_of(row)}")
