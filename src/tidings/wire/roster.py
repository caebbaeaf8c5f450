"""Presence on the wire: what an agent beats, a row of the roster, and the signed delta every agent hears.

A beat is a claim about the sender's own state and nothing else: name and roles of a row come from the access record.
Channel names are known only to those who may read them, so a row tells the mode of an agent's attention and never its
per-channel levels. Anybody can make an answer of the broker arrive on `td.S.live.roster`: `open_delta` takes only what
came on exactly that subject with the steward's signature over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidings.errors import MalformedMessage
from tidings.wire import rulings, strict_json
from tidings.wire.names import check_pattern
from tidings.wire.records import Fields, values_of
from tidings.wire.signing import SIGNATURE_HEADER, KeyPair
from tidings.wire.subjects import Subjects

Status = Literal["idle", "working", "waiting", "offline"]
Mode = Literal["open", "dnd", "focus"]
Level = Literal["normal", "quiet", "muted"]

#: the destination under the signature of a delta: the subject after `td.S.`
DESTINATION = "live.roster"
MAX_ACTIVITY = 200
MAX_LEVELS = 64
# no control characters: a row ends in terminals and logs
_LINE = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*(?![\s\S])"
Activity = Annotated[str, Meta(max_length=MAX_ACTIVITY, pattern=_LINE)]
Model = Annotated[str, Meta(max_length=100, pattern=_LINE)]
Session = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{8,64}(?![\s\S])")]
Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class Attention(msgspec.Struct, frozen=True):
    """What may wake an agent: a mode for everything, and a level for each channel or pattern it names."""

    mode: Mode = "open"
    channels: dict[str, Level] = {}

    def __post_init__(self) -> None:
        if len(self.channels) > MAX_LEVELS:
            raise ValueError(f"attention names at most {MAX_LEVELS} channels or patterns, not {len(self.channels)}")
        for pattern in self.channels:
            check_pattern(pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEntry:
    """A row of the roster. `last_seen` of somebody online is as old as the row; of somebody offline it is exact."""

    id: str
    name: str
    roles: tuple[str, ...] = ()
    status: Status | Literal["unknown"] = "offline"
    activity: str | None = None
    model: str | None = None
    #: mode of its attention; None while it is offline
    attention: Mode | None = None
    #: None if nobody remembers
    last_seen: str | None = None
    #: number of the session that receives for this agent; a higher one supersedes a lower one
    session: int | None = None
    #: sequence of its access record: when it changes, the agent fetches its new credential
    access: int = 0
    #: sequence of the newest change of its memberships: when it changes, its programs ask which they are now
    moved: int = 0
    #: number of the newest dead letter it wants again: its receiving program fetches it; 0 if there is none
    wanted: int = 0
    #: counts what it is told of losses: when it changes, its programs take a snapshot, which has them
    told: int = 0
    #: number of the attention the steward keeps for this agent; a higher one is a later word of it
    attention_number: int | None = None
    #: whether direct messages come to it; of an agent of a linked space they need not
    direct: bool = True
    #: of an agent of a linked space: the id of that, and whether roles there can be asked
    space: str = ""
    tasks: bool = False

    @property
    def online(self) -> bool:
        return self.status != "offline"

    @property
    def elsewhere(self) -> str:
        """The linked space it is an agent of; empty if that is this one. How it is there is not told."""
        return self.name.partition("@")[2]

    @property
    def own_name(self) -> str:
        """What it is called in its own space; messages carry that."""
        return self.name.partition("@")[0]


#: seconds a record may wait for its copies before they are called late: a batch and a look of the steward take as long
TOLERATED_S = 3.0


class Backstop(msgspec.Struct, frozen=True):
    """How far durable copies are: whether somebody makes them, how many records they lag, and where they are."""

    running: bool = False
    behind: int | None = None
    floor: Count = 0
    #: seconds since the steward knows of the oldest record that is behind
    late_s: float = 0.0
    #: nobody makes them yet: who will is being started
    starting: bool = False

    @property
    def delay(self) -> str:
        """What to say of durable copies that are late; empty if they are not."""
        if self.running and (not self.behind or self.late_s < TOLERATED_S):
            return ""
        late = "durable copies delayed" + (f", {self.behind:,} behind" if self.behind else "")
        return late if self.running else f"durable delivery is {'starting' if self.starting else 'not running'}: {late}"


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What changed since the delta before it. `n` counts without holes while `boot`, the steward's term, lasts."""

    boot: str
    n: Count
    rows: tuple[AgentEntry, ...] = ()
    gone: tuple[str, ...] = ()
    head: Count = 0
    floor: Count = 0
    backstop: Backstop = Backstop()
    #: sequence of the newest link record: whoever knows only older ones asks for the links of the space
    links: Count = 0
    #: linked spaces of whose agents nobody is told now, though the link shares them -> `starting` or `paused`
    unheard: dict[str, str] = {}


def sign_delta(key: KeyPair, space_id: str, delta: Delta) -> tuple[bytes, dict[str, str]]:
    """Payload and headers of a delta."""
    payload = msgspec.json.encode(delta)
    return payload, {SIGNATURE_HEADER: rulings.sign_ruling(key, space_id, DESTINATION, payload)}


def open_delta(
    subjects: Subjects, space_id: str, steward_key: str, subject: str, headers: Fields, payload: bytes
) -> Delta | str:
    """The delta, or the reason it is dropped: `wrong_subject`, `unsigned`, `signature`, `malformed`."""
    if subject != subjects.live_roster:
        return "wrong_subject"
    signatures = values_of(headers, SIGNATURE_HEADER)
    if len(signatures) != 1:
        return "unsigned"
    if not rulings.verify_ruling(signatures[0], space_id, steward_key, DESTINATION, payload):
        return "signature"
    try:
        return msgspec.convert(strict_json.loads(payload), Delta)
    except (msgspec.ValidationError, MalformedMessage):
        return "malformed"
