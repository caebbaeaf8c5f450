"""What a message says of itself, whatever copy came first and however often the program was killed: once, and true."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidings.client.incoming import Events, Inbox, Incoming
from tidings.client.intake import Intake, LiveRecord, RecordOpener
from tidings.client.live import LocalMembership, Memberships
from tidings.client.read_state import ReadState
from tidings.client.state_file import Journal, KeptAs
from tidings.contract.channels import JoinAnswer
from tidings.wire.message import Sender, compose
from tidings.wire.roster import Attention, Backstop
from tidings.wire.subjects import Subjects

CHANNELS = ("general", "team.a")
ME = "me"
LIVE = JoinAnswer(
    channel="general", cls="live", replay=True, own=(), replay_window=None, state="opened", seq=5, left=None, head=5,
    backstop=Backstop(), epoch="", agreed=None, stamp=None,
)  # fmt: skip
MESSAGE = compose(Sender("U" + "A" * 55, "ada"), text="hello")


class Program:
    """Processes that follow each other over one state file, and what each message said when it was handed out."""

    def __init__(self, state: Path) -> None:
        self.state = state
        #: sequences in the order they were handed out, by every process, and what was settled
        self.handed: list[int] = []
        self.settled: set[int] = set()
        self.wrong: list[str] = []
        self.start()

    def start(self) -> None:
        self.read_state = ReadState(self.state)
        self.hands: set[int] = set()
        presence, events = SimpleNamespace(attention=Attention()), Events()
        events.on("message", self._hand_out)
        opener = RecordOpener(Subjects("main"), "space")
        self.intake = Intake(ME, opener, self.read_state, presence, lambda each: each, Inbox(), events)  # type: ignore[arg-type]

    def _hand_out(self, message: Incoming) -> None:
        seq, late, redelivered = message.seq, message.late, message.redelivered
        earlier = [each for each in self.handed if each % 2 == seq % 2]
        if seq in self.settled:
            self.wrong.append(f"{seq} was settled and comes again")
        if redelivered != (seq in self.handed):
            self.wrong.append(f"{seq} says redelivered={redelivered}, handed out were {self.handed}")
        if late != any(each > seq for each in earlier):
            self.wrong.append(f"{seq} says late={late}, handed out were {self.handed}")
        self.handed.append(seq)
        self.hands.add(seq)

    def offer(self, how: str, seq: int) -> None:
        channel, identity = CHANNELS[seq % 2], ("ada", f"message {seq}")
        record = LiveRecord(seq, 0, channel, "ada", MESSAGE, identity)
        if how == "live":
            self.intake.offer(record, contiguous=False)
        elif how == "durable":
            self.intake.offer_durable(record, redelivered=False)
        elif seq not in self.read_state.known:
            self.intake.offer_backfilled(record, historical=False)

    def settle(self, seq: int) -> None:
        if seq in self.hands:
            self.hands.discard(seq)
            self.settled.add(seq)
            self.read_state.settle(CHANNELS[seq % 2], seq, ("ada", f"message {seq}"))

    def killed(self) -> None:
        self.read_state._journal.close()  # what a kill does to its file
        self.start()


OFFERS = st.tuples(st.sampled_from(("live", "durable", "missed")), st.integers(1, 12))
STEPS = st.one_of(
    OFFERS,
    st.tuples(st.just("settle"), st.integers(1, 12)),
    st.tuples(st.sampled_from(("save", "killed")), st.just(0)),
)


@given(st.lists(STEPS, max_size=60))
def test_late_and_redelivered_are_true_through_any_order_of_copies_and_kills(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(Path(folder) / "state")
        program.read_state.save()
        for what, seq in steps:
            if what == "settle":
                program.settle(seq)
            elif what == "save":
                program.read_state.save()
            elif what == "killed":
                program.killed()
            else:
                program.offer(what, seq)
        program.read_state.close()
        assert program.wrong == []


def test_a_journal_that_was_cut_off_in_a_line_gives_the_whole_lines(tmp_path: Path) -> None:
    state = tmp_path / "state"
    journal = Journal(state)
    for seq in (7, 9):
        journal.note_handed("general", seq)
    journal.note_settled("general", 7)
    journal.close()
    beside = state.with_name("state.journal")
    assert beside.stat().st_mode & 0o777 == 0o600
    beside.write_bytes(beside.read_bytes() + b"+1\xff\n+12")
    handed, settled, _kept = Journal(state).read()
    assert [each.seq for each in handed] == [7, 9]
    assert [each.seq for each in settled] == [7]


def test_where_the_newest_that_was_settled_is_kept_is_known_after_a_kill_and_torn_lines_say_nothing(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path / "state")
    program.read_state.save()
    program.read_state.note_kept(KeptAs(3, "ada", "message 3"))
    program.read_state.note_kept(KeptAs(2, "ada", "message 2"))
    assert Journal(program.state).read().kept is None, "an id has no blanks"
    program.read_state.note_kept(KeptAs(4, "ada", "four"))
    program.killed()
    assert program.read_state.kept_as == KeptAs(4, "ada", "four")
    program.read_state.settle("general", 1, ("ada", "1"))
    program.read_state.save()
    beside = program.state.with_name("state.journal")
    assert not beside.exists()
    beside.write_text("=9 ada fi\n=10 ad=11 ada five =\n=12 ada fi-7 general\n=13 ada")
    program.killed()
    assert program.read_state.kept_as == KeptAs(4, "ada", "four")


def test_a_memory_that_is_forgotten_knows_its_channels_and_reads_all_of_them_again_however_often_it_is_killed(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path / "state")
    for seq in (2, 3):
        program.offer("live", seq)
        program.settle(seq)
    program.read_state.note_kept(KeptAs(2, "ada", "two"))
    program.read_state.save()
    program.read_state.forget_all()
    program.read_state.close()
    program.killed()
    seen = program.read_state
    assert (seen.kept_as, len(seen.known), seen.reads_again) == (None, 0, True)
    assert {name: each.settled_through for name, each in seen.channels.items()} == dict.fromkeys(CHANNELS, 0)
    assert seen.covered_by("team.*") == ["team.a"]


def test_a_journal_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "nowhere" / "state")
    journal.note_handed("general", 1)
    journal.restart({1: "general"})
    assert journal.read() == ([], [], None)


def test_a_copy_is_ahead_while_nobody_can_say_what_is_older() -> None:
    memberships = Memberships()
    waiting, watched = LocalMembership("general"), LocalMembership("general", joined=0, watching=True)
    assert memberships.is_ahead(waiting), "the steward has not answered: older ones may be owed"
    assert not memberships.is_ahead(watched), "who only looks is owed nothing"
    waiting.joined = 5
    assert not memberships.is_ahead(waiting)
    waiting.unreadable = True
    assert memberships.is_ahead(waiting)
    waiting.unreadable = False
    frames: Any = SimpleNamespace(caught_up=0, skipped=set(), unacked_before=1, are_older_awaited=lambda: True)
    memberships.frames = frames
    assert memberships.is_ahead(waiting), "frames that a dead session had in hand come later"
    waiting.facts = LIVE
    assert not memberships.is_ahead(waiting)
