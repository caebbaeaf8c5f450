"""Requests of administrators: which services they reach, and what null, missing and unknown fields mean."""

from typing import Any, get_args

import msgspec
import pytest

from tidings.contract.admin import ChangeSpaceRequest, GrantRequest, RedeemRequest, SetLinkRequest
from tidings.contract.catalogue import OPERATIONS, services_of
from tidings.contract.core import Caller, CallerKind
from tidings.errors import UsageError
from tidings.steward.admin_handlers import changed_space
from tidings.wire.rulings import Access, Defaults, Link, Parts, Space
from tidings.wire.subjects import SERVICES

CALLER = Caller("UADMIN", "operation-1")
BEFORE = Space(
    op="before", defaults=Defaults(cls="live", replay=False), parts=Parts(deliver="off"), keep_age=60, keep_bytes=1_000
)


def test_a_service_has_one_kind_of_caller_and_subjects_know_every_service() -> None:
    """The broker grants whole services: one with two kinds of callers would be open to both."""
    reached = [service for caller in get_args(CallerKind) for service in services_of(caller)]
    assert len(reached) == len(set(reached))
    assert set(reached) == set(SERVICES)
    assert {each.service for each in OPERATIONS.values()} <= set(reached)


@pytest.mark.parametrize(
    ("request_type", "record", "without"),
    [
        (GrantRequest, Access, {"op", "v", "at", "revoked"}),
        (SetLinkRequest, Link, {"op", "v", "at", "state"}),
        (ChangeSpaceRequest, Space, {"op", "v", "at", "steward_key"}),
    ],
)
def test_a_request_has_the_fields_of_the_record_it_writes(
    request_type: Any, record: type[msgspec.Struct], without: set[str]
) -> None:
    fields = set(request_type.operation.fields) - {"id"}
    assert fields == set(record.__struct_encode_fields__) - without


def changed(**fields: Any) -> Space:
    request = ChangeSpaceRequest.operation.decode(fields)
    assert isinstance(request, ChangeSpaceRequest)
    return changed_space(BEFORE, CALLER, request)


def test_settings_that_are_not_mentioned_stay_and_null_resets_one() -> None:
    found = changed(keep_age=None, defaults={"class": None, "replay_window": 5}, parts={"archive": "on"})
    assert (found.keep_age, found.keep_bytes) == (None, 1_000)
    assert found.defaults == Defaults(cls=None, replay=False, replay_window=5)
    assert found.parts == Parts(deliver="off", archive="on")
    assert (found.op, found.steward_key) == ("operation-1", None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steward_key": "x"}, "unknown field 'steward_key'"),
        ({"channels": None}, "`channels`: expected"),
        ({"defaults": None}, "`defaults`: expected object, got null"),
        ({"defaults": {"x": 1}}, "`defaults`: object contains unknown field x"),
        ({"parts": {"deliver": None}}, "`parts.deliver`: expected"),
        ({"keep_age": -1}, "`keep_age`: expected int >= 0"),
        ({"keep_bytes": "1G"}, "`keep_bytes`: expected int"),
    ],
)
def test_a_setting_that_does_not_exist_or_does_not_fit_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        changed(**fields)


@pytest.mark.parametrize("name", sorted({*RedeemRequest.operation.fields} - {"text"}))
def test_null_is_refused_where_a_missing_field_has_a_default(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}`: expected str, got null"):
        RedeemRequest.operation.decode({"id": "U", "sig": "s", name: None})
