"""An agent on a machine whose clock is wrong by a day, with a credential that is good: it sends and receives, over TLS
and through a host, is told by `doctor connection`, and its credential is renewed before it ends.

The whole process has the wrong clock, OpenSSL too: a library in front of libc answers what time it is.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from foreign import bundle_of, connect
from hosting import adopt, has_texts, host_in
from tidings.admin.agents import AgentFile
from tidings.contract.host import SendRequest
from tidings.nats import jwt
from tidings.wire.message import new_id
from tidings_testing.processes import Child, child
from tidings_testing.real_space import RealSpace, real_space
from tidings_testing.waiting import eventually

HERE = "127.0.0.2"
DAY = 86_400
PROGRAM = Path(__file__).parent / "clock_child.py"
CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, which, at);
    const char *off = getenv("CLOCK_OFF");
    if (!failed && off && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) at->tv_sec += atol(off);
    return failed;
}

time_t time(time_t *into) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (into) *into = at.tv_sec;
    return at.tv_sec;
}

int gettimeofday(struct timeval *into, void *zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    into->tv_sec = at.tv_sec;
    into->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a clock that is wrong for OpenSSL too")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(folder / "clock.c")]
    subprocess.run(command, check=True, timeout=60)
    return folder / "clock.so"


@pytest.fixture
async def space(tmp_path: Path) -> AsyncIterator[RealSpace]:
    async with real_space(tmp_path / "home", listen=HERE) as running:
        await running.add("ada")
        yield running


def far(clock: Path, off: int, *words: str | Path) -> AbstractAsyncContextManager[Child]:
    tests = Path(__file__).parents[1]
    sources = f"{tests.parent / 'src'}{os.pathsep}{tests}"
    more = {"LD_PRELOAD": str(clock), "CLOCK_OFF": str(off), "PYTHONPATH": sources}
    return child(PROGRAM, *words, more=more)


@pytest.mark.parametrize("off", [-DAY, DAY], ids=["behind", "ahead"])
async def test_an_agent_whose_clock_is_wrong_by_a_day_speaks_and_hears_and_doctor_says_it(
    space: RealSpace, tmp_path: Path, clock: Path, off: int
) -> None:
    await space.add("bob")
    async with (
        connect(space, "ada", "general") as ada,
        far(clock, off, "speak", bundle_of(space, "bob", tmp_path)) as bob,
    ):
        said = await bob.line()
        assert abs(said["clock"] - off - time.time()) < 3_600, "its clock is wrong"
        assert (await ada.next_message(20)).text == "from afar"
        await ada.send("general", "to afar")
        assert await bob.line() == {"heard": "to afar"}
        *good, (what, verdict, words) = (await bob.line())["steps"]
        assert await bob.ended() == 0
    assert {verdict for _, verdict, _ in good} == {"ok"}
    assert (what, verdict) == ("clock", "problem")
    assert ("ahead of" if off > 0 else "behind") in words


@pytest.mark.parametrize("off", [-DAY, DAY], ids=["behind", "ahead"])
async def test_a_host_whose_clock_is_wrong_by_a_day_delivers_and_receives(
    space: RealSpace, tmp_path: Path, clock: Path, off: int
) -> None:
    await space.add("bob")
    async with (
        host_in(tmp_path / "near") as near,
        far(clock, off, "host", bundle_of(space, "bob", tmp_path), tmp_path / "far") as bob,
    ):
        ada = await adopt(near, space, "ada", receive=True, knows=2)
        await has_texts(near, ada, ["from afar"], within=40)
        await near.send(ada, SendRequest(id=new_id(), text="to afar", agent="bob", channel=None))
        assert await bob.line(40) == {"heard": ["to afar"]}
        assert await bob.ended() == 0


@pytest.mark.parametrize("off", [-DAY, DAY], ids=["behind", "ahead"])
async def test_a_credential_is_renewed_before_it_ends_although_the_clock_is_wrong_by_a_day(
    space: RealSpace, tmp_path: Path, clock: Path, off: int
) -> None:
    life = 10
    async with space.administer() as admin:
        await admin.add(AgentFile("bob", read=("general",), post=("general",)), lifetime=life)
        path = bundle_of(space, "bob", tmp_path)
        first = jwt.decode(jwt.split_credentials(json.loads(path.read_text())["creds"])[0])
        async with far(clock, off, "stay", path, str(life + 2)) as bob:
            assert (await bob.line())["ready"]
            assert time.time() < first["exp"]
            await eventually(lambda: admin.ledger.due(time.time()), within=30)
            assert await admin.renew() == ["bob"]
            assert await bob.line(40) == {"state": "ready"}
            assert time.time() > first["exp"]
            assert await bob.ended() == 0
