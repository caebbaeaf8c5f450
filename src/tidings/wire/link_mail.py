"""Direct messages and their receipts on the way over a link, as JSON carries them; pure.

What comes from another space may be anything: what is no page of mail is `MalformedRecord`. Whether a message in it was
signed by whom it is from, for whom it is to and in the space it came from, is `is_signed`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from tidings.errors import InvalidName, MalformedMessage, MalformedRecord
from tidings.wire import message as wire_message
from tidings.wire.ids import is_message_id
from tidings.wire.marks import Stamp
from tidings.wire.message import MAX_PAYLOAD
from tidings.wire.names import check_agent_id
from tidings.wire.operations import MOST
from tidings.wire.signing import verifies
from tidings.wire.states import ReceiptStage

#: messages of one page, and receipts of one request
MAIL_PER_PAGE: Final = 64
RECEIPTS_AT_ONCE: Final = 100
#: records that whoever asks for mail remembers, and names
CLAIMS_AT_ONCE: Final = 16
#: what the space of its reader may say of a message
TOLD_STAGES: Final = (
    ReceiptStage.DELIVERED,
    ReceiptStage.READ,
    ReceiptStage.EXPIRED,
    ReceiptStage.UNDELIVERABLE,
    ReceiptStage.VOID,
)
_Seq = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class LinkedMail(msgspec.Struct, frozen=True, kw_only=True):
    """A direct message as the space of its sender has it, at `seq` of its mail."""

    seq: _Seq
    sender: _Text
    to: _Text
    sig: _Text
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]
    #: tells it from another record at the same sequence of mail that was set back (`marks.py`)
    mark: _Text = ""

    def is_signed(self, origin: str) -> bool:
        return verifies(self.sig, origin, "dm", self.sender, self.to, self.payload)

    @property
    def id(self) -> str:
        """The id of its message; MalformedRecord if it is none, or says that it is from somebody else."""
        try:
            found = wire_message.decode(self.payload)
        except MalformedMessage as error:
            raise MalformedRecord(f"mail {self.seq} is no message: {error}") from error
        if found.sender.id != self.sender:
            raise MalformedRecord(f"mail {self.seq} is by {self.sender}, and says that it is by {found.sender.id}")
        return found.id


class MailPage(msgspec.Struct, frozen=True, kw_only=True):
    """What follows a sequence of the mail of an epoch, for those who were known; all of it from `after` up to `through`
    is here. `mark` is of the record at `through`, whosever it is; empty if there is none."""

    mail: Annotated[tuple[LinkedMail, ...], msgspec.Meta(max_length=MAIL_PER_PAGE)]
    epoch: _Text
    people: _Text
    through: _Seq
    more: bool
    #: not above what was asked for; None: a space that knows nothing of marks goes on from what was asked for
    after: _Seq | None = None
    mark: _Text = ""
    #: another record is at a sequence that the asker remembers
    set_back: bool = False
    #: its broker, by its process: another one may have forgotten what was told last
    broker: _Text = ""


class ToldReceipt(msgspec.Struct, frozen=True):
    """What became of a direct message, as the space of its reader tells the space of its sender."""

    sender: str
    id: str
    to: str
    stage: ReceiptStage
    #: where it is in the mail of its sender's space
    seq: int
    why: _Text = ""


_Receipts = Annotated[list[ToldReceipt], msgspec.Meta(max_length=RECEIPTS_AT_ONCE)]
_Claims = Annotated[list[Stamp], msgspec.Meta(max_length=CLAIMS_AT_ONCE)]


def read_mail(said: Any) -> MailPage:
    """The page in an answer of another space."""
    try:
        page = msgspec.convert(said, MailPage)
        for each in page.mail:
            check_agent_id(each.sender)
            check_agent_id(each.to)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"this is no page of mail: {str(error)[:200]}") from error
    return page


def read_claims(said: Any) -> list[Stamp]:
    """The records that another space remembers, newest first; MalformedRecord if that cannot be read."""
    try:
        return sorted(msgspec.convert(said, _Claims), key=lambda each: each.seq, reverse=True)
    except msgspec.ValidationError as error:
        raise MalformedRecord(f"`marks` are up to {CLAIMS_AT_ONCE} sequences with marks: {error}") from error


def read_receipts(said: Any) -> list[ToldReceipt]:
    """What another space says of direct messages; MalformedRecord if it cannot be read."""
    try:
        found: list[ToldReceipt] = msgspec.convert(said, _Receipts)
        for each in found:
            check_agent_id(each.sender)
            check_agent_id(each.to)
    except (msgspec.ValidationError, InvalidName) as error:
        raise MalformedRecord(f"these are no receipts: {str(error)[:200]}") from error
    if any(each.stage not in TOLD_STAGES or not is_message_id(each.id) or each.seq < 0 for each in found):
        raise MalformedRecord(f"a receipt of a link has an id, and a stage of {', '.join(TOLD_STAGES)}")
    return found
