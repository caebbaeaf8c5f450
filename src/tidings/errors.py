"""Every error Tidings raises, in one tree.

    TidingsError
    ├── UsageError                  the caller asked for something that cannot be meant
    │   ├── InvalidName             a space, channel, pattern, agent or role name does not fit the grammar
    │   ├── UnknownPeer             no agent of that name or id in this space
    │   ├── AmbiguousPeer           several agents could be meant
    │   ├── UnknownMessage          no message of that id or number is kept here
    │   └── ConfigError             a setting or a file of ours says something impossible
    │       └── DiskFull            a file cannot be written because its disk or a quota is full
    ├── WireError                   bytes that are not what they claim to be
    │   ├── MalformedMessage        not strict JSON, or not a message
    │   ├── MalformedRecord         a ruling record that does not decode
    │   ├── MalformedFrame          a delivery that does not open
    │   ├── MalformedDigest         what another space says of its messages cannot be true, or is too much
    │   ├── HeaderRefused           a record whose own headers a sender may not set
    │   ├── TooLarge                payload beyond the limit, found before sending
    │   ├── PageRefused             the peer of a link answered what no log can answer
    │   └── BadSignature            missing or wrong signature
    ├── DeniedError                 the access record or the broker does not allow it
    │   ├── AuthRevoked             this credential was revoked
    │   ├── LinkEnded               the time a link was granted for is over
    │   ├── EndedThere              the other space of a link does not let us in any more
    │   ├── WrongSpace              another space answers where the peer of a link should
    │   └── NoSession               the host does not know this program: no token, or one that ended
    ├── UnreachableError            nobody answered
    │   ├── BrokerUnreachable       no broker on that address
    │   ├── ConnectionLost          the connection went while we waited for an answer
    │   ├── UntrustedServer         its certificate is not one that the address trusts; it was told nothing
    │   ├── Reconnecting            the connection is being rebuilt; ask again, or wait
    │   ├── StewardUnreachable      the broker answers, the steward does not
    │   ├── HostUnreachable         no host answers on this machine
    │   ├── WorkerUnreachable       no link worker answers for this space
    │   └── PeerUnheard             who is in a linked space is not told now: ask again, or resume the link
    ├── ConflictError               somebody else holds it, or it changed meanwhile
    │   ├── LeaseHeld               another steward holds the space
    │   ├── LeaseLost               we held it; the broker refused a stale write
    │   ├── NameTaken               an agent of that name exists
    │   ├── IdBurned                somebody else used this message id first
    │   ├── IdReused                this id was accepted before, for another message
    │   ├── WrongState              what is kept here is not in a state that allows it
    │   ├── Superseded              a newer session of this identity receives now
    │   ├── LinkConflict            the ledger of a link has it otherwise, or another worker went on meanwhile
    │   ├── TokenRefused            a token that goes back, or is one of another log
    │   ├── HostRuns                another host runs in this home
    │   └── SpaceBusy               another process runs or administers this space
    ├── NotLookedFor                whether it is stored already could not be asked; nothing was sent
    ├── OutcomeUnknown              it may have happened or not; read before you repeat
    ├── UnhealthyError              it runs, but not as promised
    │   ├── LogFull                 the gate is closed: no new messages until space is made
    │   ├── MailboxFull             too many unread messages of yours in somebody's mailbox
    │   ├── QueueFull               too many unfinished tasks of yours wait for a role
    │   ├── QuarantineFull          a link has as much in quarantine as it may, and takes nothing more
    │   ├── LinkShareSpent          as much came over a link within a day as may; more comes later
    │   ├── HostBusy                the host has as much at hand as it takes; ask again
    │   ├── LogRegressed            the log went backwards (power cut, restore)
    │   ├── DeliveryLost            something owed to this agent will not be delivered; it says how many and where
    │   ├── LogGap                  a sequence is missing above the floor
    │   └── StreamMismatch          a stream exists with settings we cannot reconcile
    ├── StoreError                  the database of this host cannot do it; nothing was changed
    │   ├── StoreFull               no room: the disk or a quota is full
    │   ├── StoreReadOnly           it can be read and not written
    │   ├── StoreBroken             it is damaged or not ours, and is never replaced without being told to
    │   ├── StoreTooNew             a newer Tidings wrote it
    │   ├── StoreBusy               another process holds it
    │   └── StoreClosed             it was closed before this was done
    ├── TaskDead                    nobody finished a task: it is a dead letter, or was dropped
    ├── DeadLetter                  a message was given back too often: the steward keeps it, with the error
    ├── BrokerFailed                nats-server could not be started or died
    └── PrerequisiteMissing         something this machine needs is not there

The message says what failed, on which named thing, and what to do next. Each class has the exit code of the
command line (`exit_code`), so that scripts and people read the same outcome.
"""

from __future__ import annotations

from typing import ClassVar


class TidingsError(Exception):
    """Root of everything Tidings raises on purpose."""

    exit_code: ClassVar[int] = 1
    #: stable word for JSON answers; the class name says the same to Python
    code: ClassVar[str] = "failed"


class UsageError(TidingsError):
    exit_code = 2
    code = "usage"


class InvalidName(UsageError):
    code = "invalid_name"


class UnknownPeer(UsageError):
    code = "unknown_peer"


class AmbiguousPeer(UsageError):
    code = "ambiguous_peer"


class UnknownMessage(UsageError):
    code = "unknown_message"


class ConfigError(UsageError):
    code = "config"


class DiskFull(ConfigError):
    exit_code = 3
    code = "disk_full"


class WireError(TidingsError):
    code = "wire"


class MalformedMessage(WireError):
    code = "malformed_message"


class MalformedRecord(WireError):
    code = "malformed_record"


class MalformedFrame(WireError):
    code = "malformed_frame"


class MalformedDigest(WireError):
    code = "malformed_digest"


class HeaderRefused(WireError):
    code = "header_refused"


class TooLarge(WireError):
    code = "too_large"


class PageRefused(WireError):
    code = "page_refused"


class BadSignature(WireError):
    code = "bad_signature"


class DeniedError(TidingsError):
    exit_code = 4
    code = "denied"


class AuthRevoked(DeniedError):
    code = "revoked"


class LinkEnded(DeniedError):
    code = "link_ended"


class EndedThere(DeniedError):
    code = "ended_there"


class WrongSpace(DeniedError):
    code = "wrong_space"


class NoSession(DeniedError):
    code = "no_session"


class UnreachableError(TidingsError):
    exit_code = 5
    code = "unreachable"


class BrokerUnreachable(UnreachableError):
    code = "broker_unreachable"


class ConnectionLost(UnreachableError):
    code = "connection_lost"


class UntrustedServer(UnreachableError):
    code = "untrusted_server"


class Reconnecting(UnreachableError):
    code = "reconnecting"


class StewardUnreachable(UnreachableError):
    code = "steward_unreachable"


class HostUnreachable(UnreachableError):
    code = "host_unreachable"


class WorkerUnreachable(UnreachableError):
    code = "worker_unreachable"


class PeerUnheard(UnreachableError):
    code = "peer_unheard"


class ConflictError(TidingsError):
    exit_code = 6
    code = "conflict"


class LeaseHeld(ConflictError):
    code = "lease_held"


class LeaseLost(ConflictError):
    code = "lease_lost"


class NameTaken(ConflictError):
    code = "name_taken"


class IdBurned(ConflictError):
    code = "id_burned"


class IdReused(ConflictError):
    code = "id_reused"


class WrongState(ConflictError):
    code = "wrong_state"


class Superseded(ConflictError):
    code = "superseded"


class LinkConflict(ConflictError):
    code = "link_conflict"


class TokenRefused(ConflictError):
    code = "token_refused"


class HostRuns(ConflictError):
    code = "host_runs"


class SpaceBusy(ConflictError):
    code = "space_busy"


class NotLookedFor(TidingsError):
    code = "not_looked_for"


class OutcomeUnknown(TidingsError):
    code = "outcome_unknown"


class UnhealthyError(TidingsError):
    exit_code = 3
    code = "unhealthy"


class LogFull(UnhealthyError):
    code = "log_full"


class MailboxFull(UnhealthyError):
    code = "mailbox_full"


class QueueFull(UnhealthyError):
    code = "queue_full"


class QuarantineFull(UnhealthyError):
    code = "quarantine_full"


class LinkShareSpent(UnhealthyError):
    code = "link_share_spent"


class HostBusy(UnhealthyError):
    code = "host_busy"


class LogRegressed(UnhealthyError):
    code = "log_regressed"


class DeliveryLost(UnhealthyError):
    """`channel` is None if it is not known which; `first` to `last` is the range of the log it lies in."""

    code = "delivery_lost"

    def __init__(
        self,
        message: str,
        channel: str | None = None,
        first: int = 0,
        last: int = 0,
        count: int = 0,
        cause: str = "unknown",
    ) -> None:
        super().__init__(message)
        self.channel, self.first, self.last, self.count, self.cause = channel, first, last, count, cause


class LogGap(UnhealthyError):
    code = "log_gap"


class StreamMismatch(UnhealthyError):
    code = "stream_mismatch"


class StoreError(TidingsError):
    exit_code = 3
    code = "store"


class StoreFull(StoreError):
    code = "store_full"


class StoreReadOnly(StoreError):
    code = "store_read_only"


class StoreBroken(StoreError):
    code = "store_broken"


class StoreTooNew(StoreError):
    code = "store_too_new"


class StoreBusy(StoreError):
    exit_code = 6
    code = "store_busy"


class StoreClosed(StoreError):
    code = "store_closed"


class TaskDead(TidingsError):
    """`result` says what is known of the task: its cause, its attempts, why each failed."""

    code = "task_dead"

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class DeadLetter(TidingsError):
    code = "dead_letter"


class BrokerFailed(TidingsError):
    code = "broker_failed"


class PrerequisiteMissing(TidingsError):
    code = "prerequisite_missing"


def _by_code(cls: type[TidingsError]) -> dict[str, type[TidingsError]]:
    found = {cls.code: cls}
    for each in cls.__subclasses__():
        found |= _by_code(each)
    return found


#: the class of each code, for whoever reads an answer of another process
ERRORS_BY_CODE = _by_code(TidingsError)
