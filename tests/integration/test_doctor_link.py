"""The shipped suite of hostile links holds on Tidings as it is, and finds each rule that is taken away."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidings.cli.main import main
from tidings.contract.core import Operation
from tidings.contract.links import LinkPageAnswer
from tidings.errors import UnhealthyError
from tidings.links import directory_sync as people_round
from tidings.links import link_store
from tidings.links import mail_sync as mail_round
from tidings.links import replicator as engine
from tidings.links import validation as judging
from tidings.links.definition import LinkDefinition
from tidings.links.destination import LocalDestination
from tidings.steward import link_tasks
from tidings.steward.link_mail import LinkMail
from tidings.wire import link_exchange
from tidings.wire.link_exchange import LinkedMail, Person, Statement
from tidings.wire.links import Token
from tidings_testing.links import LINK_PROBES, run_link_suite, suite
from tidings_testing.links.suite import LAST
from tidings_testing.security import Probe, ProbeResult, Report
from tidings_testing.security.report import broken


@pytest.fixture(scope="module")
def told() -> tuple[Report, list[str]]:
    """One run of the whole suite."""
    lines: list[str] = []
    return asyncio.run(run_link_suite(lines.append)), lines


@pytest.mark.parametrize("probe", LINK_PROBES, ids=lambda probe: probe.name)
@pytest.mark.timeout(180)
def test_no_lie_of_a_peer_is_believed(told: tuple[Report, list[str]], probe: Probe) -> None:
    result = _result(told[0], probe.name)
    assert result.outcome in ("held", "refused"), f"{result.title} {result.evidence}"
    assert result.evidence


def test_the_report_has_a_line_for_each_probe_and_is_json(told: tuple[Report, list[str]]) -> None:
    report, lines = told
    assert len(lines) == len(report.results) == len(LINK_PROBES) == len({probe.name for probe in LINK_PROBES})
    assert json.loads(report.to_json())["ok"] is True
    assert {probe.finding for probe in LINK_PROBES} == {f"L{number}" for number in range(1, 9)}
    assert all(probe.title.endswith(".") for probe in LINK_PROBES)
    assert LINK_PROBES[-1].name == LAST


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    assert asyncio.run(run_link_suite(folder=tmp_path, only={"unsigned"})).ok
    assert list(tmp_path.iterdir()) == []


def _result(report: Report, name: str) -> ProbeResult:
    return next(result for result in report.results if result.name == name)


# --- the suite can fail ---


def _everything_is_mapped(self: LinkDefinition, origin: str, channel: str) -> str:
    del self, origin, channel
    return "general"


def _believed(*_arguments: Any) -> None:
    return None


def _guessable(secret: bytes, *name: str) -> str:
    del secret
    return name[2]


async def _agreed(self: engine.Direction) -> None:
    del self


def _unverified(said: Statement, *_arguments: Any) -> Person:
    return msgspec.json.decode(said.text, type=Person)


async def _all_listed(*_arguments: Any) -> frozenset[str]:
    return frozenset()


async def _ours(*_arguments: Any) -> bool:
    return True


def _unbounded_names(self: Operation, data: bytes) -> Any:
    """Reads a token without the bounds of its type."""
    fields = msgspec.json.decode(data)
    if self.name != "link page":
        return msgspec.convert(fields, self.answer)
    through, fields["through"] = fields["through"], {"space": "", "epoch": "", "seq": 0}
    page = msgspec.convert(fields, LinkPageAnswer)
    page.through = Token(**through)
    return page


#: probe -> the rule it tries, and what is put in its place
RULES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "forged_sender": (judging, "verifies", lambda *_arguments: True),
    "foreign_channel": (LinkDefinition, "ours", _everything_is_mapped),
    "oversize_page": (engine, "check_page", _believed),
    "records_out_of_order": (judging, "_check_records", _believed),
    "gaps_that_cannot_be": (engine, "check_gap", _believed),
    "endless_names": (Operation, "read_answer", _unbounded_names),
    "ids_guessed_in_advance": (link_store, "message_id", _guessable),
    "revoked_in_the_middle": (engine.Direction, "_check_agreed", _agreed),
    "not_listed": (LocalDestination, "unlisted", _all_listed),
    "agents_that_are_none": (people_round, "read_statement", _unverified),
    "mail_that_is_none": (LinkedMail, "is_signed", lambda *_arguments: True),
    "mail_out_of_order": (mail_round, "_check", _believed),
    "mail_of_others": (LinkMail, "_is_ours", _ours),
    "tasks_that_are_none": (link_exchange, "verifies", lambda *_arguments: True),
    "tasks_of_others": (link_tasks, "_is_result", lambda *_arguments: True),
}


@pytest.mark.parametrize("probe", RULES)
@pytest.mark.timeout(120)
async def test_the_suite_finds_that_a_rule_is_gone(monkeypatch: pytest.MonkeyPatch, probe: str) -> None:
    monkeypatch.setattr(*RULES[probe])
    report = await run_link_suite(only={probe})
    assert not report.ok
    assert _result(report, probe).outcome == "BROKEN", _result(report, probe)


# --- on the command line ---


def test_the_command_says_what_was_tried_and_fails_if_something_was_believed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def believes(_stage: Any) -> Any:
        return broken("it was read")

    good = next(probe for probe in LINK_PROBES if probe.name == "unsigned")
    last = LINK_PROBES[-1]
    monkeypatch.setattr(suite, "LINK_PROBES", [good, last])
    assert main(["doctor", "link", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    monkeypatch.setattr(suite, "LINK_PROBES", [Probe("gullible", "L1", "Believe it.", believes), last])
    assert main(["doctor", "link"]) == UnhealthyError.exit_code
    said = capsys.readouterr()
    assert "Believe it." in said.out
    assert "1 of 2 lies were believed or did harm (gullible)" in said.err.replace("\n", " ")
