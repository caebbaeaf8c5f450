"""How often the steward does what it does by itself, and how patient it is with others: one record of seconds.

The values are those of a space in use; tests run with shorter ones. What happens at each beat is in the module of what
is tended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often the steward does what it does by itself, in seconds."""

    lease_ttl: float = 3.0
    gate: float = 1.0
    #: a log that nobody wrote to for so long is written to when somebody asks how the space is
    log_write: float = 60.0
    retention: float = 10.0
    marks: float = 2.0
    #: looks at marks and counts of the store
    store: float = 30.0
    #: reads everything the store holds
    reading: float = 24 * 3600.0
    #: how often it looks at what links share now
    links: float = 0.5
    #: how often it looks for senders that flood
    quotas: float = 5.0
    #: how often it looks for messages that no reader shows
    voids: float = 5.0
    #: how often it looks for streams that store nothing any more
    stuck: float = 10.0
    #: how often it looks at what is new in the streams all share
    shares: float = 0.25
    #: deltas of the roster are at least this far apart
    roster: float = 0.25
    #: and at most this far, while anyone is online
    roster_heartbeat: float = 5.0
    #: an agent that did not beat for so long is offline
    presence: float = 25.0
    mail: float = 10.0
    #: unread direct messages are given back to their sender's knowledge after this long
    mail_ttl: float = 30 * 24 * 3600.0
    #: how long a direct message to nobody is kept, should its target just be on its way in
    mail_grace: float = 60.0
    #: a worker that does not beat for so long has died
    task_silence: float = 30.0
    task_ack_wait: float = 30.0
    #: before a failed task is tried again; doubles with each try
    task_backoff: float = 2.0
    #: tasks that ended are kept longer than the broker remembers message ids, so that a repeat is known as one
    task_keep: float = 900.0
