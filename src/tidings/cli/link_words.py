"""A link for people: which one is meant, how it is, what it tells, what differs.

What was agreed is on disk. How it is says the worker, on its socket; while none runs a command looks into the ledger
itself, and changes it itself. Nothing here writes a ledger that a worker has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from typer import Argument

from tidings.admin.link_registry import AgreedLink, LinkLedger
from tidings.cli import completion, output
from tidings.cli.context import Context
from tidings.contract import link_worker
from tidings.contract.core import Request
from tidings.contract.link_worker import LinkReport, ListLinksRequest, VerifyAnswer
from tidings.contract.links import PeerProgress
from tidings.errors import StoreBusy, TidingsError, UsageError, WorkerUnreachable

#: differences that are named
MOST_SHOWN = 20
A = TypeVar("A")
#: seconds in which a worker that is starting takes up what is asked, and in which one answers how it is
STARTING, ANSWERS = 5.0, 3.0
NOBODY = "no link worker runs: `tidings up` starts one, or `tidings link run`"

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


async def _call(ctx: Context, request: Request[A]) -> tuple[A, bool]:
    """Returns the answer, and whether a link worker gave it. One that is just starting holds the link store and does
    not listen yet."""
    from tidings.links.operations import alone
    from tidings.rpc.local_socket import call

    deadline, socket = time.monotonic() + STARTING, ctx.home.link_socket
    while True:
        try:
            if math.isinf(request.operation.waits):  # does it answer at all?
                await call(socket, ListLinksRequest())
            return await call(socket, request), True
        except WorkerUnreachable as unanswered:
            try:
                async with alone(ctx.home) as operations:
                    return await operations.call(request), False
            except StoreBusy:
                if time.monotonic() >= deadline:
                    raise unanswered from None
        await asyncio.sleep(0.1)


def call_worker(ctx: Context, request: Request[A]) -> tuple[A, bool]:
    """Returns the answer to an operation on links, and whether a link worker gave it."""
    return asyncio.run(_call(ctx, request))


def as_json(link: LinkReport) -> dict[str, Any]:
    """Returns a link as commands print it with --json."""
    fields: dict[str, Any] = msgspec.to_builtins(link)
    return fields | {"shown": state(link)}


def summarise_links(ctx: Context, supervised: bool) -> dict[str, Any]:
    """For `tidings status`: links in one line, and what is wrong with them. Whatever that is, the rest is shown too."""
    from tidings.rpc.local_socket import call

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
        found = asyncio.run(call(ctx.home.link_socket, ListLinksRequest(), timeout=ANSWERS)).links
        shown = [each for each in found if each.state in ("on", "setting")]
        facts["links"] = [{"space": each.space, "state": state(each)} for each in shown]
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


def _summary(link: LinkReport) -> str:
    if link.live is not None and 0 < link.live.share <= link.live.spent:
        return f"{link.space} {state(link)} (let in within a day: {share(link)})"
    differs = differing(link)
    return f"{link.space} {state(link)}" + (f" (differs: {differs})" if differs else "")


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


def state(link: LinkReport) -> str:
    """In one word or two, for a table."""
    if link.state in ("off", "ending"):
        return "ended"
    if not link.imports:
        return "over" if link.until is not None and link.until <= time.time() else "shares only"
    if link.live is not None:
        return "ended there" if link.live.ended_there else link.live.status
    if link.store is not None and link.store.paused is not None:
        return "paused"
    return "waiting" if link.address is None else "not carried"


def share(link: LinkReport) -> str | None:
    """What came over it within a day, of what may."""
    live = link.live
    if live is None or not live.share:
        return None
    return f"{output.size(live.spent)} of {output.size(live.share)}" + (
        ": more comes as time passes" if live.spent >= live.share else ""
    )


def differing(link: LinkReport) -> str | None:
    """That what the spaces have is not the same, and stays so."""
    if link.live is None or not link.live.differing:
        return None
    return f"{link.live.differing:,} records, not fetched: `tidings link verify {link.space or link.link}` names them"


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


def mapping(channels: Mapping[str, str], none: str = "-") -> str:
    return ", ".join(theirs if theirs == ours else f"{theirs} as {ours}" for theirs, ours in channels.items()) or none


def lag(link: LinkReport) -> str:
    live = link.live
    if live is None:
        return "-"
    if not live.lag_records:
        return "nothing" if live.head else "-"
    seconds = f", {output.age(0.0, live.lag_seconds)}" if live.lag_seconds else ""
    return f"{live.lag_records:,} records{seconds}"


def push_lag(link: LinkReport, now: float) -> str:
    """How far the other space is behind what is shared with it."""
    if link.push is None:
        return "-"
    if not link.push.lag_records:
        return "nothing"
    return f"{link.push.lag_records:,} records, {output.age(0.0, link.push.lag_seconds(now))}"


def rows(link: LinkReport, now: float) -> Iterator[tuple[str, object]]:
    """Everything of one, for a table of two columns."""
    store = link.store
    yield "link", link.link
    yield "space", f"{link.space or '-'}, {link.origin}"
    yield "state", state(link)
    yield "until", output.moment(link.until) if link.until else None
    yield "takes in", mapping(link.channels)
    for origin, channels in link.beyond.items():
        yield f"from {link.beyond_names.get(origin) or origin[:12]} through it", mapping(channels)
    for origin, channel, count in store.not_taken if store is not None else ():
        yield (
            "passed on, not taken",
            f"{count:,} records of {channel} of {origin[:12]}: --beyond {origin[:12]}:{channel}",
        )
    offered = link.peer_shares  # may be more or less than is taken
    yield "they share", None if offered is None else ", ".join(offered) or "nothing"
    yield "shares", link.shares
    others = f"what came over other links too, up to {link.hops} links in all"
    yield "passes on", "only what was said here" if link.hops == 1 else others
    yield "reached at", link.address
    yield "connection", link.live.connectivity if link.live is not None else None
    yield "behind", lag(link)
    yield "handled through", _through(link)
    if link.push is not None:
        yield "they are behind", push_lag(link, now)
        yield "they handled through", _their_place(link.push, now)
    if store is not None:
        yield "last record taken", output.age(store.handled_at, now) + " ago" if store.handled_at else None
        yield "paused", store.paused
        yield "records", counted(store.counts)
        yield "in quarantine", store.quarantined
        for words in store.unlisted:
            yield "waits for a channel", words
        yield "to be fetched again", store.owed
    yield "differs", differing(link)
    yield "let in within a day", share(link)
    for first, last, reason in store.omitted if store is not None else ():
        yield "left out", f"{first if first == last else f'{first} to {last}'}: {_REASONS.get(reason, reason)}"
    yield from _directory(link)
    yield "why", _why(link)


def _their_place(push: PeerProgress, now: float) -> str:
    asked = f"asked {output.age(push.asked_at, now)} ago" if push.asked_at else "not asked since the steward started"
    return f"{push.handled:,} of our log; {asked}"


_REASONS = {
    "not_shared": "not of a space and channel that is taken",
    "echo": "said here, and came back",
    "vanished": "the other log lost it",
    "hops": "came over too many links",
    "too_old": "removed there before it was fetched",
}


def _why(link: LinkReport) -> str | None:
    name, words = link.space or link.link, link.live.words if link.live is not None else ""
    if link.state == "setting":
        return (
            "what was said of it last is not in force yet, because the steward did not answer: repeat `tidings link "
            "set`, or `tidings up`"
        )
    if state(link) == "waiting":
        return _addressless_words(name) if link.credential else unreached_words(name)
    if state(link) == "ended there":
        return (
            f"{ended_there_words(name)}. If its operator did not end it, as after an older copy of this space was put "
            f"back: `tidings link renew` there, and accept the line here ({words})"
        )
    return link.words or words or link.why or None


def _directory(link: LinkReport) -> Iterator[tuple[str, object]]:
    """Who is known at its other end, whom their space gives another key, mail and tasks."""
    yield "direct messages", link.direct if link.roster == "on" else "off"
    yield "tasks", link.tasks if link.roster == "on" else "off"
    found = link.directory
    if found is None:
        yield "roster", "off"
        return
    yield "roster", f"{found.known:,} agents are known"
    for name, key in found.changed:
        yield "another key", f"{name} is {key} there now, and did not say so before: `link people --trust {name}`"
    for key in found.taken:
        yield "not theirs", f"{key} is an agent of this space, or of another linked one"
    if (mail := found.mail) is not None:
        yield "mail from there", f"{mail.came:,} let in, {mail.refused:,} refused{_forged(mail.forged)}"
        if mail.waits:
            yield "mail that waits", mail.waits
    if (tasks := found.tasks) is not None:
        counts = f"{tasks.open:,} open here, {tasks.ended:,} ended, {tasks.refused:,} refused"
        yield "tasks from there", counts + _forged(tasks.forged)
        if tasks.waits:
            yield "tasks that wait", tasks.waits
    yield "who, mail and tasks", found.words


def _forged(count: int) -> str:
    return f", {count:,} that nobody signed" if count else ""


def _through(link: LinkReport) -> str | None:
    handled = link.store.handled if link.store is not None else None
    head = 0
    if link.live is not None:
        head = link.live.head
        handled = link.live.handled.seq if link.live.handled is not None else handled
    if handled is None:
        return None
    return f"{handled:,} of {head:,}" if head else f"{handled:,}"


_KINDS = {
    "admitted": "let in",
    "duplicate": "here already",
    "omitted": "left out",
    "quarantined": "in quarantine",
    "obligation": "to be fetched again",
}


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {_KINDS.get(kind, kind)}" for kind, count in counts.items()) or "none yet"


# --- its events ---


def event(each: link_worker.FollowedEvent) -> str:
    """One line of `link show --follow`."""
    return f"{output.moment(each.at)}  {_event(each)}"


def _event(each: link_worker.FollowedEvent) -> str:
    match each:
        case link_worker.LinkReported():
            return _reported(each)
        case link_worker.LinkNotRunning():
            return _with_reason("it is carried no longer", each.words)
        case link_worker.StatusChanged():
            return _with_reason(f"{each.before} -> {each.now}", each.words)
        case link_worker.ConnectivityChanged():
            return f"connection {each.before} -> {each.now}"
        case link_worker.PullAdvanced():
            return _advanced(each)
        case link_worker.PushAdvanced():
            left = f"; {each.lag_records:,} records are before them" if each.lag_records else ""
            return f"they handled our log up to {each.handled:,}{left}"
        case link_worker.GapDetected():
            before, after = each.before.seq, each.now.seq
            words = f"a gap ({each.kind}): the other log cannot go on from {before:,}, and goes on from {after:,}"
            return words + (f"; {each.reread:,} records are read again" if each.reread else "")
        case link_worker.LocalLogSetBack():
            return f"the log here was set back: {each.lost:,} messages are fetched again"
        case link_worker.RepairStarted():
            return f"comparing up to {each.through.seq:,}"
        case link_worker.RepairCompleted():
            return _repaired(each)
        case link_worker.RepairFailed():
            return f"comparing failed: {each.words}"
        case link_worker.DegradedPollEntered():
            return f"asked now and then only: {each.words}"


def _with_reason(text: str, words: str) -> str:
    return f"{text}: {words}" if words else text


def _reported(each: link_worker.LinkReported) -> str:
    live, push = each.live, each.push
    theirs = f"; they are {push.lag_records:,} records behind" if push is not None and push.lag_records else ""
    if live is None:
        return f"shares only{theirs}"
    if live.ended_there:
        return f"ended there: {live.words}"
    behind = f", {live.lag_records:,} records behind" if live.lag_records else ""
    return _with_reason(f"{live.status}, {live.connectivity}{behind}{theirs}", live.words)


def _advanced(each: link_worker.PullAdvanced) -> str:
    handled, head = each.handled.seq, each.head
    part = f" ({handled / head:.0%})" if head else ""
    others = ((each.duplicates, "here already"), (each.omitted, "left out"), (each.quarantined, "in quarantine"))
    more = "".join(f", {count:,} {words}" for count, words in others if count)
    return f"{handled:,} of {head:,}{part}: {each.admitted:,} let in{more}"


def _repaired(each: link_worker.RepairCompleted) -> str:
    if not each.lacking and not each.extra:
        return f"compared up to {each.through.seq:,}: equal"
    then = "as before" if each.unchanged else f"{each.fetching:,} are fetched"
    return (
        f"compared up to {each.through.seq:,}: {each.lacking:,} are there and not here, {each.extra:,} the other way; "
        f"{then}"
    )


# --- what differs ---


def verified(name: str, answer: VerifyAnswer) -> Iterator[str]:
    if answer.lost:
        places = ", ".join(str(each.seq) for each in answer.lost_records[:MOST_SHOWN])
        more = ", …" if answer.lost > MOST_SHOWN else ""
        yield (
            f"the log of this space lost {answer.lost:,} messages that had come over this link, at {places}{more}: "
            "they are fetched again, as far as the other space still has them; `tidings doctor store` looks at the rest"
        )
    if (rest := answer.head - answer.through) > 0:
        yield f"{rest:,} records of the other log, of any kind, are not handled yet, and were not compared"
    if answer.equal:
        yield f"equal: every record that {name} shares up to {answer.through:,} is accounted for here"
        yield f"{_records(sum(answer.counts.values()))}: {counted(answer.counts)}"
        yield from _not_compared(name, answer)
        return
    least = "at least " if answer.more else ""
    yield (
        f"not equal: {least}{answer.lacking:,} records of {name} are not here, {answer.extra:,} are here and not "
        f"there any more (up to {answer.through:,})" + ("; it was not looked further" if answer.more else "")
    )
    for day in answer.differences[:MOST_SHOWN]:
        sides = (day.lacking, day.lacking_count, "not here"), (day.extra, day.extra_count, "not there")
        for records, count, words in sides:
            if count:
                seqs = ", ".join(str(each.seq) for each in records[:MOST_SHOWN])
                yield f"{day.channel} on {day.day}: {count:,} {words}: {seqs}" + (", …" if count > MOST_SHOWN else "")
    yield from _not_compared(name, answer)


def _not_compared(name: str, answer: VerifyAnswer) -> Iterator[str]:
    """What is outside of what is shared and taken now."""
    for origin, channel, count in answer.not_shared:
        whose = f"{channel}, which {name} does not share any more"
        if origin != answer.space:
            whose = f"{channel} of {origin[:12]}, which {name} does not pass on any more"
        yield f"not compared: {_records(count)} of {whose}; what came stays"
    if count := answer.not_passed_on:
        yield f"not compared: {_records(count)} of other spaces, which {name} does not pass on any more"
    for origin, channel, count in answer.not_taken:
        whose = channel if origin == answer.space else f"{channel} of {origin[:12]}"
        yield f"left out: {_records(count)} of {whose}, which {name} shares and this space does not take"


def _records(count: int) -> str:
    return f"{count:,} record{'' if count == 1 else 's'}"
