"""Every answer of a steward that runs in a test is held against what the table of operations declares."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tidings.steward.requests import Answer, ControlRequest, Dispatcher, Handler
from tidings.wire.operations import OPERATIONS


def wrong_with(service: str, do: str, answer: Answer) -> str | None:
    """What of an answer is not as declared: a field too many or too few, at any depth, or of another type."""
    plain = msgspec.json.decode(msgspec.json.encode(answer))
    try:
        known = msgspec.to_builtins(msgspec.convert(plain, OPERATIONS[service, do].answer))
    except msgspec.ValidationError as error:
        return f"{service} {do}: {error}"
    return None if known == plain else f"{service} {do} answers {plain}, of which only {known} is declared"


@contextmanager
def held_to_the_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wrong: list[str] = []
    serve = Dispatcher.serve

    def checked(key: tuple[str, str], handler: Handler) -> Handler:
        async def answered(request: ControlRequest) -> Answer:
            answer = await handler(request)
            if (found := wrong_with(*key, answer)) is not None:
                wrong.append(found)
            return answer

        return answered

    def serve_checked(self: Dispatcher, *parts: Any) -> None:
        serve(self, *parts)
        self.handlers = {key: checked(key, handler) for key, handler in self.handlers.items()}

    monkeypatch.setattr(Dispatcher, "serve", serve_checked)
    yield
    assert not wrong, wrong[:3]
