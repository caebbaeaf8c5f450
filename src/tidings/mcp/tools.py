"""The tools, one method each: their signatures are their schemas, their docstrings what a model reads.

A tool asks the desk and turns its answer into a model and words. None of them catches errors: `server.py` makes
sentences of those in one place. Whoever sends without an `id` gets one here, so that a repeat after a lost answer is
possible and harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

from mcp_types import CallToolResult, ToolAnnotations
from pydantic import Field

from tidings import errors
from tidings.errors import (
    AuthRevoked,
    ConflictError,
    OutcomeUnknown,
    TidingsError,
    UnknownMessage,
    UnreachableError,
    UsageError,
)
from tidings.mcp import answers, words
from tidings.mcp.advice import advice
from tidings.mcp.answers import in_words, message_of, result
from tidings.mcp.desk import Desk, Facts, off_loop
from tidings.mcp.ids import Ids, short, short_in
from tidings.mcp.presenting import neutral, neutral_data, on_a_line, quoted, shortened
from tidings.mcp.updates import News
from tidings.mcp.window import Receipts, fitting
from tidings.wire.ids import new_id

#: clients give up a call after a minute
LONGEST_WAIT = 45.0
COUNTED = 200
#: the host gives back what a session claimed that says nothing for a quarter of an hour
SIGN_OF_LIFE = 120.0
PIECE = 32_000
log = logging.getLogger(__name__)

#: a message has 256 KiB at most with all that belongs to it; one that is sealed, three quarters of that
Text = Annotated[str, Field(description="What to say.", max_length=250_000)]
Data = Annotated[Any, Field(description="Any JSON value to send with it.")]
MessageId = Annotated[
    str | None,
    Field(description="Only to repeat a call whose outcome you do not know: the id it named. It is sent once."),
]
ReplyTo = Annotated[str | None, Field(description="Id of the message this answers.")]
Context = Annotated[str | None, Field(description="A word that holds a conversation together.", max_length=256)]
Priority = Annotated[
    Literal["now", "next", "low"], Field(description="`now` wakes a reader that wants quiet, `low` nobody.")
]
Wait = Annotated[float, Field(description="Seconds to wait for it.", ge=0, le=LONGEST_WAIT)]
Confirm = Annotated[float, Field(description="Seconds to wait until the space confirms it.", ge=0, le=30)]
Channel = Annotated[str, Field(description="Such as `general` or `team.builds`.", max_length=200)]
Role = Annotated[str, Field(description="Such as `reviewer`.", max_length=64)]
TaskId = Annotated[str, Field(description="As `ask_role` or `claim_task` answered it.")]
Bytes = Annotated[int, Field(description="Bytes of text at most.", ge=1_000, le=200_000)]


class Tools:
    """The tools of one agent. `news` tells that mail arrived; `sign_of_life`: seconds, for what is claimed."""

    def __init__(self, desk: Desk, news: News | None = None, *, sign_of_life: float = SIGN_OF_LIFE) -> None:
        self.desk, self.sign_of_life = desk, sign_of_life
        self.news = news or News()
        self.receipts = Receipts()
        self.ids = Ids(desk)
        #: the requests of the tasks that were claimed and not finished
        self.held: dict[str, Facts] = {}

    # --- finding one's way ---

    async def orient(self) -> Annotated[CallToolResult, answers.Orientation]:
        """Who you are here, what waits for you and what to do next. Call this first."""
        unread = await off_loop(self.desk.unread)
        outbox = await off_loop(lambda: self.desk.outbox(COUNTED))
        roster = await off_loop(self.desk.who)
        channels, joined, access, notes = await self._of_the_space()
        holds = await off_loop(self.desk.held)
        mine = [short(str(holds["id"]))] if holds and holds["mine"] else []
        self.ids.shown([str(holds["id"])] if holds else [])
        me: Facts = next((each for each in roster["agents"] if each["id"] == self.desk.agent), {})
        roles = [on_a_line(str(role)) for role in access.get("roles") or me.get("roles", ())]
        others = [each for each in roster["agents"] if each is not me and roster["fresh"]]
        others_talk = words.to_join(channels, joined, access.get("read") or ())
        found = answers.Orientation(
            name=self.desk.name,
            id=self.desk.agent,
            space=self.desk.space,
            roles=roles,
            may_read=access.get("read"),
            may_post=access.get("post"),
            reachable=not notes,
            unread_direct=unread["direct"],
            unread_channel=unread["channel"],
            unread_notices=unread["notice"],
            joined=joined,
            not_joined=others_talk,
            here=[on_a_line(str(each["name"])) for each in others if each["status"] != "offline"],
            waiting_to_leave=sum(map(words.waits, outbox)),
            held_tasks=mine,
            next=words.next_steps(any(unread.values()), roles, mine, others_talk),
            notes=[*notes, *([words.held_elsewhere(holds)] if holds and not mine else [])],
        )
        return result(found, words.orientation(found))

    async def _of_the_space(self) -> tuple[list[Facts], list[str], Facts, list[str]]:
        """The channels, which are joined, and what may be done; or why they cannot be told."""
        try:
            channels, joined = await off_loop(self.desk.channels), await off_loop(self.desk.memberships)
            return channels, list(map(on_a_line, joined)), await off_loop(self.desk.access), []
        except UnreachableError as error:
            why = f"The space does not answer ({on_a_line(str(error))}); what you send is stored and goes out later."
        except AuthRevoked as error:
            why = f"{on_a_line(str(error))}. {advice(error)} What you were sent before can still be read."
        return [], [], {}, [why]

    async def who(
        self, limit: Annotated[int, Field(description="Agents at most.", ge=1, le=500)] = 100
    ) -> Annotated[CallToolResult, answers.Roster]:
        """The agents of this space, those who are here first: names, roles, what they say they do."""
        found = await off_loop(self.desk.who)
        agents = [words.agent(each, self.desk.agent) for each in found["agents"]]
        agents.sort(key=lambda agent: (agent.status == "offline", agent.name))
        shown, fresh = agents[:limit], bool(found.get("fresh", True))
        roster = answers.Roster(agents=shown, more=len(agents) - len(shown), fresh=fresh)
        number = words.counted(len(agents), "agent")
        lines = [f"{number} in {self.desk.space}. What they do is in their own words, not instructions:"]
        lines += [] if roster.fresh else ["(as last seen: the space could not be asked just now)"]
        lines += map(words.agent_line, shown)
        lines += [f"and {roster.more} more: call it with a higher `limit`."] if roster.more else []
        return result(roster, "\n".join(lines))

    async def channels(self) -> Annotated[CallToolResult, answers.Channels]:
        """The channels you may see, and which of them you have joined."""
        found = [words.channel(each) for each in await off_loop(self.desk.channels)]
        joined = list(map(on_a_line, await off_loop(self.desk.memberships)))
        return result(answers.Channels(channels=found, joined=joined), words.channels(found, joined))

    async def join(self, channel: Channel) -> Annotated[CallToolResult, answers.ChannelChange]:
        """Join a channel: from now on its messages arrive in your inbox. Joining again changes nothing."""
        facts = neutral_data(await off_loop(lambda: self.desk.join(channel)))
        facts = {key: value for key, value in facts.items() if value is not None and key != "channel"}
        changed = answers.ChannelChange(channel=channel, facts=facts)
        return result(changed, f"You are in {channel}.\n{answers.facts_in_words(facts)}")

    async def leave(self, channel: Channel) -> Annotated[CallToolResult, answers.ChannelChange]:
        """Leave a channel: what is said there from now on does not reach you. What was said before still does."""
        facts = neutral_data(await off_loop(lambda: self.desk.leave(channel)))
        changed = answers.ChannelChange(channel=channel, facts=facts)
        return result(changed, words.left(channel, facts))

    # --- sending ---

    async def send(
        self,
        channel: Channel,
        text: Text = "",
        data: Data = None,
        mentions: Annotated[list[str], Field(description="Agents to call, by name or id.", max_length=32)] = [],  # noqa: B006  the schema shows it, nobody changes it
        reply_to: ReplyTo = None,
        context: Context = None,
        priority: Priority = "next",
        id: MessageId = None,
        wait: Confirm = 2,
    ) -> Annotated[CallToolResult, answers.Sent]:
        """Say something in a channel, to everybody in it. Needs `text` or `data`."""
        return await self._send(
            wait,
            {
                "channel": channel,
                "mentions": await self.ids.agents(mentions),
                "reply_to": reply_to,
                "context": context,
                "id": id,
            },
            text,
            data,
            priority,
        )

    async def direct_message(
        self,
        to: Annotated[str, Field(description="Name or id of the agent.", max_length=64)],
        text: Text = "",
        data: Data = None,
        reply_to: ReplyTo = None,
        context: Context = None,
        priority: Priority = "next",
        id: MessageId = None,
        wait: Confirm = 2,
    ) -> Annotated[CallToolResult, answers.Sent]:
        """Write to one agent, sealed: nobody else can read it. It is kept until that agent reads it."""
        fields = {"agent": await self.ids.agent(to), "reply_to": reply_to, "context": context, "id": id}
        return await self._send(wait, fields, text, data, priority)

    async def ask_role(
        self,
        role: Role,
        text: Text = "",
        data: Data = None,
        deadline: Annotated[
            float | None, Field(description="Seconds from now after which nobody may finish it.", gt=0)
        ] = None,
        context: Context = None,
        id: MessageId = None,
        wait: Confirm = 2,
    ) -> Annotated[CallToolResult, answers.Sent]:
        """Ask whoever holds a role to do something: one of them does. `task_result` tells what came of it."""
        fields = {"role": role, "deadline": deadline, "context": context, "id": id}
        return await self._send(wait, fields, text, data, "next")

    async def _send(self, wait: float, fields: Facts, text: str, data: Any, priority: str) -> CallToolResult:
        named = {name: await self.ids.message_if_any(fields.get(name)) for name in ("id", "reply_to")}
        wanted = fields | named | {"text": text or None, "data": data, "id": named["id"] or new_id()}
        request = {key: value for key, value in wanted.items() if value is not None and (value != [] or key == "data")}
        if priority != "next":
            request["priority"] = priority
        try:
            patience = wait if wait and await off_loop(self.desk.reachable) else 0
            facts = await off_loop(lambda: self.desk.send(request, patience))
        except (UnreachableError, OutcomeUnknown) as error:
            raise OutcomeUnknown(
                f"the host did not say whether it stored this ({error}): repeat the call with id={request['id']}"
            ) from error
        if facts["state"] in ("dead", "cancelled"):
            await self._say_why(str(facts["id"]))
        self.ids.shown([str(facts["id"])])
        sent = answers.Sent(
            id=short(str(facts["id"])),
            stage=facts["stage"],
            state=facts["state"],
            seq=facts.get("seq"),
            warnings=[on_a_line(str(each)) for each in facts.get("warnings", ())],
        )
        return result(sent, words.sent(sent))

    async def _say_why(self, message_id: str) -> NoReturn:
        row = await off_loop(lambda: self.desk.outbox_row(message_id))
        kind = errors.ERRORS_BY_CODE.get(str(row.get("code")), TidingsError)
        raise kind(f"message {message_id} was not sent: {row.get('words') or row['state']}")

    async def outbox_status(
        self,
        id: Annotated[str | None, Field(description="One message; without it, the latest ones.")] = None,
        limit: Annotated[int, Field(description="Messages at most.", ge=1, le=100)] = 20,
    ) -> Annotated[CallToolResult, answers.OutboxView]:
        """What became of what you sent: what has reached the space, what waits, what was refused and why."""
        if id is not None:
            whole = await self.ids.message(id)
            found = [await off_loop(lambda: self.desk.outbox_row(whole))]
        else:
            found = await off_loop(lambda: self.desk.outbox(limit))
        self.ids.shown_rows(found)
        names = {str(each["id"]): str(each["name"]) for each in (await off_loop(self.desk.who))["agents"]}
        lines = [words.outbox_line(each, names) for each in found]
        waiting = sum(map(words.waits, found))
        told = [f"{words.counted(len(lines), 'message')}, {waiting} still to leave."]
        told += [
            f"{each.id} to {each.to} ({each.kind}): {each.state}" + (f", {quoted(each.reason)}" if each.reason else "")
            for each in lines
        ]
        return result(answers.OutboxView(messages=lines, waiting=waiting), "\n".join(told))

    async def trace(
        self, id: Annotated[str, Field(description="Id of a message you sent, or that was sent to you directly.")]
    ) -> Annotated[CallToolResult, answers.Trace]:
        """The life of one message: where it is stored, who got it, who read it, and when."""
        whole = await self.ids.message(id)
        facts = short_in(neutral_data(await off_loop(lambda: self.desk.trace(whole))))
        if not any(facts.get(name) for name in ("stored", "receipts", "outbox")):
            raise UnknownMessage(f"you neither sent a message {id[:64]!r} nor was it sent to you directly")
        return result(answers.Trace(id=short(whole), facts=facts), answers.facts_in_words(facts))

    # --- reading ---

    async def read_inbox(
        self,
        limit: Annotated[int, Field(description="Messages at most.", ge=1, le=100)] = 20,
        max_bytes: Bytes = 20_000,
        acknowledge: Annotated[
            str | None, Field(description="Receipt of the window before: its messages become read first.")
        ] = None,
        wait: Annotated[float, Field(description="Seconds to wait if nothing is unread.", ge=0, le=LONGEST_WAIT)] = 0,
    ) -> Annotated[CallToolResult, answers.InboxWindow]:
        """A window of your unread messages, direct ones first. They stay unread until you give back its receipt, with
        `acknowledge_inbox` or the next `read_inbox`; an answer you lost is shown again."""
        acknowledged = await self._acknowledge(acknowledge) if acknowledge else 0
        window = await self.window(limit, max_bytes, wait)
        window.acknowledged = acknowledged
        return result(window, words.window(window))

    async def window(self, limit: int, most: int, wait: float = 0) -> answers.InboxWindow:
        """Unread messages, as many as fit, with a receipt for exactly these."""
        rows = await self._unread(limit + 1, wait)
        self.ids.shown_rows(rows[:limit])
        messages = [message_of(row, most) for row in rows[:limit]]
        number = fitting([len(answers.content(each).encode()) for each in messages], most)
        return answers.InboxWindow(
            messages=messages[:number],
            receipt=self.receipts.write([int(row["row"]) for row in rows[:number]]) if number else None,
            more=len(rows) > number,
            acknowledged=0,
        )

    async def _unread(self, limit: int, wait: float) -> list[Facts]:
        until = asyncio.get_running_loop().time() + wait
        while True:
            news = self.news.next()
            rows = await off_loop(lambda: self.desk.inbox(unread=True, limit=limit))
            left = until - asyncio.get_running_loop().time()
            if rows or left <= 0:
                return rows
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await news.wait()

    async def acknowledge_inbox(
        self, receipt: Annotated[str, Field(description="Receipt of a window of `read_inbox`.")]
    ) -> Annotated[CallToolResult, answers.Acknowledged]:
        """Mark the messages of one window as read, and only those. Their senders are told. Again changes nothing."""
        number = await self._acknowledge(receipt)
        return result(answers.Acknowledged(acknowledged=number), f"{words.counted(number, 'message')} became read.")

    async def _acknowledge(self, receipt: str) -> int:
        rows = self.receipts.rows(receipt)
        return await off_loop(lambda: self.desk.mark_read(rows))

    async def read_message(
        self,
        id: Annotated[str, Field(description="Id of a message in your inbox, or of the task you hold.")],
        offset: Annotated[int, Field(description="Character to begin with.", ge=0, lt=2**62)] = 0,
    ) -> Annotated[CallToolResult, answers.WholeMessage]:
        """One message of your inbox, read or not, or the request of your task: for those of which only the beginning
        was shown."""
        whole = await self.ids.message(id)
        rows = await off_loop(lambda: self.desk.thread(whole))
        row = next((each for each in rows if each["id"] == whole), self.held.get(whole))
        if row is None:
            raise UnknownMessage(f"your inbox has no message {id[:64]!r}")
        self.ids.shown_rows([row])
        shown = message_of(row)
        content = answers.content(shown)
        text, cut = shortened(content[offset:], PIECE)
        after = offset + len(text) if cut else None
        size = len(content.encode()) if cut or offset else None
        piece = shown.model_copy(update={"text": text, "parts": [], "whole_bytes": size})
        closing = [f"There is more: call read_message with offset={after}."] if after else []
        found = answers.WholeMessage(message=piece, offset=offset, next_offset=after)
        return result(found, in_words([piece], closing=closing))

    async def thread(self, message_id: str) -> answers.Messages:
        """What fits of a conversation in the inbox, oldest first: the message that was named, and the newest others."""
        whole = await self.ids.message(message_id)
        rows = await off_loop(lambda: self.desk.thread(whole))
        if not rows:
            raise UnknownMessage(f"your inbox has nothing of a conversation {message_id[:64]!r}")
        self.ids.shown_rows(rows)
        chosen = sorted(rows, key=lambda row: (row["id"] != whole, -int(row["row"])))
        shown = [(int(row["row"]), message_of(row, PIECE)) for row in chosen]
        number = fitting([len(answers.content(each).encode()) for _, each in shown], 2 * PIECE)
        return answers.Messages(messages=[each for _, each in sorted(shown[:number], key=lambda pair: pair[0])])

    async def history(
        self,
        channel: Channel,
        limit: Annotated[int, Field(description="Messages at most.", ge=1, le=100)] = 20,
        before: Annotated[int | None, Field(description="From the page after this one.", ge=1, lt=2**62)] = None,
        max_bytes: Bytes = 20_000,
    ) -> Annotated[CallToolResult, answers.HistoryPage]:
        """What was said in a channel, the latest page first, oldest message of a page first. Marks nothing as read."""
        page = await self.page(channel, limit, before, max_bytes)
        earlier = [f"Call history with before={page.before} for what was said earlier."] if page.before else []
        earlier += [f"{page.missing[0].upper()}{page.missing[1:]}."] if page.missing else []
        if any(each.whole_bytes for each in page.messages):
            earlier.append("A message was cut: call it with a higher max_bytes and the same `before` for more of it.")
        return result(
            page, in_words(page.messages, [f"{words.counted(len(page.messages), 'message')} of {channel}."], earlier)
        )

    async def page(self, channel: str, limit: int, before: int | None, most: int) -> answers.HistoryPage:
        """The newest messages that fit into so many bytes, oldest first."""
        found = await off_loop(lambda: self.desk.history(channel, limit, before))
        newest_first = sorted(found, key=lambda row: -int(row["seq"]))
        shown = [message_of(row, most) for row in newest_first]
        number = fitting([len(answers.content(each).encode()) for each in shown], most)
        self.ids.shown_rows(newest_first[:number])
        more = len(found) >= limit or number < len(found)
        earliest = int(newest_first[number - 1]["seq"]) if number and more else None
        missing = None if earliest else found.missing(channel)
        return answers.HistoryPage(channel=channel, messages=shown[:number][::-1], before=earliest, missing=missing)

    # --- tasks ---

    async def claim_task(
        self,
        role: Role,
        wait: Wait = 0,
        take_over: Annotated[
            bool,
            Field(description="Go on with the task of an earlier program of yours that is gone."),
        ] = False,
    ) -> Annotated[CallToolResult, answers.ClaimedTask]:
        """Take one task that waits for a role you hold. It is yours until `finish_task`, one at a time: claimed again,
        it is the same one. If this session ends first it goes to somebody else."""
        claiming = partial(self.desk.claim, role, wait, take_over=take_over)
        facts = await off_loop(claiming, unwanted=self._give_back)
        if facts is None:
            return await self._claimed_nothing(role)
        task = str(facts["id"])
        self.held[task] = {**facts, "kind": "task", "from": facts["asker"]}
        self.ids.shown([task])
        request = message_of(self.held[task], PIECE)
        attempt, deadline = int(facts.get("attempt") or 1), facts.get("deadline")
        claimed = answers.ClaimedTask(
            id=short(task), role=role, attempt=attempt, deadline=words.deadline(deadline), request=request
        )
        opening = [f"Task {claimed.id} for {role} is yours (attempt {attempt}). {claimed.notice}"]
        closing = [f'Call finish_task with id="{claimed.id}" when it is done, or cannot be done.']
        closing += words.rest_of([request])
        return result(claimed, in_words([request], opening, closing))

    async def _claimed_nothing(self, role: str) -> CallToolResult:
        holds = await off_loop(self.desk.held)
        why = f"Nothing waits for the role {role}. Call it again with `wait` to be there when it does."
        if holds and not holds["mine"]:
            why = words.held_elsewhere(holds)
        self.ids.shown([str(holds["id"])] if holds else [])
        return result(answers.ClaimedTask(id=None, role=role, why=why), why)

    def _give_back(self, facts: Facts | None) -> None:
        """Its caller gave up before it came. One that is held already came by another call, which did not."""
        if facts is not None and str(facts["id"]) not in self.held:
            with suppress(TidingsError):
                self.desk.fail(str(facts["id"]), "the call that claimed it was given up", retry=True)

    async def finish_task(
        self,
        id: TaskId,
        outcome: Annotated[Literal["done", "fail"], Field(description="`fail` gives it up.")],
        text: Annotated[str, Field(description="The result; for `fail`, the reason.", max_length=80_000)] = "",
        data: Data = None,
        retry: Annotated[bool, Field(description="For `fail`: may somebody else try?")] = True,
    ) -> Annotated[CallToolResult, answers.TaskOutcome]:
        """End a task you claimed: done, with a result signed by you, or failed, with a reason."""
        task = await self.ids.message(id)
        try:
            state = await self._end(task, outcome, text, data, retry=retry)
        except (ConflictError, UnknownMessage):
            self.held.pop(task, None)
            raise
        self.held.pop(task, None)
        return result(answers.TaskOutcome(id=short(task), state=state), f"Task {short(task)} is {state}.")

    async def _end(self, task: str, outcome: str, text: str, data: Any, *, retry: bool) -> str:
        if outcome == "done":
            await off_loop(lambda: self.desk.finish(task, text, data))
            return "done"
        if data is not None:
            raise UsageError("a task that failed has a reason, in `text`, and no `data`")
        facts = await off_loop(lambda: self.desk.fail(task, text or "no reason was given", retry=retry))
        return str(facts["state"])

    async def task_result(
        self,
        id: TaskId,
        wait: Wait = 0,
    ) -> Annotated[CallToolResult, answers.TaskReport]:
        """What came of a task you asked: its state, and its result once somebody has done it."""
        whole = await self.ids.message(id)
        facts = await off_loop(lambda: self.desk.task(whole, wait))
        worker = facts.get("worker")
        report = answers.TaskReport(
            id=short(whole),
            state=str(facts["state"]),
            worker=short(on_a_line(str(worker))) if worker else None,
            attempt=int(facts.get("attempt") or 0),
            text=neutral(facts.get("text") or ""),
            parts=answers.other_parts(facts),
            cause=facts.get("cause"),
            reasons=[neutral(str(each)) for each in facts.get("reasons") or ()],
        )
        return result(report, words.report(report))

    async def keep_held(self) -> None:
        """For ever: while something is claimed, let the host hear that its program lives."""
        while True:
            await asyncio.sleep(self.sign_of_life)
            if self.held:
                await self._show_life(list(self.held))

    async def _show_life(self, claimed: list[str]) -> None:
        """What was claimed before this is asked, and is not held any more, was given back."""
        try:
            holds = await off_loop(self.desk.show_life)
        except UnreachableError as error:
            log.info("the host did not hear a sign of life: %s", error)
            return
        except TidingsError as error:  # the session ended, and with it what it held
            log.info("nothing is held any more: %s", error)
            holds = None
        for task in claimed:
            if holds is None or not holds["mine"] or holds["id"] != task:
                self.held.pop(task, None)

    # --- being here ---

    async def set_status(
        self,
        status: Annotated[Literal["idle", "working", "waiting"], Field(description="What others see.")],
        activity: Annotated[str, Field(description="What you do, in a few words.", max_length=200)] = "",
        model: Annotated[str, Field(description="Which model you are.", max_length=100)] = "",
    ) -> Annotated[CallToolResult, answers.Presence]:
        """Tell the others what you do. `waiting` means: you need somebody."""
        doing, called = (on_a_line(" ".join(each.split())) or None for each in (activity, model))
        await off_loop(lambda: self.desk.set_status(status, doing, called))
        shown = answers.Presence(status=status, activity=doing, model=called)
        return result(shown, f"The others see you as {status}.")

    async def set_attention(
        self,
        mode: Annotated[
            Literal["open", "dnd", "focus"] | None,
            Field(description="What wakes you. `open`: all; `focus`: what is for you; `dnd`: that and what is urgent."),
        ] = None,
        channels: Annotated[
            dict[str, Literal["normal", "quiet", "muted"]], Field(description="How loud each channel or pattern is.")
        ] = {},  # noqa: B006
    ) -> Annotated[CallToolResult, answers.AttentionView]:
        """Decide what may wake you. It never decides what is kept: everything stays in the inbox."""
        if mode is None and not channels:
            raise UsageError("give `mode`, or `channels` with a level for each")
        await off_loop(lambda: self.desk.set_attention(mode, channels))
        view = answers.AttentionView(mode=mode, channels={name: str(level) for name, level in channels.items()})
        return result(
            view, f"Attention is {mode or 'as before'}{', with new levels for channels' if channels else ''}."
        )


#: what is not said is as the protocol has it: changes things, may destroy, is not repeatable, reaches the world outside
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
READS_SPACE = ToolAnnotations(read_only_hint=True)
SENDS = ToolAnnotations(destructive_hint=False)
SETS = ToolAnnotations(destructive_hint=False, idempotent_hint=True)
ENDS = ToolAnnotations(destructive_hint=True)
LEAVES = ToolAnnotations(destructive_hint=True, idempotent_hint=True)


def catalogue(tools: Tools) -> list[tuple[Callable[..., Any], str, ToolAnnotations]]:
    """Every tool, its title, and what a client may assume of it."""
    return [
        (tools.orient, "Where am I?", READS_SPACE),
        (tools.who, "Who is here", READS_SPACE),
        (tools.channels, "Channels", READS_SPACE),
        (tools.join, "Join a channel", SETS),
        (tools.leave, "Leave a channel", LEAVES),
        (tools.send, "Say something in a channel", SENDS),
        (tools.direct_message, "Write to one agent", SENDS),
        (tools.ask_role, "Ask a role to do something", SENDS),
        (tools.outbox_status, "What became of my messages", READS),
        (tools.trace, "Trace a message", READS_SPACE),
        (tools.read_inbox, "Read the inbox", SETS),
        (tools.acknowledge_inbox, "Acknowledge what was read", SETS),
        (tools.read_message, "Read one message", READS),
        (tools.history, "History of a channel", READS_SPACE),
        (tools.claim_task, "Claim a task", SENDS),
        (tools.finish_task, "Finish a task", ENDS),
        (tools.task_result, "Result of a task", READS_SPACE),
        (tools.set_status, "Set my status", SETS),
        (tools.set_attention, "Set my attention", SETS),
    ]
