"""The tables of `host.db`, and the rules that hold whatever the code does.

A row without space, sender and destination cannot be written; a lease exists exactly while a row is in flight; what is
confirmed has a place in the broker's log; a terminal state never changes; who sent what where never changes; no id is
ever freed; at most one row of a lane is in flight. Times are milliseconds since 1970 by the clock of this host.

The rules of the outbox are checked with every row that is accepted, leased and confirmed, so they are written the way
SQLite is quick at: one CASE of the state instead of a check for each pair of columns, and comparisons instead of lists
of more than two, for which it builds a table each time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from tidings.util.database import Database, Schema

P = ParamSpec("P")
T = TypeVar("T")

#: "Tdgs"
APPLICATION_ID = 0x54646773

_OUTBOX = """
CREATE TABLE outbox (
  row INTEGER PRIMARY KEY AUTOINCREMENT,
  space TEXT NOT NULL,
  sender TEXT NOT NULL,
  id TEXT NOT NULL,
  fingerprint BLOB NOT NULL,
  kind TEXT NOT NULL,
  destination TEXT NOT NULL,
  subject TEXT NOT NULL,
  priority TEXT NOT NULL,
  payload BLOB,
  signature TEXT,
  accepted_at INTEGER NOT NULL,
  max_age INTEGER NOT NULL,
  state TEXT NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  next_attempt_at INTEGER NOT NULL,
  lease_owner TEXT,
  lease_until INTEGER,
  cancel_asked INTEGER NOT NULL DEFAULT 0,
  -- an attempt ended without an answer: the broker may hold it
  doubt INTEGER NOT NULL DEFAULT 0,
  seq INTEGER,
  stream TEXT,
  -- which run of the broker acknowledged it
  incarnation TEXT,
  confirmed_at INTEGER,
  -- the same moment on a clock that never jumps
  confirmed_tick INTEGER,
  -- acknowledged after it had ended otherwise
  late_seq INTEGER,
  late_incarnation TEXT,
  code TEXT,
  words TEXT,
  ended_at INTEGER,
  supersedes INTEGER REFERENCES outbox (row),
  superseded_by INTEGER REFERENCES outbox (row),
  UNIQUE (space, sender, id),
  CHECK (space <> '' AND sender <> '' AND id <> '' AND destination <> '' AND subject <> '' AND max_age > 0
    AND typeof(fingerprint) = 'blob' AND length(fingerprint) = 32
    AND (kind = 'chat' OR kind = 'dm' OR kind = 'task')
    AND (priority = 'next' OR priority = 'now' OR priority = 'low')),
  CHECK (attempts >= 0 AND cancel_asked IN (0, 1) AND doubt IN (0, 1) AND CASE state
    WHEN 'pending' THEN cancel_asked = 0 AND payload IS NOT NULL AND signature IS NOT NULL
      AND coalesce(lease_owner, lease_until, seq, stream, incarnation, confirmed_at, confirmed_tick, ended_at,
        late_seq, late_incarnation, superseded_by) IS NULL
    WHEN 'inflight' THEN lease_owner IS NOT NULL AND lease_until IS NOT NULL
      AND payload IS NOT NULL AND signature IS NOT NULL
      AND coalesce(seq, stream, incarnation, confirmed_at, confirmed_tick, ended_at,
        late_seq, late_incarnation, superseded_by) IS NULL
    WHEN 'confirmed' THEN payload IS NOT NULL AND signature IS NOT NULL
      AND seq IS NOT NULL AND stream IS NOT NULL AND incarnation IS NOT NULL
      AND confirmed_at IS NOT NULL AND confirmed_tick IS NOT NULL
      AND coalesce(lease_owner, lease_until, ended_at, late_seq, late_incarnation, superseded_by) IS NULL
    WHEN 'done' THEN ended_at IS NOT NULL AND (payload IS NULL) = (signature IS NULL)
      AND seq IS NOT NULL AND stream IS NOT NULL AND incarnation IS NOT NULL
      AND confirmed_at IS NOT NULL AND confirmed_tick IS NOT NULL
      AND coalesce(lease_owner, lease_until, late_seq, late_incarnation, superseded_by) IS NULL
    ELSE (state = 'cancelled' OR (state = 'dead' AND cancel_asked = 0))
      AND ended_at IS NOT NULL AND code IS NOT NULL AND words IS NOT NULL
      AND payload IS NOT NULL AND signature IS NOT NULL
      AND (late_seq IS NULL) = (late_incarnation IS NULL)
      AND (superseded_by IS NULL OR superseded_by > row)
      AND coalesce(lease_owner, lease_until, seq, stream, incarnation, confirmed_at, confirmed_tick) IS NULL
    END),
  CHECK (supersedes IS NULL OR supersedes < row)
);

CREATE INDEX outbox_owed ON outbox (space, sender, kind, destination, row) WHERE state IN ('pending', 'inflight');
CREATE UNIQUE INDEX outbox_lane ON outbox (space, sender, kind, destination) WHERE state = 'inflight';
CREATE INDEX outbox_confirmed ON outbox (space, sender, kind, destination, incarnation) WHERE state = 'confirmed';
CREATE INDEX outbox_kept ON outbox (ended_at) WHERE state = 'done' AND payload IS NOT NULL;
CREATE INDEX outbox_failed ON outbox (space, state) WHERE state IN ('dead', 'cancelled');
CREATE UNIQUE INDEX outbox_replaces ON outbox (supersedes) WHERE supersedes IS NOT NULL;
CREATE UNIQUE INDEX outbox_replaced ON outbox (superseded_by) WHERE superseded_by IS NOT NULL;

CREATE TRIGGER outbox_begins_pending BEFORE INSERT ON outbox
WHEN NEW.state <> 'pending' OR NEW.attempts <> 0
BEGIN SELECT RAISE(ABORT, 'a row of the outbox begins pending'); END;

CREATE TRIGGER outbox_identity BEFORE UPDATE OF
  row, space, sender, id, fingerprint, kind, destination, subject, priority, accepted_at, max_age, supersedes ON outbox
BEGIN SELECT RAISE(ABORT, 'who sent what where never changes'); END;

CREATE TRIGGER outbox_payload BEFORE UPDATE OF payload, signature ON outbox
WHEN NOT (OLD.state = 'done' AND NEW.payload IS NULL)
BEGIN SELECT RAISE(ABORT, 'a payload never changes and goes only with a done row'); END;

CREATE TRIGGER outbox_moves BEFORE UPDATE OF
  state, attempts, next_attempt_at, lease_owner, lease_until, cancel_asked, doubt, seq, stream, incarnation,
  confirmed_at, confirmed_tick, code, words, ended_at ON outbox
WHEN NEW.attempts < OLD.attempts OR NOT CASE OLD.state
  WHEN 'pending' THEN NEW.state = 'inflight' OR NEW.state = 'dead' OR NEW.state = 'cancelled'
  WHEN 'inflight' THEN NEW.state <> 'done'
    AND (NEW.state <> 'inflight' OR (NEW.lease_owner = OLD.lease_owner AND NEW.attempts = OLD.attempts))
  WHEN 'confirmed' THEN NEW.state = 'confirmed' OR NEW.state = 'done' OR NEW.state = 'pending'
  ELSE 0 END
BEGIN
  SELECT RAISE(ABORT, 'a terminal state never changes') WHERE OLD.ended_at IS NOT NULL;
  SELECT RAISE(ABORT, 'attempts are not taken back') WHERE NEW.attempts < OLD.attempts;
  SELECT RAISE(ABORT, 'no such move of a row of the outbox');
END;

CREATE TRIGGER outbox_late BEFORE UPDATE OF late_seq, late_incarnation ON outbox
WHEN OLD.late_seq IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a late acknowledgement is noted once'); END;

CREATE TRIGGER outbox_successor BEFORE UPDATE OF superseded_by ON outbox
WHEN OLD.superseded_by IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a row has one successor'); END;

CREATE TRIGGER outbox_for_ever BEFORE DELETE ON outbox
BEGIN SELECT RAISE(ABORT, 'no id is ever freed'); END;

CREATE TABLE outbox_space (
  space TEXT PRIMARY KEY CHECK (space <> ''),
  -- the run of the broker we last met; unknown until the first time
  incarnation TEXT,
  paused_at INTEGER,
  pause_reason TEXT,
  -- how many rows are done: they are never deleted, and whoever asks for the state of the host would count them all
  done INTEGER NOT NULL DEFAULT 0,
  CHECK ((paused_at IS NULL) = (pause_reason IS NULL))
) WITHOUT ROWID;

-- '' means every one
CREATE TABLE outbox_block (
  space TEXT NOT NULL CHECK (space <> ''),
  sender TEXT NOT NULL,
  kind TEXT NOT NULL,
  destination TEXT NOT NULL,
  code TEXT NOT NULL,
  words TEXT NOT NULL,
  since INTEGER NOT NULL,
  until INTEGER,
  failures INTEGER NOT NULL CHECK (failures > 0),
  PRIMARY KEY (space, sender, kind, destination),
  CHECK ((kind = '') = (destination = '')),
  CHECK (sender <> '' OR kind = '')
) WITHOUT ROWID;
"""

_INBOX = """
CREATE TABLE inbox (
  row INTEGER PRIMARY KEY AUTOINCREMENT,
  space TEXT NOT NULL CHECK (space <> ''),
  recipient TEXT NOT NULL CHECK (recipient <> ''),
  -- of a notice: 'tidings', which is no agent's id
  sender TEXT NOT NULL CHECK (sender <> ''),
  id TEXT NOT NULL CHECK (id <> ''),
  sender_name TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('channel', 'direct', 'notice')),
  -- of a notice: the channel it is about, if it is about one
  channel TEXT,
  seq INTEGER NOT NULL,
  sent_at INTEGER NOT NULL,
  logged_at INTEGER NOT NULL,
  received_at INTEGER NOT NULL,
  priority TEXT NOT NULL CHECK (priority IN ('now', 'next', 'low')),
  reply_to TEXT,
  context TEXT,
  historical INTEGER NOT NULL CHECK (historical IN (0, 1)),
  sealed INTEGER NOT NULL CHECK (sealed IN (0, 1)),
  mentions_me INTEGER NOT NULL CHECK (mentions_me IN (0, 1)),
  wakes INTEGER NOT NULL CHECK (wakes IN (0, 1)),
  text TEXT NOT NULL,
  -- the bytes that were signed; of a notice its facts as JSON
  raw BLOB,
  read_at INTEGER,
  -- what the sender of a direct message was told
  told TEXT NOT NULL DEFAULT 'nothing' CHECK (told IN ('nothing', 'delivered', 'read')),
  -- its content is gone; that it came is never forgotten
  expired_at INTEGER,
  -- of what came over a link: the space it was said in, by the name that had here then, and by its id
  origin TEXT NOT NULL DEFAULT '',
  origin_id TEXT NOT NULL DEFAULT '',
  UNIQUE (space, recipient, sender, id),
  CHECK (kind = 'notice' OR (kind = 'channel') = (channel IS NOT NULL)),
  CHECK ((kind = 'notice') = (sender = 'tidings')),
  CHECK (kind = 'direct' OR told = 'nothing'),
  CHECK (told <> 'read' OR read_at IS NOT NULL),
  CHECK ((raw IS NULL) = (expired_at IS NOT NULL)),
  CHECK (expired_at IS NULL OR text = '')
);

CREATE INDEX inbox_unread ON inbox (space, recipient, row) WHERE read_at IS NULL AND expired_at IS NULL;
CREATE INDEX inbox_kept ON inbox (space, recipient, row) WHERE expired_at IS NULL;
CREATE INDEX inbox_replies ON inbox (space, recipient, reply_to) WHERE reply_to IS NOT NULL;
CREATE INDEX inbox_contexts ON inbox (space, recipient, context) WHERE context IS NOT NULL;
CREATE INDEX inbox_untold ON inbox (space, recipient, row)
  WHERE kind = 'direct' AND (told = 'nothing' OR (told = 'delivered' AND read_at IS NOT NULL));
-- a conversation is walked by the ids its messages answer
CREATE INDEX inbox_ids ON inbox (space, recipient, id);
-- what may go when there is more of one sender than is kept
CREATE INDEX inbox_old ON inbox (space, recipient, sender, channel, row)
  WHERE read_at IS NOT NULL AND expired_at IS NULL;
CREATE VIEW inbox_text AS SELECT row, text FROM inbox WHERE expired_at IS NULL;

CREATE TRIGGER inbox_identity BEFORE UPDATE OF
  row, space, recipient, sender, id, sender_name, kind, channel, seq, sent_at, logged_at, received_at, priority,
  reply_to, context, historical, sealed, mentions_me, wakes, origin, origin_id ON inbox
BEGIN SELECT RAISE(ABORT, 'what was received never changes'); END;

CREATE TRIGGER inbox_content BEFORE UPDATE OF text, raw, expired_at ON inbox
WHEN NOT (OLD.expired_at IS NULL AND NEW.expired_at IS NOT NULL)
BEGIN SELECT RAISE(ABORT, 'what was received never changes'); END;

CREATE TRIGGER inbox_read BEFORE UPDATE OF read_at ON inbox
WHEN OLD.read_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'what was read was read then'); END;

CREATE TRIGGER inbox_for_ever BEFORE DELETE ON inbox
BEGIN SELECT RAISE(ABORT, 'that a message came is never forgotten'); END;

-- how much is kept of each sender, by channel ('' is direct, '*' is everything); content that is gone does not count
CREATE TABLE inbox_held (
  space TEXT NOT NULL,
  recipient TEXT NOT NULL,
  sender TEXT NOT NULL,
  channel TEXT NOT NULL,
  rows INTEGER NOT NULL CHECK (rows >= 0),
  bytes INTEGER NOT NULL CHECK (bytes >= 0),
  PRIMARY KEY (space, recipient, sender, channel)
) WITHOUT ROWID;

CREATE TRIGGER inbox_counted AFTER INSERT ON inbox
BEGIN
  INSERT INTO inbox_held
  SELECT NEW.space, NEW.recipient, NEW.sender, channel, 1, length(NEW.raw) + length(CAST(NEW.text AS BLOB))
  FROM (SELECT coalesce(NEW.channel, '') AS channel UNION ALL SELECT '*') WHERE true
  ON CONFLICT DO UPDATE SET rows = rows + 1, bytes = bytes + excluded.bytes;
END;

CREATE TRIGGER inbox_uncounted AFTER UPDATE OF expired_at ON inbox
BEGIN
  UPDATE inbox_held SET rows = rows - 1, bytes = bytes - length(OLD.raw) - length(CAST(OLD.text AS BLOB))
  WHERE space = OLD.space AND recipient = OLD.recipient AND sender = OLD.sender
    AND channel IN (coalesce(OLD.channel, ''), '*');
END;

-- what was not kept because there was too much of its sender, as far as it was not told yet
CREATE TABLE inbox_overflow (
  space TEXT NOT NULL,
  recipient TEXT NOT NULL,
  sender TEXT NOT NULL,
  channel TEXT NOT NULL,
  sender_name TEXT NOT NULL,
  first INTEGER,
  last INTEGER,
  count INTEGER NOT NULL,
  -- in all, told or not
  total INTEGER NOT NULL,
  PRIMARY KEY (space, recipient, sender, channel),
  CHECK ((count = 0) = (first IS NULL) AND (first IS NULL) = (last IS NULL) AND total >= count)
) WITHOUT ROWID;

-- the newest messages that were not kept for want of room: one that comes again is not counted again. By id, because
-- they come in any order, and a log that went backwards gives a sequence twice
CREATE TABLE inbox_not_kept (
  row INTEGER PRIMARY KEY,
  space TEXT NOT NULL,
  recipient TEXT NOT NULL,
  sender TEXT NOT NULL,
  id TEXT NOT NULL,
  UNIQUE (space, recipient, sender, id)
);

CREATE TABLE quarantine (
  row INTEGER PRIMARY KEY AUTOINCREMENT,
  space TEXT NOT NULL CHECK (space <> ''),
  recipient TEXT NOT NULL CHECK (recipient <> ''),
  digest BLOB NOT NULL CHECK (length(digest) = 32),
  raw BLOB NOT NULL,
  reason TEXT NOT NULL,
  received_at INTEGER NOT NULL,
  UNIQUE (space, recipient, digest)
);
"""

_AGENTS = """
-- a space is its id: two of them may have the same name
CREATE TABLE spaces (
  id TEXT PRIMARY KEY CHECK (id <> ''),
  name TEXT NOT NULL CHECK (name <> ''),
  -- when its agents were last seen; NULL if they never were
  seen_at INTEGER,
  -- the first steward of the space, as the first agent of it that came named it; unknown until one comes
  anchor TEXT
) WITHOUT ROWID;

-- the agents this host works for
CREATE TABLE agents (
  space TEXT NOT NULL REFERENCES spaces (id),
  agent TEXT NOT NULL CHECK (agent <> ''),
  name TEXT NOT NULL CHECK (name <> ''),
  -- where its identity is read, as JSON
  source TEXT NOT NULL,
  receive INTEGER NOT NULL CHECK (receive IN (0, 1)),
  adopted_at INTEGER NOT NULL,
  PRIMARY KEY (space, agent)
) WITHOUT ROWID;

-- who is in a space, as last seen
CREATE TABLE directory (
  space TEXT NOT NULL REFERENCES spaces (id),
  agent TEXT NOT NULL CHECK (agent <> ''),
  name TEXT NOT NULL CHECK (name <> ''),
  -- a JSON list
  roles TEXT NOT NULL,
  -- of an agent of a linked space: do direct messages go there, its id, and can its roles be asked?
  direct INTEGER NOT NULL DEFAULT 1 CHECK (direct IN (0, 1)),
  linked TEXT NOT NULL DEFAULT '',
  tasks INTEGER NOT NULL DEFAULT 0 CHECK (tasks IN (0, 1)),
  PRIMARY KEY (space, agent)
) WITHOUT ROWID;

-- programs that proved to be an agent; of a token only its hash is kept
CREATE TABLE session (
  digest BLOB PRIMARY KEY CHECK (typeof(digest) = 'blob' AND length(digest) = 32),
  id TEXT NOT NULL UNIQUE CHECK (id <> ''),
  space TEXT NOT NULL CHECK (space <> ''),
  space_id TEXT NOT NULL CHECK (space_id <> ''),
  agent TEXT NOT NULL CHECK (agent <> ''),
  name TEXT NOT NULL CHECK (name <> ''),
  receive INTEGER NOT NULL CHECK (receive IN (0, 1)),
  program TEXT NOT NULL,
  opened_at INTEGER NOT NULL,
  used_at INTEGER NOT NULL
) WITHOUT ROWID;
"""

SCHEMA = Schema(APPLICATION_ID, _OUTBOX + _INBOX + _AGENTS)


class HostStore:
    """What stores over `host.db` have in common."""

    database: Database

    async def read(self, view: Callable[Concatenate[sqlite3.Connection, P], T], *of: P.args, **more: P.kwargs) -> T:
        """What a view answers: a function of a connection and the arguments that follow it."""
        return await self.database.read(lambda connection: view(connection, *of, **more))
