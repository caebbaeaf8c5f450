"""A link for people: which one is meant, how it is, what it tells, what differs.

What was agreed is on disk. How it is says the worker, on its socket; while none runs a command looks into the ledger
itself, and changes it itself. Nothing here writes a ledger that a worker has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from typer import Argument

from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.cli import completion, output
from tidings.cli.context import Context
from tidings.errors import StoreBusy, TidingsError, UsageError, WorkerUnreachable

#: differences that are named
MOST_SHOWN = 20
Facts = Mapping[str, Any]
#: seconds in which a worker that is starting takes up what is asked, and in which one answers how it is
STARTING, ANSWERS = 5.0, 3.0
#: seconds for an answer of a worker that runs, but for what takes as long as it takes
PATIENCE, LONG = 15.0, ("verify", "rebuild")
NOBODY = "no worker of links runs: `tidings up` starts one, or `tidings link run`"

LinkArgument = Annotated[
    str,
    Argument(help="Local name of the linked space, or the link.", metavar="NAME", autocompletion=completion.links),
]


def links_of(ctx: Context) -> list[AgreedLink]:
    return LinkLedger.below(ctx.home, ctx.home.read_info().id).rows()


def meant(ctx: Context, text: str) -> AgreedLink:
    """By what its space is called here, by its id, or by the beginning of either id."""
    known = links_of(ctx)
    current = [row for row in known if row.state != "off"]
    found = [row for row in current if text in (row.terms.get("space"), row.link)]
    found = found or [row for row in known if text == row.link]
    if not found and len(text) >= 4:
        found = [row for row in current if row.link.startswith(text) or row.origin.startswith(text)]
    if len(found) != 1:
        many = f"{len(found)} links are" if found else "no link is"
        raise UsageError(f"{many} meant by {text!r} in space {ctx.home.name}: `tidings link list --all` shows them")
    return found[0]


def name_of(row: AgreedLink) -> str:
    return str(row.terms.get("space") or row.link)


async def _ask(ctx: Context, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    """The answer, and whether a worker gave it. One that is just starting has the ledger and does not listen yet."""
    from tidings.links.local_socket import ask
    from tidings.links.operations import alone

    deadline = time.monotonic() + STARTING
    socket, within = ctx.home.link_socket, None if do in LONG else PATIENCE
    while True:
        try:
            if within is None:  # does it answer at all?
                await ask(socket, "status", within=PATIENCE)
            return await ask(socket, do, within=within, **arguments), True
        except WorkerUnreachable as unanswered:
            try:
                async with alone(ctx.home) as operations:
                    return await operations.do(do, **arguments), False
            except StoreBusy:
                if time.monotonic() >= deadline:
                    raise unanswered from None
        await asyncio.sleep(0.1)


def asked(ctx: Context, do: str, **arguments: Any) -> tuple[dict[str, Any], bool]:
    return asyncio.run(_ask(ctx, do, **arguments))


def summarise_links(ctx: Context, supervised: bool) -> dict[str, Any]:
    """For `tidings status`: links in one line, and what is wrong with them. Whatever that is, the rest is shown too."""
    from tidings.links.local_socket import ask

    try:
        known = links_of(ctx)
    except TidingsError as error:
        unknown: dict[str, Any] = {"count": None, "taking": None, "supervised": {}, "said": "unknown", "links": []}
        return unknown | {"problems": [str(error)]}
    wanted = [row for row in known if row.state in ("on", "setting")]
    taking = [row for row in wanted if row.takes(time.time())]
    wrong = [*_ended_unasked(known), *_unreachable(ctx, taking)]
    told = ctx.home.read_state().get("links") or {}
    facts: dict[str, Any] = {"count": len(wanted), "taking": len(taking), "supervised": told, "said": "", "links": []}
    if not wanted:
        return facts | {"problems": wrong}
    try:
        found = asyncio.run(ask(ctx.home.link_socket, "status", within=ANSWERS))["links"]
        shown = [each for each in found if each["state"] in ("on", "setting")]
        facts["links"] = [{"space": each["space"], "state": state(each)} for each in shown]
        said = ", ".join(map(_summary, shown))
        ended = [each["space"] for each in facts["links"] if each["state"] == "ended there"]
        wrong += map(ended_there_words, ended)
        return facts | {"runs": True, "said": said, "problems": wrong}
    except TidingsError as error:
        runs = not isinstance(error, WorkerUnreachable)
        facts["runs"] = runs
        if not taking:
            return facts | {"said": f"{len(wanted)} agreed, nothing comes in over them", "problems": wrong}
        facts["said"] = f"{len(wanted)} agreed, not carried: nothing comes in over {len(taking)} of them"
        why = error if runs else told.get("why") or error
        shared = "1 linked space shares" if len(taking) == 1 else f"{len(taking)} linked spaces share"
        problem = f"what {shared} is not carried: {why}; `tidings logs links` says more"
        return facts | {"problems": [*wrong, problem] if runs or (supervised and told) else wrong}


def _summary(link: dict[str, Any]) -> str:
    live, differs = link["live"] or {}, differing(link)
    if live.get("share") and live["spent"] >= live["share"]:
        return f"{link['space']} {state(link)} (let in within a day: {share(link)})"
    return f"{link['space']} {state(link)}" + (f" (differs: {differs})" if differs else "")


def _ended_unasked(known: list[AgreedLink]) -> list[str]:
    """Links that were ended for them, until their owner has seen it, or agreed on another one with that space."""
    on = {row.origin for row in known if row.state in ("on", "setting")}
    return [
        f"the link with {name_of(row)} was ended: {row.why}; invite again, or `tidings link remove {row.link}` once "
        "you have seen to it"
        for row in known
        if row.why and row.state in ("ending", "off") and row.origin not in on
    ]


def _unreachable(ctx: Context, taking: list[AgreedLink]) -> list[str]:
    """Links that take something in, and of which it is not known here where their space is."""
    from tidings.admin.link_peers import LinkPeers

    peers = LinkPeers.below(ctx.home)
    return [
        f"nothing comes from {name_of(row)}: {unreached_words(name_of(row))}"
        for row in taking
        if row.state == "on" and not peers.creds(row.link).exists()
    ]


# --- how it is ---


def state(link: Facts) -> str:
    """In one word or two, for a table."""
    live, ledger = link["live"], link["ledger"]
    if link["state"] in ("off", "ending"):
        return "ended"
    if not link["takes"]:
        return "over" if link["until"] is not None and link["until"] <= time.time() else "shares only"
    if live is not None:
        return "ended there" if live.get("ended_there") else str(live["status"])
    if ledger and ledger["paused"] is not None:
        return "paused"
    return "waiting" if link["reached"] is None else "not carried"


def share(link: Facts) -> str | None:
    """What came over it within a day, of what may."""
    live = link["live"] or {}
    if not live.get("share"):
        return None
    return f"{output.size(live['spent'])} of {output.size(live['share'])}" + (
        ": more comes as time passes" if live["spent"] >= live["share"] else ""
    )


def differing(link: Facts) -> str | None:
    """That what the spaces have is not the same, and stays so."""
    count = (link["live"] or {}).get("differing")
    if not count:
        return None
    return f"{count:,} records, not fetched: `tidings link verify {link['space'] or link['link']}` names them"


def unreached_words(name: str) -> str:
    """What helps a link whose other space is not known how to be reached."""
    return (
        "how it is reached is not known here, because its agreement was interrupted or an older copy of this space was "
        f"put back. Accept the line again if you have just begun; else `tidings link renew {name}`, here or there, and "
        "accept the line that it prints on the other side"
    )


def ended_there_words(name: str) -> str:
    """What is to be done about a link that the other operator ended."""
    return (
        f"{name} ended the link: nothing comes from there any more, and nothing goes there. `tidings link remove "
        f"{name}` ends it here too; what came stays. To link the two again, ask its operator for a new line after that"
    )


def _addressless_words(name: str) -> str:
    """What helps a link whose other space did not say where it is."""
    return (
        f"{name} gave no address when the link was made, so nothing is fetched from there, and who is there is not "
        f"known. Its operator lets it listen (`tidings up --listen ADDR`); then `tidings link renew {name}` here, and "
        "that line is accepted there, with `--url` if it is found elsewhere"
    )


def mapping(channels: Facts, none: str = "-") -> str:
    return ", ".join(theirs if theirs == ours else f"{theirs} as {ours}" for theirs, ours in channels.items()) or none


def lag(link: Facts) -> str:
    live = link["live"]
    if live is None:
        return "-"
    if not live["lag_records"]:
        return "nothing" if live["head"] else "-"
    seconds = f", {output.age(0.0, live['lag_seconds'])}" if live["lag_seconds"] else ""
    return f"{live['lag_records']:,} records{seconds}"


def push_lag(link: Facts) -> str:
    """How far the other space is behind what is shared with it."""
    push = link.get("push")
    if push is None:
        return "-"
    if not push["lag_records"]:
        return "nothing"
    return f"{push['lag_records']:,} records, {output.age(0.0, push['lag_seconds'])}"


def rows(link: Facts, now: float) -> Iterator[tuple[str, object]]:
    """Everything of one, for a table of two columns."""
    live, ledger = link["live"] or {}, link["ledger"] or {}
    yield "link", link["link"]
    yield "space", f"{link['space'] or '-'}, {link['origin']}"
    yield "state", state(link)
    yield "until", output.moment(link["until"]) if link["until"] else None
    yield "takes in", mapping(link["channels"])
    for origin, channels in link["beyond"].items():
        yield f"from {link['behind'].get(origin) or origin[:12]} through it", mapping(channels)
    for origin, channel, count in ledger.get("not_taken", []):
        yield (
            "passed on, not taken",
            f"{count:,} records of {channel} of {origin[:12]}: --beyond {origin[:12]}:{channel}",
        )
    offered = link.get("offered")  # what they share now, which may be more or less than is taken
    yield "they share", None if offered is None else ", ".join(offered) or "nothing"
    yield "shares", link["shares"]
    others = f"what came over other links too, up to {link['hops']} links in all"
    yield "passes on", "only what was said here" if link["hops"] == 1 else others
    yield "reached at", link["reached"]
    yield "connection", live.get("connectivity")
    yield "behind", lag(link)
    yield "handled through", _through(live, ledger)
    yield "they are behind", push_lag(link) if link.get("push") else None
    yield "they handled through", _their_place(link.get("push"), now)
    yield "last record taken", output.age(ledger["handled_at"], now) + " ago" if ledger.get("handled_at") else None
    yield "paused", ledger.get("paused")
    yield "records", counted(ledger.get("counts", {})) if ledger else None
    yield "in quarantine", ledger.get("quarantined")
    for words in ledger.get("unlisted", []):
        yield "waits for a channel", words
    yield "to be fetched again", ledger.get("owed")
    yield "differs", differing(link)
    yield "let in within a day", share(link)
    for each in ledger.get("omitted", []):
        named = each["first"] if each["first"] == each["last"] else f"{each['first']} to {each['last']}"
        yield "left out", f"{named}: {_REASONS.get(each['reason'], each['reason'])}"
    yield from _people(link)
    yield "why", _why(link, live)


def _their_place(push: Facts | None, now: float) -> str | None:
    if push is None:
        return None
    asked = (
        f"asked {output.age(push['asked_at'], now)} ago" if push["asked_at"] else "not asked since the steward started"
    )
    return f"{push['handled']:,} of our log; {asked}"


_REASONS = {
    "not_shared": "not of a space and channel that is taken",
    "echo": "said here, and came back",
    "vanished": "the other log lost it",
    "hops": "came over too many links",
    "too_old": "removed there before it was fetched",
}


def _why(link: Facts, live: Facts) -> str | None:
    if link["state"] == "setting":
        return (
            "what was said of it last is not in force yet, because the steward did not answer: repeat `tidings link "
            "set`, or `tidings up`"
        )
    if state(link) == "waiting":
        name = link["space"] or link["link"]
        return _addressless_words(name) if link["credential"] else unreached_words(name)
    if state(link) == "ended there":
        return (
            f"{ended_there_words(link['space'] or link['link'])}. If its operator did not end it, as after an older "
            f"copy of this space was put back: `tidings link renew` there, and accept the line here ({live['words']})"
        )
    return str(link["words"] or live.get("words") or link["why"]) or None


def _people(link: Facts) -> Iterator[tuple[str, object]]:
    """Who is known at its other end, whom their space gives another key, and mail."""
    found = link.get("people")
    yield "direct messages", link["direct"] if link["roster"] == "on" else "off"
    yield "tasks", link["tasks"] if link["roster"] == "on" else "off"
    if found is None:
        yield "roster", "off"
        return
    yield "roster", f"{found['known']:,} agents are known"
    for name, key in found["changed"]:
        yield "another key", f"{name} is {key} there now, and did not say so before: `link people --trust {name}`"
    for key in found["taken"]:
        yield "not theirs", f"{key} is an agent of this space, or of another linked one"
    mail = found["mail"]
    if mail is not None:
        forged = f", {mail['forged']:,} that nobody signed" if mail["forged"] else ""
        yield "mail from there", f"{mail['came']:,} let in, {mail['refused']:,} refused{forged}"
        if mail.get("waits"):
            yield "mail that waits", mail["waits"]
    tasks = found.get("tasks")
    if tasks is not None:
        forged = f", {tasks['forged']:,} that nobody signed" if tasks["forged"] else ""
        yield (
            "tasks from there",
            f"{tasks['open']:,} open here, {tasks['ended']:,} ended, {tasks['refused']:,} refused{forged}",
        )
        if tasks.get("waits"):
            yield "tasks that wait", tasks["waits"]
    yield "who, mail and tasks", found["words"]


def _through(live: Facts, ledger: Facts) -> str | None:
    handled = (live.get("handled") or {}).get("seq", ledger.get("handled"))
    if handled is None:
        return None
    return f"{handled:,} of {live['head']:,}" if live.get("head") else f"{handled:,}"


_KINDS = {
    "admitted": "let in",
    "duplicate": "here already",
    "omitted": "left out",
    "quarantined": "in quarantine",
    "obligation": "to be fetched again",
}


def counted(counts: Facts) -> str:
    return ", ".join(f"{count:,} {_KINDS.get(kind, kind)}" for kind, count in counts.items()) or "none yet"


# --- what it tells ---


def event(said: Facts) -> str:
    """One line of `link show --follow`."""
    words = _EVENTS.get(said["event"])
    return f"{output.moment(said.get('at'))}  {words(said) if words is not None else said['event']}"


def _status(said: Facts) -> str:
    push = said.get("push")
    theirs = f"; they are {push['lag_records']:,} records behind" if push and push["lag_records"] else ""
    if "status" not in said:
        return f"shares only{theirs}"
    behind = f", {said['lag_records']:,} records behind" if said["lag_records"] else ""
    if said.get("ended_there"):
        return f"ended there: {said['words']}"
    return f"{said['status']}, {said['connectivity']}{behind}{theirs}" + (f": {said['words']}" if said["words"] else "")


def _left(said: Facts) -> str:
    return f"; {said['lag_records']:,} records are before them" if said["lag_records"] else ""


def _advanced(said: Facts) -> str:
    handled, head = said["handled"]["seq"], said["head"]
    share = f" ({handled / head:.0%})" if head else ""
    others = {name: said[name] for name in ("duplicates", "omitted", "quarantined") if said[name]}
    more = "".join(f", {count:,} {_OTHERS[name]}" for name, count in others.items())
    return f"{handled:,} of {head:,}{share}: {said['admitted']:,} let in{more}"


_OTHERS = {"duplicates": "here already", "omitted": "left out", "quarantined": "in quarantine"}


def _gap(said: Facts) -> str:
    before, after = said["before"]["seq"], said["now"]["seq"]
    words = f"a gap ({said['kind']}): the other log cannot go on from {before:,}, and goes on from {after:,}"
    return words + (f"; {said['reread']:,} records are read again" if said["reread"] else "")


def _repaired(said: Facts) -> str:
    if not said["lacking"] and not said["extra"]:
        return f"compared up to {said['through']['seq']:,}: equal"
    then = "as before" if said["unchanged"] else f"{said['fetching']:,} are fetched"
    return (
        f"compared up to {said['through']['seq']:,}: {said['lacking']:,} are there and not here, {said['extra']:,} the "
        f"other way; {then}"
    )


_EVENTS: dict[str, Callable[[Facts], str]] = {
    "status": _status,
    "status_changed": lambda e: f"{e['before']} -> {e['now']}" + (f": {e['words']}" if e["words"] else ""),
    "connectivity_changed": lambda e: f"connection {e['before']} -> {e['now']}",
    "pull_advanced": _advanced,
    "push_advanced": lambda e: f"they handled our log up to {e['handled']:,}" + _left(e),
    "gap_detected": _gap,
    "local_log_set_back": lambda e: f"the log here was set back: {e['lost']:,} messages are fetched again",
    "repair_started": lambda e: f"comparing up to {e['through']['seq']:,}",
    "repair_completed": _repaired,
    "repair_failed": lambda e: f"comparing failed: {e['words']}",
    "degraded_poll_entered": lambda e: f"asked now and then only: {e['words']}",
    "not_carried": lambda e: "it is carried no longer" + (f": {e['words']}" if e["words"] else ""),
}


# --- what differs ---


def verified(name: str, answer: Facts) -> Iterator[str]:
    total = sum(answer["counts"].values())
    if answer["lost"]:
        places = ", ".join(str(seq) for seq, *_ in answer["lost_named"][:MOST_SHOWN])
        more = ", …" if answer["lost"] > MOST_SHOWN else ""
        yield (
            f"the log of this space lost {answer['lost']:,} messages that had come over this link, at {places}{more}: "
            "they are fetched again, as far as the other space still has them; `tidings doctor store` looks at the rest"
        )
    if (rest := answer["head"] - answer["through"]) > 0:
        yield f"{rest:,} records of the other log, of any kind, are not handled yet, and were not compared"
    if answer["equal"]:
        yield f"equal: every record that {name} shares up to {answer['through']:,} is accounted for here"
        yield f"{_records(total)}: {counted(answer['counts'])}"
        yield from _not_compared(name, answer)
        return
    least = "at least " if answer["more"] else ""
    yield (
        f"not equal: {least}{answer['lacking']:,} records of {name} are not here, {answer['extra']:,} are here and not "
        f"there any more (up to {answer['through']:,})" + ("; it was not looked further" if answer["more"] else "")
    )
    for each in answer["differences"][:MOST_SHOWN]:
        for side, words in (("lacking", "not here"), ("extra", "not there")):
            if count := each[f"{side}_count"]:
                seqs = ", ".join(str(seq) for seq, *_ in each[side][:MOST_SHOWN])
                yield f"{each['channel']} on {each['day']}: {count:,} {words}: {seqs}" + (", …" if count > 20 else "")
    yield from _not_compared(name, answer)


def _not_compared(name: str, answer: Facts) -> Iterator[str]:
    """What is outside of what is shared and taken now."""
    for origin, channel, count in answer.get("not_shared", ()):
        whose = f"{channel}, which {name} does not share any more"
        if origin != answer["space"]:
            whose = f"{channel} of {origin[:12]}, which {name} does not pass on any more"
        yield f"not compared: {_records(count)} of {whose}; what came stays"
    if count := answer.get("not_passed_on"):
        yield f"not compared: {_records(count)} of other spaces, which {name} does not pass on any more"
    for origin, channel, count in answer.get("not_taken", ()):
        whose = channel if origin == answer["space"] else f"{channel} of {origin[:12]}"
        yield f"left out: {_records(count)} of {whose}, which {name} shares and this space does not take"


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
