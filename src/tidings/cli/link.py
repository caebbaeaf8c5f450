"""`tidings link`: list, watch, pause, compare, mend and end links. Agreeing on one is in `link_agreement.py`."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option
from typer.core import TyperGroup

from tidings.admin.link_registry import AgreedLink
from tidings.cli import link_agreement, link_words, output
from tidings.cli.connection import administer
from tidings.cli.context import (
    Context,
    CountOption,
    Group,
    PlainSpaceContext,
    SpaceContext,
    YesOption,
    countable,
    seconds,
)
from tidings.cli.link_words import ANSWERS, NOBODY, LinkArgument, as_json, call_worker, links_of, meant, name_of
from tidings.contract import link_worker as contract
from tidings.contract.links import PeerProgress
from tidings.errors import BrokerUnreachable, TidingsError, UsageError, WorkerUnreachable

app = Group(help="Manage links with other spaces: agree on one, list, watch, pause, compare, repair and end them.")
app.command("invite")(link_agreement.invite)
app.command("accept")(link_agreement.accept)
app.command("set")(link_agreement.change)
app.command("renew")(link_agreement.renew)


@app.command("list")
def list_links(ctx: SpaceContext, every: Annotated[bool, Option("--all", help="Include ended links.")] = False) -> None:
    """List the links of a space and their states.

    Examples:
      tidings link list
      tidings link list --all --json
    """
    # a space that never had one is asked nothing
    links, by_worker = _links(ctx, contract.ListLinksRequest()) if links_of(ctx) else ((), False)
    links = tuple(each for each in links if every or each.state in ("on", "setting"))
    ctx.end_if_json(list(map(as_json, links)))
    rows = [
        (
            each.space or "-",
            each.link,
            link_words.state(each),
            each.live.connectivity if each.live is not None else None,
            link_words.lag(each),
            link_words.push_lag(each, time.time()),
            link_words.mapping(each.channels),
            each.shares,
        )
        for each in links
    ]
    output.table(
        ("space", "link", "state", "connection", "behind", "they are behind", "takes in", "shares"),
        rows,
        empty=f"space {ctx.home.name} has no links",
    )
    if not by_worker and any(each.imports for each in links):
        output.say(NOBODY)
    for each in links:
        if link_words.state(each) == "ended there":
            output.say(link_words.ended_there_words(each.space or each.link))
    output.hint("tidings link show NAME" if rows else "tidings link --help")


def _links(ctx: Context, request: contract.ListLinksRequest) -> tuple[tuple[contract.LinkReport, ...], bool]:
    """Returns all links or one, and whether a link worker answered."""
    answer, by_worker = call_worker(ctx, request)
    if not by_worker:
        _add_pushes(ctx, answer.links)
    if answer.steward:
        output.say(f"note: which links are in force is not known to the worker: {answer.steward}")
    return answer.links, by_worker


def _add_pushes(ctx: Context, links: tuple[contract.LinkReport, ...]) -> None:
    """How far the others are with what is shared, as the steward says; without a worker it is asked itself."""
    from tidings.links.destination import LocalSpace

    async def look() -> dict[str, PeerProgress | None]:
        local = LocalSpace(ctx.home.read_info().url, ctx.home.link_creds, ctx.home.name)
        try:
            async with asyncio.timeout(ANSWERS):
                found = (await local.links()).links
        finally:
            await local.close()
        return {each.record.link: each.push for each in found}

    if not any(each.shares and each.state == "on" for each in links):
        return
    with suppress(TidingsError, TimeoutError, OSError):
        pushes = asyncio.run(look())
        for each in links:
            each.push = pushes.get(each.link)


@app.command("show")
def show(
    ctx: SpaceContext,
    name: LinkArgument,
    follow: Annotated[bool, Option("-f", "--follow", help="Print events until Ctrl-C.")] = False,
) -> None:
    """Show everything about a link: what passes, its progress, and what was not imported and why.

    `--follow` prints the progress and every change of state; with `--json` one object per line.

    Examples:
      tidings link show acme
      tidings link show acme --follow
    """
    row = meant(ctx, name)
    if follow:
        asyncio.run(_follow(ctx, row))
        return
    (link,), by_worker = _links(ctx, contract.ListLinksRequest(link=row.link, complete=True))
    ctx.end_if_json(as_json(link) | {"worker": by_worker})
    output.table(("what", "value"), link_words.rows(link, time.time()))
    if not by_worker and link.imports:
        output.say(NOBODY)
    output.hint(f"tidings link verify {name_of(row)}" if link.store is not None else "tidings link list")


async def _follow(ctx: Context, row: AgreedLink) -> None:
    from tidings.rpc.local_socket import follow

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        async for event in follow(ctx.home.link_socket, contract.FollowLinkRequest(row.link)):
            ctx.stream(msgspec.to_builtins(event), link_words.event(event))
            if isinstance(event, contract.LinkNotRunning):
                return
    except asyncio.CancelledError:
        return
    except WorkerUnreachable as error:
        raise WorkerUnreachable(f"{error}: `tidings up` starts one, or `tidings link run`") from error


@app.command("people")
def people(
    ctx: SpaceContext,
    name: LinkArgument,
    trust: Annotated[str | None, Option(help="Accept the new key of an agent.", metavar="AGENT")] = None,
    yes: YesOption = False,
) -> None:
    """List the known agents of a linked space. Agents here reach them as name@space.

    A name stands for its first key. If the linked space gives it another key without a record that the new key replaces
    the old one, agents here cannot write to it until you confirm with `--trust`: compare both keys with their operator.

    Examples:
      tidings link people acme
      tidings link people acme --trust bob
    """
    row = meant(ctx, name)
    if trust is not None:
        changed = _trusted(ctx, row, trust, yes=yes)
        ctx.end_if_json(changed)
        output.say(f"{trust}@{name_of(row)} is {changed.now} from now on; it was {changed.before}")
        return
    found, _ = call_worker(ctx, contract.ListDirectoryRequest(row.link))
    ctx.end_if_json(found)
    rows = [(each.name, each.roles, each.id, "") for each in found.people]
    rows += [(each.name, each.roles, each.id, "another key than before") for each in found.changed]
    output.table(("name", "roles", "id", "note"), rows, empty=f"{name_of(row)} has told of nobody")
    first = next(iter(found.changed), None)
    output.hint(f"tidings link people {name_of(row)} --trust {first.name}" if first else "tidings who")


def _trusted(ctx: Context, row: AgreedLink, agent: str, *, yes: bool) -> contract.KeyChangeAnswer:
    """Of two keys the operator sees both; a third one that comes meanwhile is not meant."""
    shown, _ = call_worker(ctx, contract.CompareKeysRequest(row.link, agent))
    if not yes:
        output.say(f"{agent}@{name_of(row)} was {shown.before}")
        output.say(f"{agent}@{name_of(row)} is {shown.now} there now, which does not say that it took over")
        output.confirm(yes, "Does their operator say so too, and is it to be that one?")
    changed, _ = call_worker(ctx, contract.TrustKeyRequest(row.link, agent, shown.now))
    return changed


#: between two looks with --poll
EVERY = "30s"


@app.command("pause")
def pause(
    ctx: SpaceContext,
    name: LinkArgument,
    reason: Annotated[str, Option(help="Reason to show in the link's status.")] = contract.PAUSED,
) -> None:
    """Stop imports over a link until `resume`. The other space can still read what this one shares.

    Examples:
      tidings link pause acme
      tidings link pause acme --reason "their agents flood general"
    """
    row = meant(ctx, name)
    answer, by_worker = call_worker(ctx, contract.PauseLinkRequest(row.link, reason))
    ctx.end_if_json({"link": row.link, "paused": reason, **msgspec.to_builtins(answer), "worker": by_worker})
    output.say(f"link with {name_of(row)} is paused: nothing comes in over it until it is resumed, where it was")
    output.hint(f"tidings link resume {name_of(row)}")


@app.command("resume")
def resume(ctx: SpaceContext, name: LinkArgument) -> None:
    """Continue a paused link where it stopped.

    Examples:
      tidings link resume acme
    """
    row = meant(ctx, name)
    answer, by_worker = call_worker(ctx, contract.ResumeLinkRequest(row.link))
    ctx.end_if_json({"link": row.link, **msgspec.to_builtins(answer), "worker": by_worker})
    output.say(f"link with {name_of(row)} {'was not paused' if answer.paused_before is None else 'goes on'}")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


@app.command("remove")
def remove(ctx: SpaceContext, name: LinkArgument, yes: YesOption = False) -> None:
    """End a link on this side: stop imports, refuse the other space, and delete the link from the link store.

    Imported messages stay. The operator of the other space ends the link there with the same command.

    Examples:
      tidings link remove acme
      tidings link remove acme --yes
    """
    from tidings.admin.link_peers import LinkPeers
    from tidings.admin.linking import Linker

    row = meant(ctx, name)
    output.confirm(yes, f"End the link with {name_of(row)}?")
    # the user and the record first; then nothing is left that could start it again; then the ledger
    ended = administer(ctx, "ending a link", lambda admin: Linker(admin).end(row.link))
    LinkPeers.below(ctx.home).forget(row.link)
    call_worker(ctx, contract.ForgetLinkRequest(row.link))
    ctx.end_if_json({"link": row.link, "space": name_of(row), "state": ended.state})
    output.say(
        f"the link with {name_of(row)} is ended here: its user is cut, and nothing comes in. What came over it stays. "
        "The operator of the other space should remove it there too"
    )
    if ended.state == "ending":
        output.say("the steward does not answer: the record that says so is written when it does (`tidings status`)")
    output.hint("tidings link list --all")


@app.command("run")
def run(
    ctx: PlainSpaceContext,
    poll: Annotated[bool, Option("--poll", help="Poll linked spaces; do not wait for notifications.")] = False,
    every: Annotated[str | None, Option(help=f"Interval of --poll: 30s, 5m, 1h ({EVERY}).", metavar="TIME")] = None,
) -> None:
    """Run the link worker of a space in the foreground until Ctrl-C. `tidings up` usually starts it.

    Only one link worker can run: start the space with `tidings up --no-links` first.

    Examples:
      tidings link run
      tidings link run --poll --every 5m
    """
    ctx.home.read_info()
    if every is not None and not poll:
        raise UsageError(
            "--every says how often --poll looks: say --poll too, or neither to hear of what is new at once"
        )
    pause = float(seconds("--every", every or EVERY)) if poll else None
    if pause is not None and pause < 1:
        raise UsageError("--every is at least a second")
    asyncio.run(_run(ctx, pause))
    output.say("links are not carried now; what was taken over stays, and the rest waits in the other spaces")


async def _run(ctx: Context, every: float | None) -> None:
    from tidings.links.worker import LinkWorker

    ctx.home.make()
    worker = LinkWorker(ctx.home, every=every, tell=output.say)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    how = "hears of what is new" if every is None else f"looks every {every:.0f} s"
    running = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        output.say(f"links of space {ctx.home.name} are carried; the worker {how}. Ctrl-C stops it.")
    ready.cancel()
    await running


#: seconds in which a worker that was told to leave has done so
LEAVING = 20.0
DIFFERS = 3


@app.command("verify")
def verify(ctx: SpaceContext, name: LinkArgument) -> None:
    """Compare the records that the other space shares with those imported, by digests. Exit code 3 if they differ.

    Records that were not imported on purpose or are in quarantine do not count as different. The link worker fetches
    missing records.

    Examples:
      tidings link verify acme
      tidings link verify acme --json
    """
    row = meant(ctx, name)
    try:
        with output.working(f"comparing with {name_of(row)}"):
            answer, by_worker = call_worker(ctx, contract.VerifyLinkRequest(row.link))
    except BrokerUnreachable as error:
        raise BrokerUnreachable(
            f"{error}. The link with {name_of(row)} is compared while both spaces are up; what is new there comes by "
            "itself once they are"
        ) from error
    if ctx.as_json:
        output.data({"link": row.link, **msgspec.to_builtins(answer)})
    else:
        for words in link_words.verified(name_of(row), answer):
            output.line(words)
        if answer.lacking or answer.lost:
            output.say("the worker fetches what is not here" if by_worker else NOBODY)
    if not answer.equal or answer.lost:
        raise typer.Exit(DIFFERS)
    output.hint(f"tidings link show {name_of(row)}")


@app.command("rebuild")
def rebuild(
    ctx: SpaceContext,
    name: LinkArgument = "",
    ledger: Annotated[bool, Option("--ledger", help="Replace a damaged link store, for all links.")] = False,
    yes: YesOption = False,
) -> None:
    """Read the other space's log again from its beginning.

    Messages that are or were here are not imported twice. Records in quarantine stay there and are retried at once.
    `--ledger` does this for all links, even if the link store cannot be read: it is moved to `links.db.aside`. Paused
    links then continue, dropped records and messages removed by age are imported again, and the keys of linked agents
    are stored anew: check `tidings link people`.

    Examples:
      tidings link rebuild acme --yes
      tidings link rebuild --ledger
    """
    if bool(name) == ledger:
        raise UsageError("say which link to read again, or --ledger for all of them, and not both")
    if ledger:
        _rebuild_all(ctx, yes=yes)
        return
    row = meant(ctx, name)
    output.confirm(yes, f"Read everything of {name_of(row)} again?")
    answer, by_worker = call_worker(ctx, contract.RebuildLinkRequest(row.link))
    ctx.end_if_json({"link": row.link, **msgspec.to_builtins(answer), "worker": by_worker})
    kept = f"; {answer.quarantined:,} in quarantine are tried again" if answer.quarantined else ""
    output.say(f"link with {name_of(row)} begins anew; it had handled {answer.handled:,} of the other log{kept}")
    if not by_worker:
        output.say(NOBODY)
    output.hint(f"tidings link show {name_of(row)} --follow")


def _rebuild_all(ctx: Context, *, yes: bool) -> None:
    from tidings.links.store_file import set_ledger_aside
    from tidings.rpc.local_socket import call

    ctx.home.read_info()
    output.confirm(yes, "Begin a new ledger, and read everything of all links again?")
    with suppress(WorkerUnreachable):  # whoever keeps it running starts it again
        asyncio.run(call(ctx.home.link_socket, contract.StopWorkerRequest()))
    aside = set_ledger_aside(ctx.home, LEAVING)
    ctx.end_if_json({"aside": str(aside) if aside is not None else None})
    output.say(f"the ledger was set aside as {aside}" if aside is not None else "there was no ledger")
    output.say("links are read again from their beginning; `tidings up` or `tidings link run` carries them")
    output.hint("tidings link list")


SeqArgument = Annotated[int, Argument(help="Sequence of the record in their log.", metavar="SEQ", callback=countable)]
LifeOption = Annotated[int | None, Option("--life", help="Selects among records with the same sequence; see `list`.")]


class NameFirst(TyperGroup):
    """`quarantine acme list` is the same as `quarantine list acme`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


quarantine = Group(
    cls=NameFirst,
    help="Show, retry or drop records of a link that were received and not imported.",
)


@quarantine.command("list")
def quarantine_list(ctx: SpaceContext, name: LinkArgument, count: CountOption = 50) -> None:
    """List the records of a link that were received and not imported, oldest first, with the reason.

    Examples:
      tidings link quarantine list acme
      tidings link quarantine list acme -n 500 --json
    """
    row = meant(ctx, name)
    answer, _ = call_worker(ctx, contract.ListQuarantineRequest(row.link, limit=min(count, contract.MAX_RECORDS)))
    ctx.end_if_json(answer.records)
    rows = [
        (
            f"{each.seq} (life {each.life})" if each.life else each.seq,
            each.reason,
            each.channel,
            each.sender[:12],
            output.size(each.size),
            each.attempts,
            output.age(each.since),
            each.words,
        )
        for each in answer.records
    ]
    columns = ("record", "reason", "channel", "sender", "size", "attempts", "since", "words")
    output.table(columns, rows, empty=f"nothing of {name_of(row)} is in quarantine")
    if answer.count > len(rows):
        output.say(f"{answer.count - len(rows):,} more: `tidings link quarantine list {name_of(row)} -n 10000`")
    output.hint(f"tidings link quarantine show {name_of(row)} SEQ" if rows else f"tidings link show {name_of(row)}")


@quarantine.command("show")
def quarantine_show(ctx: SpaceContext, name: LinkArgument, seq: SeqArgument, life: LifeOption = None) -> None:
    """Show one record in quarantine with its payload.

    Examples:
      tidings link quarantine show acme 1204
    """
    row = meant(ctx, name)
    record, _ = call_worker(ctx, contract.ShowQuarantinedRequest(row.link, seq, life))
    ctx.end_if_json(record)
    fields = msgspec.structs.asdict(record)
    payload = fields.pop("payload")
    times = {"since": output.moment(record.since), "sent_at": output.moment(record.sent_at)}
    output.table(("what", "value"), (fields | times).items())
    output.line()
    output.line(_readable(payload))
    output.hint(f"tidings link quarantine retry {name_of(row)} {seq}")


def _readable(payload: bytes) -> str:
    """What others wrote must not reach a terminal as commands to it."""
    text = payload.decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


@quarantine.command("retry")
def quarantine_retry(
    ctx: SpaceContext,
    name: LinkArgument,
    seqs: Annotated[list[int] | None, Argument(help="Records; or --all.", metavar="SEQ", callback=countable)] = None,
    every: Annotated[bool, Option("--all", help="All records in quarantine.")] = False,
) -> None:
    """Retry records in quarantine now, because the reason may no longer apply.

    Examples:
      tidings link quarantine retry acme 1204 1205
      tidings link quarantine retry acme --all
    """
    row = meant(ctx, name)
    if bool(seqs) == every:
        raise UsageError(f"say which records of {name_of(row)} to try, or --all")
    request = contract.RetryQuarantinedRequest(row.link, tuple(seqs) if seqs else None)
    answer, by_worker = call_worker(ctx, request)
    ctx.end_if_json({"link": row.link, **msgspec.to_builtins(answer), "worker": by_worker})
    if not answer.count:
        output.say(f"nothing of {name_of(row)} is in quarantine")
        return
    tried = f"{answer.count:,} records of {name_of(row)} are tried again"
    output.say(tried if by_worker else f"{tried} once a worker carries the link; {NOBODY}")
    output.hint(f"tidings link quarantine list {name_of(row)}")


@quarantine.command("drop")
def quarantine_drop(
    ctx: SpaceContext,
    name: LinkArgument,
    seq: SeqArgument,
    reason: Annotated[str, Option(help="Reason to store with the dropped record.")],
    life: LifeOption = None,
) -> None:
    """Give up a record in quarantine for good. It stays listed as not imported, with the reason.

    Examples:
      tidings link quarantine drop acme 1204 --reason "forged, says their operator"
    """
    row = meant(ctx, name)
    answer, _ = call_worker(ctx, contract.DropQuarantinedRequest(row.link, seq, reason, life))
    ctx.end_if_json({"link": row.link, "seq": seq, **msgspec.to_builtins(answer)})
    output.say(f"record {seq} of {name_of(row)} is given up; {answer.left:,} are left in quarantine")
    output.hint(f"tidings link quarantine list {name_of(row)}")


app.add_typer(quarantine, name="quarantine")
