"""The key a steward rules with now, followed from one that is known, through the records that named each next one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidings.errors import MalformedRecord
from tidings.model.projection import Table
from tidings.nats.jetstream import StoredRecord
from tidings.server.log import log_record
from tidings.wire.records import parse_time
from tidings.wire.subjects import Subjects


class FollowedKey(NamedTuple):
    key: str
    #: records that did not verify, and changed nothing
    refused: int


def followed_key(subjects: Subjects, space_id: str, known: str, rotations: Iterable[Mapping[str, Any]]) -> FollowedKey:
    """`rotations` are records as `steward/history.raw_record` returns them. What does not verify from `known` on is
    counted; what is no record at all is MalformedRecord."""
    chain, refused = Table(subjects, space_id, known), 0
    try:
        records = sorted(map(_stored, rotations), key=lambda each: each.seq)
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
        raise MalformedRecord(f"the records that name keys of a steward cannot be read: {error}") from error
    for record in records:
        refused += chain.apply(log_record(record)).is_void
    return FollowedKey(chain.steward_key, refused)


def _stored(line: Mapping[str, Any]) -> StoredRecord:
    headers, payload = base64.b64decode(line["headers"]), base64.b64decode(line["payload"])
    return StoredRecord(int(line["seq"]), parse_time(line["time"]), str(line["subject"]), headers, payload)
