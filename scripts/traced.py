"""One program on the way of a message, with a profiler in every thread of it: started by `count.py`, not by people.

    python scripts/traced.py sender|reader|client|host HOME

Lines on standard input command it: `send` (sender, client), `next` and `ack` (reader); the host, which is `tidings host
up --foreground` itself, does its work between `begin` and `end`. The answer is a line of JSON: every function of
`tidings` that was entered meanwhile, as `[module, function]`, each once, in the order of its first entry.
Comprehensions and lambdas belong to the function they stand in.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCES = str(Path(__file__).parents[1] / "src" / "tidings")
PATIENCE = 20.0


class Tracer:
    """What was entered since `begin`. In threads that were started before `install` nothing is seen."""

    def __init__(self) -> None:
        self.entered: dict[int, CodeType] | None = None

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and self.entered is not None and frame.f_code.co_filename.startswith(SOURCES):
            self.entered.setdefault(id(frame.f_code), frame.f_code)

    def begin(self) -> None:
        self.entered = {}

    def end(self) -> list[tuple[str, str]]:
        entered, self.entered = self.entered or {}, None
        named = ((_module(code), code.co_qualname) for code in entered.values() if not code.co_name.startswith("<"))
        return list(dict.fromkeys(named))


def _module(code: CodeType) -> str:
    inside = Path(code.co_filename).relative_to(Path(SOURCES).parent).with_suffix("")
    return ".".join(inside.parts).removesuffix(".__init__")


TRACER = Tracer()


#: what the program itself says to people is no answer
ANSWERS, sys.stdout = sys.stdout, sys.stderr


def say(answer: object) -> None:
    print(json.dumps(answer), file=ANSWERS, flush=True)


async def obey(acts: dict[str, Callable[[], Awaitable[object]]]) -> None:
    """What standard input says, until it ends."""
    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word = line.strip()
        TRACER.begin()
        await acts[word]()
        say(TRACER.end())


async def sender(home: str) -> None:
    import tidings

    async with tidings.connect("main", name="ada", home=home) as ada:
        await obey({"send": lambda: ada.send("general", "hello")})


async def reader(home: str) -> None:
    import tidings

    async with tidings.connect("main", name="bob", home=home, channels=["general"]) as bob:
        held: list[tidings.Incoming] = []

        async def next_message() -> None:
            held.append(await bob.next_message(PATIENCE))

        await obey({"next": next_message, "ack": lambda: held.pop().ack()})


async def client(home: str) -> None:
    """A program that sends through the host."""
    import tidings

    async with tidings.connect("main", name="ada", home=home, via="host", receive=False) as ada:
        await obey({"send": lambda: ada.send("general", "hello")})


def host(home: str) -> None:
    """The host has the main thread; another one obeys."""

    def obeying() -> None:
        say("ready")
        for line in sys.stdin:
            answer = TRACER.end()
            if line.strip() == "begin":
                TRACER.begin()
            say(answer)

    threading.Thread(target=obeying, daemon=True).start()
    from tidings.cli.main import main

    main(["host", "up", "--foreground", "--home", home])


if __name__ == "__main__":
    TRACER.install()
    role, where = sys.argv[1:]
    if role == "host":
        host(where)
    else:
        asyncio.run({"sender": sender, "reader": reader, "client": client}[role](where))
