"""The tables of `links.db`, and the rules that hold whatever the code does.

A token is of the peer's log; a disposition is one of five, each with what it needs; what is omitted has a reason of a
short list or an operator's; a payload is kept exactly while its record is in quarantine. Times are milliseconds since
1970 by the clock of this worker.

`life` of a disposition is 0, or the number of the life of the peer's log it belongs to: when that log was set back,
what stays of the part it lost is kept under the number of that life.
"""

from __future__ import annotations

from tidings.util.database import Schema

#: "Tdlk"
APPLICATION_ID = 0x54646C6B

_RECORDS = """
CREATE TABLE space (
  space TEXT PRIMARY KEY,
  -- message ids are made with it, so that nobody can burn them in advance
  secret BLOB NOT NULL CHECK (typeof(secret) = 'blob' AND length(secret) = 32),
  -- how far `present` knows the log here, and of which epoch
  epoch TEXT NOT NULL DEFAULT '',
  through INTEGER NOT NULL DEFAULT 0 CHECK (through >= 0),
  -- the index is being read anew: what the log lost is not known before its end
  anew INTEGER NOT NULL DEFAULT 0 CHECK (anew IN (0, 1)),
  -- how often it was: what was let in before is not known to be there
  lives INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

CREATE TABLE present (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  origin TEXT NOT NULL,
  sender TEXT NOT NULL,
  id TEXT NOT NULL,
  hash TEXT NOT NULL,
  link TEXT NOT NULL,
  channel TEXT NOT NULL,
  seq INTEGER NOT NULL,
  PRIMARY KEY (space, origin, sender, id)
) WITHOUT ROWID;

CREATE TABLE link (
  row INTEGER PRIMARY KEY AUTOINCREMENT,
  space TEXT NOT NULL REFERENCES space (space),
  peer TEXT NOT NULL CHECK (peer <> space),
  scope TEXT NOT NULL,
  authority TEXT NOT NULL,
  definition TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  handled_space TEXT CHECK (handled_space = peer),
  handled_epoch TEXT,
  handled_seq INTEGER CHECK (handled_seq >= 0),
  handled_mark TEXT,
  received_space TEXT CHECK (received_space = peer),
  received_epoch TEXT,
  received_seq INTEGER,
  received_mark TEXT,
  -- pages that were received after the handled ones
  received_pages INTEGER NOT NULL DEFAULT 0 CHECK (received_pages >= 0),
  -- when the last handled record was said, by the peer's log
  handled_time INTEGER NOT NULL DEFAULT 0,
  handled_at INTEGER,
  lives INTEGER NOT NULL DEFAULT 0,
  paused_at INTEGER,
  pause_reason TEXT,
  UNIQUE (space, peer, scope, authority),
  CHECK ((handled_seq IS NULL) = (handled_epoch IS NULL) AND (handled_seq IS NULL) = (handled_mark IS NULL)
    AND (handled_seq IS NULL) = (handled_space IS NULL)),
  CHECK ((paused_at IS NULL) = (pause_reason IS NULL))
);

CREATE TABLE disposition (
  link INTEGER NOT NULL REFERENCES link (row) ON DELETE CASCADE,
  life INTEGER NOT NULL DEFAULT 0,
  seq INTEGER NOT NULL CHECK (seq > 0),
  origin TEXT NOT NULL DEFAULT '',
  channel TEXT NOT NULL DEFAULT '',
  sender TEXT NOT NULL DEFAULT '',
  id TEXT NOT NULL DEFAULT '',
  hash TEXT NOT NULL DEFAULT '',
  day TEXT NOT NULL DEFAULT '',
  kind TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '',
  local_seq INTEGER,
  PRIMARY KEY (link, life, seq),
  CHECK (CASE kind
    WHEN 'admitted' THEN local_seq IS NOT NULL AND id <> ''
    WHEN 'duplicate' THEN local_seq IS NOT NULL AND id <> ''
    WHEN 'omitted' THEN local_seq IS NULL
      AND (reason IN ('not_shared', 'echo', 'vanished', 'hops') OR reason LIKE 'operator: _%')
    WHEN 'quarantined' THEN local_seq IS NULL AND reason <> ''
    WHEN 'obligation' THEN local_seq IS NULL AND reason <> ''
    ELSE 0 END)
) WITHOUT ROWID;
CREATE INDEX disposition_omitted ON disposition (link, seq) WHERE kind = 'omitted';
CREATE INDEX disposition_day ON disposition (link, channel, day, seq) WHERE life = 0 AND id <> '';

-- what was removed there before it was asked for: nobody knows how many messages these were
CREATE TABLE omitted_range (
  link INTEGER NOT NULL REFERENCES link (row) ON DELETE CASCADE,
  life INTEGER NOT NULL DEFAULT 0,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL CHECK (last >= first),
  reason TEXT NOT NULL CHECK (reason = 'too_old'),
  at INTEGER NOT NULL,
  PRIMARY KEY (link, life, first)
) WITHOUT ROWID;

CREATE TABLE obligation (
  link INTEGER NOT NULL,
  life INTEGER NOT NULL DEFAULT 0,
  seq INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  next_at INTEGER NOT NULL,
  PRIMARY KEY (link, life, seq),
  FOREIGN KEY (link, life, seq) REFERENCES disposition (link, life, seq) ON DELETE CASCADE ON UPDATE CASCADE
) WITHOUT ROWID;
CREATE INDEX obligation_due ON obligation (link, next_at, seq);

CREATE TABLE quarantine (
  link INTEGER NOT NULL,
  life INTEGER NOT NULL DEFAULT 0,
  seq INTEGER NOT NULL,
  payload BLOB NOT NULL,
  bytes INTEGER NOT NULL,
  signature TEXT NOT NULL,
  hops INTEGER NOT NULL,
  time_ns INTEGER NOT NULL,
  mark TEXT NOT NULL,
  words TEXT NOT NULL,
  first_at INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  next_at INTEGER NOT NULL,
  PRIMARY KEY (link, life, seq),
  FOREIGN KEY (link, life, seq) REFERENCES disposition (link, life, seq) ON DELETE CASCADE ON UPDATE CASCADE
);
CREATE INDEX quarantine_due ON quarantine (link, next_at, seq);
CREATE INDEX quarantine_size ON quarantine (link, bytes);

CREATE TRIGGER disposition_closed BEFORE UPDATE OF kind ON disposition
WHEN NOT (OLD.kind IN ('quarantined', 'obligation')
  OR ((OLD.kind IN ('admitted', 'duplicate') OR OLD.reason = 'vanished') AND NEW.kind = 'obligation'))
BEGIN SELECT RAISE(ABORT, 'what became of a record is said once, unless a log lost it, or has it again'); END;

CREATE TRIGGER quarantine_ends AFTER UPDATE OF kind ON disposition WHEN NEW.kind <> 'quarantined'
BEGIN DELETE FROM quarantine WHERE link = NEW.link AND life = NEW.life AND seq = NEW.seq; END;

CREATE TRIGGER obligation_ends AFTER UPDATE OF kind ON disposition WHEN NEW.kind <> 'obligation'
BEGIN DELETE FROM obligation WHERE link = NEW.link AND life = NEW.life AND seq = NEW.seq; END;

-- what is known of records that the peer's log removed by age is counted, and no longer kept one by one
CREATE TABLE forgotten (
  link INTEGER NOT NULL REFERENCES link (row) ON DELETE CASCADE,
  kind TEXT NOT NULL CHECK (kind IN ('admitted', 'duplicate', 'omitted')),
  records INTEGER NOT NULL CHECK (records > 0),
  PRIMARY KEY (link, kind)
) WITHOUT ROWID;
"""

_PEOPLE = """
-- agents of the spaces this one is linked with, as their stewards state them
CREATE TABLE person (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  agent TEXT NOT NULL,
  name TEXT NOT NULL,
  roles TEXT NOT NULL,
  -- where its access record is in the peer's log
  seq INTEGER NOT NULL CHECK (seq > 0),
  revoked INTEGER NOT NULL CHECK (revoked IN (0, 1)),
  succeeds TEXT,
  -- a key is of the peer with the lowest claim: who stated it first
  claim INTEGER NOT NULL DEFAULT 0,
  -- it was told under another epoch or key, and not again yet
  stale INTEGER NOT NULL DEFAULT 0 CHECK (stale IN (0, 1)),
  PRIMARY KEY (space, peer, agent)
) WITHOUT ROWID;
CREATE INDEX person_agent ON person (space, agent, claim);
CREATE INDEX person_claim ON person (space, claim);

-- which key a name of theirs stands for; it is changed by a key that succeeds it, or by the operator
CREATE TABLE pin (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  name TEXT NOT NULL,
  agent TEXT NOT NULL,
  PRIMARY KEY (space, peer, name)
) WITHOUT ROWID;

CREATE TABLE peer_roster (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  epoch TEXT NOT NULL,
  through INTEGER NOT NULL CHECK (through >= 0),
  key TEXT NOT NULL,
  -- does the peer let direct messages pass, and tasks, as it last said?
  direct INTEGER NOT NULL DEFAULT 1 CHECK (direct IN (0, 1)),
  tasks INTEGER NOT NULL DEFAULT 0 CHECK (tasks IN (0, 1)),
  PRIMARY KEY (space, peer)
) WITHOUT ROWID;
"""

_MAIL = """
-- direct messages of other spaces that were handled, for as long as they may be offered again
CREATE TABLE mail (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  sender TEXT NOT NULL,
  id TEXT NOT NULL,
  reader TEXT NOT NULL,
  -- where it is in the peer's mail
  seq INTEGER NOT NULL CHECK (seq > 0),
  outcome TEXT NOT NULL CHECK (outcome IN ('admitted', 'had', 'refused')),
  why TEXT NOT NULL,
  -- of what was refused: whether its sender's space was told
  told INTEGER NOT NULL CHECK (told IN (0, 1)),
  at INTEGER NOT NULL,
  -- tells the message from another one at its sequence; empty: not known, or the mail it lay in was set back since
  mark TEXT NOT NULL DEFAULT '',
  -- may it still lie in the mail of its sender's space? Not once its end was told there, or it is not handed out again
  there INTEGER NOT NULL DEFAULT 1 CHECK (there IN (0, 1)),
  PRIMARY KEY (space, peer, sender, id, reader),
  CHECK (told = 1 OR outcome = 'refused')
) WITHOUT ROWID;
CREATE INDEX mail_untold ON mail (space, peer, seq) WHERE told = 0;
CREATE INDEX mail_seq ON mail (space, peer, seq);
CREATE INDEX mail_age ON mail (space, peer, at);

CREATE TABLE peer_mail (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  epoch TEXT NOT NULL DEFAULT '',
  people TEXT NOT NULL DEFAULT '',
  through INTEGER NOT NULL DEFAULT 0 CHECK (through >= 0),
  told_epoch TEXT NOT NULL DEFAULT '',
  told_through INTEGER NOT NULL DEFAULT 0 CHECK (told_through >= 0),
  -- how often the peer handed out mail that nobody signed, and that was passed over
  forged INTEGER NOT NULL DEFAULT 0 CHECK (forged >= 0),
  -- of the receipt up to which all were told
  told_mark TEXT NOT NULL DEFAULT '',
  -- the broker there, by its process, whose mail was looked at; the one here, when what had been let in was last known
  -- to be there; and how often it was not
  their_broker TEXT NOT NULL DEFAULT '',
  broker TEXT NOT NULL DEFAULT '',
  losses INTEGER NOT NULL DEFAULT 0 CHECK (losses >= 0),
  PRIMARY KEY (space, peer)
) WITHOUT ROWID;
"""

_TASKS = """
-- tasks of other spaces that were queued here, for as long as they may be handed out again
CREATE TABLE task (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  sender TEXT NOT NULL,
  id TEXT NOT NULL,
  -- where it is in the peer's queue
  seq INTEGER NOT NULL CHECK (seq > 0),
  state TEXT NOT NULL CHECK (state IN ('open', 'refused', 'ended')),
  why TEXT NOT NULL DEFAULT '',
  -- how far it was when the peer was told last, and when
  told TEXT NOT NULL DEFAULT '',
  told_at INTEGER NOT NULL DEFAULT 0,
  role TEXT NOT NULL DEFAULT '',
  -- where it is in the queue here, if that is known, and the bytes of its payload there
  local_seq INTEGER NOT NULL DEFAULT 0 CHECK (local_seq >= 0),
  size INTEGER NOT NULL DEFAULT 0 CHECK (size >= 0),
  at INTEGER NOT NULL,
  PRIMARY KEY (space, peer, sender, id),
  CHECK ((why <> '') = (state = 'refused'))
) WITHOUT ROWID;
CREATE INDEX task_due ON task (space, peer, told_at) WHERE state = 'open' OR told = '';
CREATE INDEX task_age ON task (space, peer, at);

-- bytes that links brought from a peer into the log here, less what time has paid back up to `at`
CREATE TABLE spent (
  space TEXT NOT NULL REFERENCES space (space) ON DELETE CASCADE,
  peer TEXT NOT NULL,
  bytes INTEGER NOT NULL CHECK (bytes >= 0),
  at INTEGER NOT NULL,
  PRIMARY KEY (space, peer)
) WITHOUT ROWID;
"""

SCHEMA = Schema(APPLICATION_ID, _RECORDS + _PEOPLE + _MAIL + _TASKS)
