"""Every answer of a steward that runs in a test is held against what the table of operations declares."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tidings.contract.catalogue import OPERATIONS
from tidings.contract.core import Answer, Caller
from tidings.steward.requests import Dispatcher, Handler


def wrong_with(name: str, answer: Any) -> str | None:
    """What of an answer is not as declared: a field too many or too few, at any depth, or of another type."""
    plain = msgspec.json.decode(msgspec.json.encode(answer))
    try:
        known = msgspec.json.decode(msgspec.json.encode(msgspec.convert(plain, OPERATIONS[name].answer)))
    except msgspec.ValidationError as error:
        return f"{name}: {error}"
    return None if known == plain else f"{name} answers {plain}, of which only {known} is declared"


@contextmanager
def held_to_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wrong: list[str] = []
    serve = Dispatcher.serve

    def checked(name: str, handler: Handler) -> Handler:
        async def answered(caller: Caller, request: Any) -> Answer:
            answer = await handler(caller, request)
            if (found := wrong_with(name, answer)) is not None:
                wrong.append(found)
            return answer

        return answered

    def serve_checked(self: Dispatcher, *parts: Any) -> None:
        serve(self, *parts)
        self.handlers = {name: checked(name, handler) for name, handler in self.handlers.items()}

    monkeypatch.setattr(Dispatcher, "serve", serve_checked)
    yield
    assert not wrong, wrong[:3]
