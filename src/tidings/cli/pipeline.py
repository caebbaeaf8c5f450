"""`tidings pipeline`: durable delivery, run, watched and mended by hand.

Debts and quarantine are Delta tables; they are read without Spark. What is behind comes from the broker.
"""

from __future__ import annotations

import asyncio
import getpass
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from tidings.admin.home import SpaceHome
from tidings.cli import output
from tidings.cli.context import (
    AgentArgument,
    ChannelArgument,
    Context,
    CountOption,
    Group,
    Names,
    OutputContext,
    PlainSpaceContext,
    SpaceContext,
    YesOption,
)
from tidings.errors import ERRORS_BY_CODE, PrerequisiteMissing, TidingsError, UsageError

if TYPE_CHECKING:
    from tidings.delivery.ledger import LedgerPaths
    from tidings.model.deferred import Debt, Debts

app = Group(help="Run, inspect and repair durable delivery.")
UNHEALTHY = 3

CheckpointOption = Annotated[
    str | None, Option(help="Folder or URI of the checkpoint, and of debts if --lake is a folder.", metavar="PLACE")
]
LakeOption = Annotated[
    str | None, Option(help="Folder or URI of the tables (s3, s3a, abfss, hdfs, gs).", metavar="PLACE")
]
StorageOption = Annotated[
    Names,
    Option(help="Option of deltalake; may be repeated. Put secrets into AWS_*, AZURE_*.", metavar="KEY=VALUE"),
]


@app.command("run")
def run(
    ctx: PlainSpaceContext,
    master: Annotated[str, Option(help="Spark master: local[N], spark://HOST:PORT, yarn.")] = "local[*]",
    also: Annotated[Names, Option(help="Another space to deliver for; may be repeated.", metavar="SPACE")] = None,
    url: Annotated[str | None, Option(help="Broker, as every worker reaches it.", metavar="URL")] = None,
    creds: Annotated[Path | None, Option(help="The pipeline's credential on this machine.", metavar="PATH")] = None,
    checkpoint: CheckpointOption = None,
    lake: LakeOption = None,
    storage: StorageOption = None,
    memory: Annotated[str, Option(help="Heap of the driver.")] = "700m",
    conf: Annotated[Names, Option(help="A setting of Spark; may be repeated.", metavar="KEY=VALUE")] = None,
) -> None:
    """Deliver in the foreground until Ctrl-C: the same job `tidings up` starts, on any Spark.

    Start the space with `tidings up --no-pipeline` first; one pipeline delivers at a time, a second one waits.

    Examples:
      tidings pipeline run --master local[2]
      tidings pipeline run --master spark://spark:7077 --checkpoint /shared/cp --lake /shared/lake
      tidings pipeline run --lake s3://team/tidings --storage AWS_REGION=eu-central-1
      tidings pipeline run --space main --also lab --also staging
    """
    from tidings.delivery.process import also_checked
    from tidings.delivery.storage import checked_storage

    ctx.home.read_info()
    others = also_checked(ctx.home.name, also or (), url=url, creds=creds)
    for name in others:
        SpaceHome(ctx.home.home, name).read_info()
    places = {"--checkpoint": _place("--checkpoint", checkpoint), "--lake": _place("--lake", lake)}
    named = {"--url": url, "--creds": creds and str(creds.absolute()), **places}
    options = ["--master", master, "--memory", memory, *(word for name in others for word in ("--also", name))]
    options += [word for name, value in named.items() if value for word in (name, value)]
    for key, value in checked_storage(storage or []).items():
        options += ["--storage", f"{key}={value}"]
    for each in conf or []:
        if "=" not in each:
            raise UsageError(f"--conf {each!r} is not KEY=VALUE")
        options += ["--conf", each]
    asyncio.run(_run(ctx, options))


def _place(option: str, text: str | None) -> str | None:
    from tidings.delivery.storage import checked_place

    return checked_place(option, text) if text else None


async def _run(ctx: Context, options: list[str]) -> None:
    from tidings.supervisor.keepers import PipelineProcess

    ctx.home.make()
    process = await PipelineProcess.start(ctx.home, options)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)

    async def end() -> None:
        await stopping.wait()
        output.say("stopping")
        await process.end()

    ending = asyncio.create_task(end())
    failed: dict[str, Any] = {}
    try:
        async for said in process.lines():
            failed = said.get("error") or failed
            name = said.get("space") or ctx.home.name
            if said.get("ready"):
                output.say(f"space {name}: durable delivery runs (pid {process.pid}). Ctrl-C stops it.")
            elif said.get("halted"):
                output.say(f"space {name}: durable delivery halted, and is tried again: {said['halted']}")
            elif said.get("phase") or said.get("warning"):
                output.say(str(said.get("phase") or f"warning: {said['warning']}"))
        code = await process.wait()
    finally:
        ending.cancel()
        await process.end()
    if failed:
        raise ERRORS_BY_CODE.get(failed["code"], TidingsError)(failed["message"])
    if code:
        raise TidingsError(f"the pipeline ended with code {code}; `tidings logs pipeline` says why")


@app.command("package")
def package(
    ctx: OutputContext,
    to: Annotated[Path | None, Option(help="Where to write it; a name that ends in .tar.gz.", metavar="FILE")] = None,
) -> None:
    """Build one archive of Tidings and what its pipeline needs, for a Spark whose machines have none of it.

    It is for machines of this platform with this version of Python. The command to run it with is printed.

    Examples:
      tidings pipeline package
      tidings pipeline package --to /shared/tidings.tar.gz
    """
    from tidings.delivery.package import build_package, default_name, platform_tag, submit_command

    built = build_package(to or Path(default_name()))
    facts = {"path": str(built.path), "bytes": built.bytes, "platform": platform_tag()}
    ctx.end_if_json({**facts, "distributions": list(built.distributions)})
    output.say(f"{built.path}: {built.bytes / 1e6:.0f} MB, {len(built.distributions)} packages, for {platform_tag()}")
    output.say(f"To deliver with it:\n\n{submit_command(built.path, 'spark://HOST:7077', 'main')}")


@app.command("status")
def status(ctx: SpaceContext) -> None:
    """How durable delivery is. Exit code 3 if it should run and does not, or is more than a minute behind.

    In a space with `deliver=off` neither is a problem.

    Examples:
      tidings pipeline status
      tidings pipeline status --space lab --json
    """
    from tidings.supervisor.status import delivery

    ctx.home.read_info()
    facts = asyncio.run(delivery(ctx.home))
    output.data(facts) if ctx.as_json else _show(facts)
    if not facts["answers"]:
        output.say(f"problem: {facts['why']}")
        raise typer.Exit(UNHEALTHY if facts["problems"] else 5)
    if facts["problems"] or facts["supervised"]["phase"] == "unavailable":
        raise typer.Exit(UNHEALTHY)
    output.hint("tidings pipeline debts")


def _show(facts: dict[str, Any]) -> None:
    if not facts["answers"]:
        return
    figures, supervised = facts["figures"], facts["supervised"]
    rows = [
        ("running", f"yes, {facts['holder']}" if facts["running"] else "no"),
        ("supervisor", supervised["phase"] if supervised["wanted"] else "leaves it out"),
        ("deliver", None if facts["deliver"] == "on" else "off for this space: nobody waits for durable copies"),
        ("behind", f"{facts['behind']} records, {facts['behind_s']:.1f} s"),
        ("delivered through", f"{facts['floor']} of {facts['head']}"),
        ("debts", f"{facts['debts'] or 0} of {facts['owners_in_debt'] or 0} agents"),
        ("last batch", f"{figures['last_batch_ms']:.0f} ms" if figures.get("last_batch_ms") else None),
        *((name, figures.get(name)) for name in ("batches", "messages", "deliveries", "frames")),
        *((name, figures.get(name)) for name in ("poison", "missing")),
        ("last error", figures.get("last_error")),
        ("figures", f"{output.age(facts['figures_at'])} old" if facts["figures_at"] else "none yet"),
    ]
    output.table(("what", "value"), rows)
    for problem in facts["problems"]:
        output.say(f"problem: {problem}")
    if facts["mode"]:
        output.say(f"note: {facts['mode']}")


def _tables(ctx: Context, checkpoint: str | None, lake: str | None, storage: Names) -> LedgerPaths:
    """Where the tables are; without what reads them, one sentence."""
    ctx.home.read_info()
    try:
        from tidings.delivery.ledger import LedgerPaths
        from tidings.delivery.storage import checked_storage
    except ImportError:
        raise PrerequisiteMissing(
            "reading the tables of the pipeline needs deltalake: `pip install 'tidings[spark]'`"
        ) from None
    return LedgerPaths.below(
        _place("--checkpoint", checkpoint) or ctx.home.checkpoint,
        _place("--lake", lake) or ctx.home.lake,
        checked_storage(storage or []),
    )


@app.command("debts")
def debts(
    ctx: SpaceContext, checkpoint: CheckpointOption = None, lake: LakeOption = None, storage: StorageOption = None
) -> None:
    """List agents whose deliveries wait because their mailbox is full, since when, and why.

    Examples:
      tidings pipeline debts
      tidings pipeline debts --lake s3://team/tidings --json
    """
    paths = _tables(ctx, checkpoint, lake, storage)
    from tidings.delivery.ledger import open_debts

    found = sorted(open_debts(paths.debts, paths.storage).open.values(), key=lambda debt: debt.since_ns)
    names = _names(ctx)
    floor = _floor(ctx) if found else None
    rows = [_debt_row(debt, names, floor) for debt in found]
    ctx.end_if_json(rows)
    shown = [
        (r["name"], r["owner"], r["channel"], r["after"], r["behind"], output.age(r["since"]), r["cause"]) for r in rows
    ]
    output.table(
        ("agent", "id", "channel", "delivered through", "behind", "since", "cause"),
        shown,
        empty=f"nobody in space {ctx.home.name} is owed anything",
    )
    output.hint("tidings pipeline status")


def _debt_row(debt: Debt, names: dict[str, str], floor: int | None) -> dict[str, Any]:
    return {
        "name": names.get(debt.owner),
        "owner": debt.owner,
        "channel": debt.channel,
        "after": debt.after,
        "behind": max(0, floor - debt.after) if floor is not None else None,
        "since": debt.since_ns / 1e9,
        "cause": debt.cause,
    }


def _names(ctx: Context) -> dict[str, str]:
    from tidings.admin.agents import Ledger

    return {row.id: row.name for row in Ledger(ctx.home.issued).rows()}


def _floor(ctx: Context) -> int | None:
    """How far delivery is, if the broker answers."""
    from tidings.delivery.status import look

    try:
        return look(ctx.home).floor
    except TidingsError as error:
        output.say(f"note: how far behind is not known: {error}")
        return None


@app.command("cancel-debt")
def cancel_debt(
    ctx: SpaceContext,
    owner: AgentArgument,
    channel: ChannelArgument,
    why: Annotated[str, Option(help="Told to the agent.")] = "",
    yes: YesOption = False,
    checkpoint: CheckpointOption = None,
    lake: LakeOption = None,
    storage: StorageOption = None,
) -> None:
    """Give up what an agent is owed on a channel up to now; it is told which messages it will not get.

    Examples:
      tidings pipeline cancel-debt bob general
      tidings pipeline cancel-debt bob general --why "bob was rebuilt" --yes
    """
    from tidings.delivery.status import look
    from tidings.model.deferred import DebtEvent

    paths = _tables(ctx, checkpoint, lake, storage)
    from tidings.delivery.ledger import append_events, open_debts

    known, names = open_debts(paths.debts, paths.storage), _names(ctx)
    debt = _the_debt(known, names, owner, channel)
    through = look(ctx.home).floor
    if through <= debt.after:
        raise UsageError(f"nothing of {channel} waits for {owner}: its debt is as good as paid")
    told = f"{debt.after + 1}..{through} of {channel} will not be delivered"
    cause = why or f"cancelled by {_operator()}"
    output.say(f"{names.get(debt.owner, debt.owner)} will be told with its next frame: {told} ({cause})")
    output.confirm(yes, "Cancel it?")
    order = max(time.time_ns(), known.newest + 1)
    event = DebtEvent(order, "cancel", debt.owner, debt.channel, through, cause)
    append_events(paths.debts, [event], writer="operator", storage=paths.storage)
    if ctx.as_json:
        output.data({"owner": debt.owner, "channel": channel, "first": debt.after + 1, "last": through, "cause": cause})
    output.hint("tidings pipeline debts")


def _operator() -> str:
    try:
        return f"the operator ({getpass.getuser()})"
    except (KeyError, OSError):
        return "the operator"


def _the_debt(known: Debts, names: dict[str, str], owner: str, channel: str) -> Debt:
    for (held_by, of), debt in known.open.items():
        if of == channel and owner in (held_by, names.get(held_by)):
            return debt
    raise UsageError(f"{owner} has no debt on {channel}: `tidings pipeline debts` lists them")


@app.command("quarantine")
def quarantine(
    ctx: SpaceContext, count: CountOption = 50, lake: LakeOption = None, storage: StorageOption = None
) -> None:
    """List records of the log that are not valid messages, and why: nobody is shown them. Newest first.

    Examples:
      tidings pipeline quarantine
      tidings pipeline quarantine -n 10 --json
    """
    paths = _tables(ctx, None, lake, storage)
    from tidings.delivery.ledger import quarantined

    rows = quarantined(paths.quarantine, count, paths.storage)
    ctx.end_if_json(rows)
    output.table(
        ("seq", "reason", "detail", "subject", "age"),
        [(r["seq"], r["reason"], r["detail"], r["subject"], output.age(r["at"])) for r in rows],
        empty=f"nothing in space {ctx.home.name} was quarantined",
    )
    output.hint("tidings pipeline status")
