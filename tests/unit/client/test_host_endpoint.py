"""An agent at the host: whatever becomes of the host, a call is made once more and a session opened anew."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripted_host import TASK, Found, ScriptedHost, ScriptedSessions, at, home_file, session_file
from tidings.cli import mcp as command
from tidings.client import host_tasks
from tidings.client.host_http import Json
from tidings.client.host_session import BorrowedSession
from tidings.client.host_transport import HostAgent
from tidings.contract.host import HeldTaskRequest, InboxMessage
from tidings.errors import (
    BrokerUnreachable,
    ConflictError,
    DeniedError,
    HostUnreachable,
    NoSession,
    OutcomeUnknown,
    UnknownMessage,
    UsageError,
)
from tidings_testing.waiting import eventually
from tools.examples import example

UNREAD = "inbox unread"
ROW: Json = example(msgspec.inspect.type_info(InboxMessage))
HELD: Json = {"held": TASK | {"mine": True}}
CLAIMS: dict[str, Any] = {"task claim": {"task": TASK}, "task held": HELD}
DONE, FAIL = "task done", "task fail"


def answering(*fails: Exception) -> ScriptedHost:
    """It says in which session it was asked."""
    host = ScriptedHost(*fails)
    host.answers[UNREAD] = lambda: {"unread": {"session": int(host.asked[-1][2] or 0)}}
    host.answers["inbox list"] = lambda: {"messages": [ROW | {"row": int(host.asked[-1][2] or 0)}]}
    return host


# --- renewing ---


async def test_a_host_that_is_gone_is_looked_for_and_asked_again_in_the_same_session() -> None:
    host = answering(HostUnreachable("gone"))
    find, sessions = Found(host), ScriptedSessions()
    async with at(host, sessions, find) as agent:
        assert await agent.transport.unread() == {"session": 1}
        assert (find.times, sessions.opened) == (2, 1)


async def test_a_host_that_stays_away_is_looked_for_once() -> None:
    host = answering(HostUnreachable("gone"), HostUnreachable("still"))
    find = Found(host)
    async with at(host, find=find) as agent:
        with pytest.raises(HostUnreachable, match="still"):
            await agent.transport.unread()
        assert find.times == 2


async def test_two_calls_that_find_their_host_gone_look_for_it_once() -> None:
    first, second = answering(HostUnreachable("gone"), HostUnreachable("gone")), answering()
    find = Found(first)
    async with at(first, find=find) as agent:
        find.host = second
        assert list(await asyncio.gather(agent.transport.unread(), agent.transport.unread())) == [{"session": 1}] * 2
        assert (find.times, first.closed) == (2, True)


@pytest.mark.parametrize("fails", [[NoSession("ended")], [HostUnreachable("gone"), NoSession("ended")]])
async def test_a_session_the_host_does_not_know_is_opened_anew(fails: list[Exception]) -> None:
    sessions = ScriptedSessions()
    async with at(answering(*fails), sessions) as agent:
        assert await agent.transport.unread() == {"session": 2}
        assert await agent.transport.unread() == {"session": 2}
        assert sessions.opened == 2


async def test_two_calls_that_find_their_session_ended_open_one() -> None:
    host, sessions = answering(NoSession("ended"), NoSession("ended")), ScriptedSessions()
    async with at(host, sessions) as agent:
        assert list(await asyncio.gather(agent.transport.unread(), agent.transport.unread())) == [{"session": 2}] * 2
        assert sessions.opened == 2


@pytest.mark.parametrize("failed", [HostUnreachable("stopped"), NoSession("ended")])
async def test_neither_a_sign_of_life_nor_a_look_at_a_thread_starts_a_host_that_somebody_stopped(
    failed: Exception,
) -> None:
    host = ScriptedHost(failed)
    find, sessions = Found(host), ScriptedSessions()
    async with at(host, sessions, find) as agent:
        with pytest.raises(type(failed)):
            await agent.transport.call(HeldTaskRequest(), starts=False)
        host.fails = [failed]
        with pytest.raises(type(failed)):
            await agent.transport.thread("m", starts=False)
        assert (find.times, sessions.opened) == (1, 1)


async def test_whoever_follows_never_starts_a_host_that_somebody_stopped() -> None:
    host = answering(HostUnreachable("stopped"), NoSession("ended"))
    find, sessions = Found(host), ScriptedSessions()
    async with at(host, sessions, find) as agent:
        with pytest.raises(HostUnreachable):
            await agent.transport.newest_row()
        assert (find.times, sessions.opened) == (1, 1)
        assert await agent.transport.newest_row() == 2, "one that runs and forgot the session is asked for another"
        host.events = HostUnreachable("stopped")
        with pytest.raises(HostUnreachable):
            await anext(agent.transport.follow(0))
        assert (find.times, sessions.opened) == (1, 2)
        host.events = NoSession("ended")
        assert [event async for event in agent.transport.follow(0)] == [], "and it is followed again"
        assert (find.times, sessions.opened) == (1, 3)


async def test_an_outcome_that_is_not_known_is_not_asked_for_again() -> None:
    host = answering(OutcomeUnknown("perhaps"))
    async with at(host) as agent:
        with pytest.raises(OutcomeUnknown):
            await agent.transport.mark_read([1])
        assert len(host.asked) == 1


async def test_a_message_whose_outcome_is_not_known_is_handed_over_again_under_its_id() -> None:
    host = ScriptedHost(OutcomeUnknown("perhaps"), OutcomeUnknown("perhaps"))
    async with at(host) as agent:
        with pytest.raises(OutcomeUnknown, match="under the same id"):
            await agent.send("general", "hello")
        first, second = host.asked_for("message send")
        assert first == second
        assert {**first, "id": ""} == {"channel": "general", "text": "hello", "id": "", "wait": 5.0}


async def test_a_message_that_the_space_refused_is_the_error_of_its_code() -> None:
    host = ScriptedHost()
    told: Json = {"id": "m", "seq": None, "stage": "stored", "warnings": [], "to": None, "row": 1}
    host.answers["message send"] = told | {"state": "dead", "code": "denied", "why": "may not post"}
    async with at(host) as agent:
        with pytest.raises(DeniedError, match="message m was not sent: may not post"):
            await agent.send("secret", "hello", id="m")


async def test_a_borrowed_session_is_neither_ended_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    session_file(socket="s").write(path)
    host = answering(NoSession("ended"))
    async with at(host, BorrowedSession(path, holder="server")) as agent:
        with pytest.raises(NoSession, match=r"the session of this server has ended .*start it again"):
            await agent.transport.unread()
    assert [asked for asked, _, _ in host.asked] == [UNREAD]
    assert path.exists()


async def test_closing_ends_the_session_even_if_the_host_does_not_hear_it() -> None:
    host = answering()
    find = Found(host)
    async with at(host, find=find) as agent:
        host.fails = [HostUnreachable("gone")]
        await agent.close()
        await agent.close()
    assert [asked for asked, _, _ in host.asked] == ["session end"]
    assert (find.times, host.closed) == (1, True)


async def test_whoever_closes_it_once_more_waits_until_it_is_closed() -> None:
    host = ScriptedHost()
    may_end = asyncio.Event()

    async def late() -> Json:
        await may_end.wait()
        return {}

    host.answers["session end"] = late
    async with at(host) as agent:
        first, second = asyncio.create_task(agent.close()), asyncio.create_task(agent.close())
        await eventually(lambda: host.asked != [], what="the session is ended")
        assert [each.done() for each in (first, second)] == [False, False]
        may_end.set()
        await asyncio.gather(first, second)
    assert len(host.asked) == 1


async def test_a_call_that_never_ends_does_not_keep_its_caller() -> None:
    host = ScriptedHost()
    host.answers[UNREAD] = host.never
    async with at(host) as agent:
        asking = asyncio.create_task(agent.transport.unread())
        await eventually(lambda: host.waiting, what="it is asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert host.waiting == 0


# --- tasks ---


async def claimed(host: ScriptedHost, agent: HostAgent) -> Any:
    host.answers |= CLAIMS
    job = await agent.claim("reviewer")
    assert job is not None
    return job


def every(seconds: float, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_tasks, "SLOW_REPORT_EVERY", seconds)


async def test_signs_of_life_are_given_while_a_task_is_held_and_end_when_it_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every(0.01, monkeypatch)
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
        lost: list[Exception] = []
        agent.on("error", lost.append)
        await eventually(lambda: len(host.asked_for("task held")) >= 3, what="several signs of life")
        assert (job.lost, await agent.transport.claimed(TASK["id"])) == (None, job)
        host.answers["task held"] = {"held": None}
        await eventually(lambda: job.lost, what="it knows that the host gave it back")
        signs = len(host.asked_for("task held"))
        assert [type(each) for each in lost] == [ConflictError]
        with pytest.raises(UnknownMessage, match="holds no task"):
            await agent.transport.claimed(TASK["id"])
        await asyncio.sleep(0.05)
        assert len(host.asked_for("task held")) == signs + 1, "no sign of life for what is lost"


@pytest.mark.parametrize(
    ("failed", "lost"), [(HostUnreachable("busy"), False), (BrokerUnreachable("x"), False), (NoSession("over"), True)]
)
async def test_a_sign_of_life_that_was_not_heard_is_given_again_and_one_without_a_session_tells_of_the_loss(
    monkeypatch: pytest.MonkeyPatch, failed: Exception, lost: bool
) -> None:
    every(0.01, monkeypatch)
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
        host.fails = [failed]
        await eventually(lambda: not host.fails, what="a sign of life that fails")
        if lost:
            await eventually(lambda: job.lost, what="what the session held is lost")
        else:
            heard = len(host.asked_for("task held"))
            await eventually(lambda: len(host.asked_for("task held")) > heard, what="another sign of life")
            assert job.lost is None


async def test_a_task_that_comes_for_a_call_that_was_given_up_goes_back() -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        await give_up_claiming(host, agent)
        await eventually(lambda: host.asked_for(FAIL), what="it is given back")
        assert host.asked_for(FAIL) == [{"id": TASK["id"], "reason": "the call that claimed it was cancelled"}]


async def give_up_claiming(host: ScriptedHost, agent: HostAgent) -> None:
    host.answers |= {"task claim": host.never, "task held": HELD}
    before = host.waiting
    claiming = asyncio.create_task(agent.claim("reviewer", 30))
    await eventually(lambda: host.waiting > before, what="it is asked")
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)


async def test_a_task_that_another_call_has_or_waits_for_stays_when_one_is_given_up() -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
        await give_up_claiming(host, agent)
        await eventually(lambda: host.asked_for("task held"), what="it looked what there is to give back")
        await job.done("it is")
        waits = asyncio.create_task(agent.claim("reviewer", 30))
        await eventually(lambda: host.waiting == 1, what="another call waits")
        looks = len(host.asked_for("task held"))
        await give_up_claiming(host, agent)
        await eventually(lambda: len(host.asked_for("task held")) > looks, what="it looked again")
        await asyncio.sleep(0.02)
        assert host.asked_for(FAIL) == []
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)


async def test_a_task_that_was_given_back_and_came_again_is_another_job() -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        first = await claimed(host, agent)
        assert await agent.claim("reviewer") == first
        host.answers["task claim"] = {"task": TASK | {"attempt": 2}}
        second = await agent.claim("reviewer")
        assert second is not None
        assert (second.attempt, second.lost) == (2, None)
        assert "claimed again" in first.lost
        assert await agent.transport.claimed(TASK["id"]) is second


async def test_what_an_earlier_program_of_the_session_claimed_can_be_finished() -> None:
    host = ScriptedHost()
    host.answers |= CLAIMS
    async with at(host) as agent:
        await (await agent.transport.claimed(TASK["id"])).done("it is")
        assert host.asked_for(DONE) == [{"id": TASK["id"], "text": "it is"}]
        host.answers["task held"] = {"held": TASK | {"mine": False}}
        with pytest.raises(UnknownMessage, match="holds no task"):
            await agent.transport.claimed(TASK["id"])


@pytest.mark.parametrize("refused", [ConflictError("late"), DeniedError("not you"), UnknownMessage("which?")])
async def test_a_job_that_may_not_be_settled_is_over(refused: Exception) -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
        host.fails = [refused]
        with pytest.raises(type(refused)):
            await job.done("it is")
        assert (job.settled, job.lost) == (True, str(refused))
        with pytest.raises(UsageError, match="already been finished or given back"):
            await job.done("it is")


async def test_a_job_whose_end_is_not_known_can_be_settled_again() -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
        host.fails = [OutcomeUnknown("perhaps")]
        with pytest.raises(OutcomeUnknown):
            await job.done("it is")
        await job.done("it is")
        assert job.settled


@pytest.mark.parametrize("state", ["done", "dead", "cancelled"])
async def test_a_task_of_which_nothing_more_comes_is_not_waited_for(state: str) -> None:
    host = ScriptedHost()
    host.answers["task state"] = {"state": state, "message": None}
    async with at(host) as agent:
        async with asyncio.timeout(5):
            assert (await agent.task("m", None)).state == state
        assert len(host.asked) == 1


async def test_closing_gives_back_what_is_claimed_and_ends_the_session() -> None:
    host = ScriptedHost()
    async with at(host) as agent:
        job = await claimed(host, agent)
    assert job.settled
    assert [asked for asked, _, _ in host.asked][-2:] == [FAIL, "session end"]


# --- sessions in files ---


def test_a_session_file_of_another_agent_is_refused(tmp_path: Path) -> None:
    path = home_file(tmp_path, "ada")
    with pytest.raises(UsageError, match="is of ada, not of bob"):
        command.borrowed(path, "bob")
    for said in (None, "ada"):
        assert not command.borrowed(path, said).ends
