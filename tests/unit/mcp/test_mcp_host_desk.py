"""The desk over the host: whatever becomes of the host, a call is made once more and a session opened anew."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from tidings.cli import mcp as command
from tidings.cli.options import place
from tidings.errors import HostUnreachable, NoSession, OutcomeUnknown, UsageError
from tidings.host.client import HostClient, Session
from tidings.host.session_file import SessionFile
from tidings.mcp.desk import off_loop
from tidings.mcp.host_desk import HostDesk
from tidings.testing.waiting import eventually


class FakeSession:
    """Answers with its number; `fails` are raised first, in order."""

    def __init__(self, number: int, *fails: Exception) -> None:
        self.number, self.fails, self.asked, self.ended = number, list(fails), 0, False
        self.space, self.agent, self.name = "main", "U", "ada"

    def unread(self) -> dict[str, int]:
        self.asked += 1
        if self.fails:
            raise self.fails.pop(0)
        return {"session": self.number}

    held = unread

    def inbox(self, **_: Any) -> list[dict[str, int]]:
        return [{"row": self.unread()["session"]}]

    def end(self) -> None:
        self.ended = True
        if self.fails:
            raise self.fails.pop(0)


def desk_of(*sessions: FakeSession, borrowed: bool = False) -> tuple[HostDesk, list[str]]:
    told: list[str] = []
    left = list(sessions)

    def find() -> HostClient:
        told.append("find")
        return cast("HostClient", None)

    def begin(_: Any) -> Session:
        told.append("open")
        return cast("Session", left.pop(0))

    desk = HostDesk(find, begin, borrowed=borrowed)
    told.clear()
    return desk, told


def test_a_host_that_is_gone_is_looked_for_and_asked_again_in_the_same_session() -> None:
    desk, told = desk_of(FakeSession(1, HostUnreachable("gone")))
    assert desk.unread() == {"session": 1}
    assert told == ["find"]


@pytest.mark.parametrize("fails", [[NoSession("ended")], [HostUnreachable("gone"), NoSession("ended")]])
def test_a_session_the_host_does_not_know_is_opened_anew(fails: list[Exception]) -> None:
    desk, told = desk_of(FakeSession(1, *fails), FakeSession(2))
    assert desk.unread() == {"session": 2}
    assert told[-2:] == ["find", "open"]
    assert desk.unread() == {"session": 2}


def test_a_sign_of_life_never_starts_a_host_that_somebody_stopped() -> None:
    for failed in (HostUnreachable("stopped"), NoSession("ended")):
        desk, told = desk_of(FakeSession(1, failed), FakeSession(2))
        with pytest.raises(type(failed)):
            desk.show_life()
        assert told == []


def test_whoever_follows_never_starts_a_host_that_somebody_stopped() -> None:
    desk, told = desk_of(FakeSession(1, HostUnreachable("stopped"), NoSession("ended")), FakeSession(2))
    with pytest.raises(HostUnreachable):
        desk.newest_row()
    assert told == []
    assert desk.newest_row() == 2, "one that runs and forgot the session is asked for another"


def test_an_outcome_that_is_not_known_is_not_asked_for_again_here() -> None:
    session = FakeSession(1, OutcomeUnknown("perhaps"))
    desk, _ = desk_of(session)
    with pytest.raises(OutcomeUnknown):
        desk.unread()
    assert session.asked == 1


def test_two_calls_that_find_their_session_ended_open_one() -> None:
    first, second = FakeSession(1), FakeSession(2)
    both = threading.Barrier(2)

    def ended() -> dict[str, int]:
        both.wait(10)
        raise NoSession("ended")

    first.unread = ended  # type: ignore[method-assign]
    desk, told = desk_of(first, second)
    threads = [threading.Thread(target=desk.unread) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(10)
    assert told == ["find", "open"]
    assert second.asked == 2


def test_a_borrowed_session_is_neither_ended_nor_replaced() -> None:
    session = FakeSession(1, NoSession("ended"))
    desk, told = desk_of(session, borrowed=True)
    with pytest.raises(NoSession, match="start it again"):
        desk.unread()
    desk.close()
    assert told == []
    assert not session.ended


def test_closing_ends_the_session_even_if_the_host_does_not_hear_it() -> None:
    session = FakeSession(1, HostUnreachable("gone"))
    desk, _ = desk_of(session)
    desk.close()
    assert session.ended


async def test_a_call_that_never_ends_does_not_keep_its_caller() -> None:
    forever = threading.Event()
    brought: list[bool] = []
    asking = asyncio.create_task(off_loop(lambda: forever.wait(30), unwanted=brought.append))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert brought == []
    forever.set()
    await eventually(lambda: brought == [True], what="what it brought is given to who undoes it")


def saved(home: Path, name: str) -> Path:
    socket = str(home.resolve() / "run" / "host.sock")
    path = home / "run" / "session.json"
    file = SessionFile(
        socket=socket, session="s", token="t", space="main", space_id="A", agent="U", name=name, receive=True
    )
    file.write(path)
    return path


def test_a_session_file_of_another_agent_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "ada")
    where = place("main", str(tmp_path), "bob")
    with pytest.raises(UsageError, match="is of ada, not of bob"):
        command._borrowed(path, where, "bob")
    assert command._borrowed(path, where, None).name == "ada"
