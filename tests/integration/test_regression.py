"""A log that went backwards is noticed, said, and mended as far as the ledger knows; an ordinary restart is not one."""

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import tidings
from folded_log import fold_log
from tidings.client.connect import connect_directly
from tidings.contract.admin import AcknowledgeRequest, ChangeSpaceRequest, PartsChange, RotateKeyRequest
from tidings.contract.agents import HealthAnswer, HealthRequest
from tidings.contract.channels import JoinRequest, MembershipsRequest
from tidings.errors import AuthRevoked, LeaseLost, LogRegressed, UsageError
from tidings.nats.jetstream_api import EPOCH_KEY
from tidings.steward.service import Steward
from tidings.util.private_files import write_private
from tidings.wire.records import Stamp
from tidings.wire.signing import KeyPair
from tidings_testing.raw_requests import raw_call
from tidings_testing.real_space import TEST_INTERVALS, RealSpace
from tidings_testing.waiting import eventually


def serving(space: RealSpace) -> Steward:
    assert space.steward is not None
    return space.steward


class Backup:
    """Copies of the broker's store, made while it is stopped."""

    def __init__(self, space: RealSpace, folder: Path) -> None:
        self.space = space
        self.folder = folder

    async def take(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.copytree(self.space.home.store, self.folder)
        self.space.broker.start()
        await self.space.start_steward()

    def put_back(self) -> None:
        """Replace the store of a stopped broker, and start it."""
        self.space.broker.stop()
        shutil.rmtree(self.space.home.store)
        if self.folder.exists():
            shutil.copytree(self.folder, self.space.home.store)
        self.space.broker.start()


@pytest.fixture
def backup(space: RealSpace, tmp_path: Path) -> Backup:
    return Backup(space, tmp_path / "copy")


async def mark_head(space: RealSpace) -> int:
    """Wait until the head of the log is remembered outside the broker's store."""
    async with space.core() as js:
        head = int((await js.info("LOG_main"))["state"]["last_seq"])
    await eventually(lambda: serving(space).marks.file.marks[-1].seq >= head, what=f"a mark at {head}")
    return head


async def post(space: RealSpace, name: str, count: int = 3) -> list[int]:
    async with space.agent(name) as agent:
        return [(await agent.post("general", b"x"))["seq"] for _ in range(count)]


async def post_void(space: RealSpace, name: str, count: int) -> None:
    """Post what no reader shows, until its sender was told: of the streams beside the log, AUD then has more."""
    await eventually(lambda: bool(serving(space).voids._saved), what="a first look for void messages")
    await post(space, name, count)
    await eventually(lambda: serving(space).voids.found.total() >= count, what="the sender is told of each")


def damaged(space: RealSpace) -> set[str]:
    return {each.stream for each in serving(space).store.file.damages}


async def epoch_of(space: RealSpace) -> str:
    async with space.core() as js:
        return str((await js.info("LOG_main"))["config"]["metadata"][EPOCH_KEY])


async def health(space: RealSpace, name: str = "ada") -> HealthAnswer:
    async with space.agent(name) as agent:
        return await agent.control.call(HealthRequest())


async def reconcile(space: RealSpace) -> list[str]:
    async with space.administer() as admin:
        return await admin.reconcile()


async def test_a_restored_older_store_is_noticed_said_and_acknowledged(space: RealSpace, backup: Backup) -> None:
    await space.add("ada")
    await post(space, "ada")
    kept = await mark_head(space)
    await backup.take()
    epoch = await epoch_of(space)
    await post_void(space, "ada", 10)
    lost = await mark_head(space)
    await space.stop_steward()
    backup.put_back()
    steward = await space.start_steward()
    (found,) = steward.marks.file.regressions
    assert found.was >= lost
    assert kept <= found.agreed < lost
    assert (found.epoch_before, found.epoch_after) == (epoch, await epoch_of(space))
    assert found.epoch_after != epoch
    said = await health(space)
    assert not said.healthy
    assert f"it was at {found.was} and agrees with the past only up to {found.agreed}" in said.problems[0]
    assert said.epoch == found.epoch_after
    # said until somebody has seen it, restarts included, and found once
    await space.stop_steward()
    steward = await space.start_steward()
    assert len(steward.marks.file.regressions) == 1
    assert not (await health(space)).healthy
    async with space.administer() as admin:
        assert damaged(space) == {"AUD_main"}, "the receipts were set back with it, and nothing else"
        assert (await admin.call(AcknowledgeRequest())).acknowledged == 2
    assert (await health(space)).healthy
    await space.stop_steward()
    await space.start_steward()
    assert (await health(space)).healthy
    assert await epoch_of(space) == found.epoch_after


async def test_what_the_log_forgot_of_access_and_revocation_is_written_again(space: RealSpace, backup: Backup) -> None:
    moved = [f"dan{number}" for number in range(4)]
    for name in ("ada", "bob", *moved):
        await space.add(name)
    async with space.agent("bob") as bob:
        await bob.control.call(JoinRequest("general"))
        old_creds = space.home.agent_creds("bob").read_text()
    await mark_head(space)
    await backup.take()
    await space.add("carol")
    async with space.administer() as admin:
        await admin.revoke("bob")
        for name in moved:
            await admin.revoke(name)
    for name in moved:
        await space.add(name)  # the name went to another key
    await mark_head(space)
    await space.stop_steward()
    backup.put_back()
    await space.start_steward()
    done = await reconcile(space)
    assert {line.partition(" again")[0] for line in done} == {
        *(f"wrote the access of {name}" for name in ("carol", *moved)),
        *(f"wrote the revocation of {name}" for name in ("bob", *moved)),
    }
    assert len(done) == 10
    assert await reconcile(space) == []
    for name in ("ada", "carol", *moved):
        async with space.agent(name) as agent:
            assert (await agent.control.call(JoinRequest("general"))).state == "opened"
    async with space.core() as js:
        table = await fold_log(js, space.info, 0)
    assert bob.id not in table.members_at("general", table.head + 1)
    write_private(space.home.agent_creds("bob"), old_creds)
    with pytest.raises(AuthRevoked):
        async with space.agent("bob"):
            pass


async def test_direct_messages_of_an_agent_the_log_forgot_are_kept_for_it(space: RealSpace, backup: Backup) -> None:
    """The steward judges mail before the administrator has written again who is an agent."""
    await space.add("ada")
    await mark_head(space)
    await backup.take()
    fred = (await space.add("fred")).row.id
    async with tidings.connect(space.home.name, name="ada", home=space.home.home, receive=False) as ada:
        for number in range(3):
            await ada.dm(fred, f"unread {number}")
        nobody = KeyPair.generate().id
        await ada.dm(nobody, "is anybody there?")
    await mark_head(space)
    await space.stop_steward()
    space.broker.stop()
    (log_of_now,) = space.home.store.glob("jetstream/*/streams/LOG_main")
    shutil.rmtree(log_of_now)
    shutil.copytree(backup.folder / log_of_now.relative_to(space.home.store), log_of_now)
    space.broker.start()
    steward = await space.start_steward(replace(TEST_INTERVALS, mail_grace=0.1, mail=0.1))
    assert steward.table.access_at(fred, steward.space.position) is None
    async with space.core() as js:

        async def only_of_fred() -> bool:
            return list(await js.counts_of("DM_main", ">")) == [space.subjects.direct(fred, ada.id)]

        await eventually(only_of_fred, what="mail for nobody is removed")
        await steward.mail.run()
        assert await js.counts_of("DM_main", ">") == {space.subjects.direct(fred, ada.id): 3}
    assert await reconcile(space) == ["wrote the access of fred again: the log had lost it"]
    async with tidings.connect(space.home.name, name="fred", home=space.home.home) as reader:
        assert [(await reader.next_message(10)).text for _ in range(3)] == [f"unread {number}" for number in range(3)]


async def test_a_wiped_store_is_noticed_and_the_agents_are_granted_again(space: RealSpace, backup: Backup) -> None:
    await space.add("ada")
    await space.add("bob")
    async with space.administer() as admin:
        await admin.revoke("bob")
    was = await mark_head(space)
    await space.stop_steward()
    backup.put_back()  # there is no copy
    async with space.administer() as admin:
        await admin.provision()
    steward = await space.start_steward()
    (found,) = steward.marks.file.regressions
    assert (found.was >= was, found.agreed) == (True, 0)
    assert await epoch_of(space) != space.info.epoch
    assert await reconcile(space) == ["wrote the access of ada again: the log had lost it"]
    async with space.agent("ada") as ada:
        assert (await ada.control.call(JoinRequest("general"))).state == "opened"


async def test_a_log_that_went_back_to_before_a_key_rotation_is_ruled_and_rotated_again(
    space: RealSpace, backup: Backup
) -> None:
    await space.add("ada")
    await mark_head(space)
    await backup.take()
    for _ in range(2):
        following = KeyPair.generate()
        write_private(space.home.creds / "steward.key.next", following.seed + "\n")
        async with space.administer() as admin:
            assert (await admin.call(RotateKeyRequest())).steward_key == following.id
    await mark_head(space)
    await space.stop_steward()
    backup.put_back()
    steward = await space.start_steward()
    assert steward.table.steward_key == following.id
    async with space.agent("ada") as ada, space.core() as js:
        assert (await ada.control.call(JoinRequest("general"))).state == "opened"
        table = await fold_log(js, space.info, 0)
        assert not table.void
        assert table.members_at("general", table.head + 1) == {ada.id}


@pytest.mark.parametrize("wiped", [False, True])
async def test_a_store_that_changes_under_a_running_steward_ends_it(
    space: RealSpace, backup: Backup, wiped: bool
) -> None:
    await space.add("ada")
    if not wiped:
        await backup.take()
    await post(space, "ada", 10)
    await mark_head(space)
    backup.put_back()
    assert isinstance(await space.steward_ended(), LeaseLost)
    if not wiped:
        steward = await space.start_steward()
        assert len(steward.marks.file.regressions) == 1


async def test_a_log_that_lost_its_tail_under_a_running_steward_ends_it(space: RealSpace, backup: Backup) -> None:
    """The lease is still the newest in the log: only the marks can tell."""
    await space.add("ada")
    await post(space, "ada")
    await mark_head(space)
    space.broker.stop()
    shutil.copytree(space.home.store, backup.folder)
    space.broker.start()
    await eventually(lambda: serving(space).js.connection.is_connected)
    async with space.core() as js:
        before = await js.last("LOG_main", space.subjects.steward_lease)
    await post(space, "ada", 5)
    await mark_head(space)
    backup.put_back()
    ended = await space.steward_ended()
    assert isinstance(ended, LeaseLost)
    assert "went backwards" in str(ended)
    async with space.core() as js:
        assert await js.last("LOG_main", space.subjects.steward_lease) == before


@pytest.mark.parametrize("kill", [False, True])
async def test_an_ordinary_restart_is_not_a_regression(space: RealSpace, kill: bool) -> None:
    await space.add("ada")
    for _ in range(2):
        await post(space, "ada")
        await mark_head(space)
        await space.stop_steward()
        await space.restart_broker(kill=kill)
        await post(space, "ada")  # before any steward is there
        steward = await space.start_steward()
        assert steward.marks.file.regressions == []
    assert (await health(space)).healthy


async def test_what_retention_removed_is_not_a_regression(space: RealSpace) -> None:
    await space.add("ada")
    for _ in range(4):
        await post(space, "ada")
        await mark_head(space)
    async with space.administer() as admin:
        await admin.call(ChangeSpaceRequest(keep_age=0, parts=PartsChange(deliver="off", archive="off")))
    async with space.core() as js:

        async def is_empty() -> bool:
            return await js.last("LOG_main", "td.main.chat.>") is None

        await eventually(is_empty)
    for kill in (False, True):
        await space.stop_steward()
        await space.restart_broker(kill=kill)
        assert (await space.start_steward()).marks.file.regressions == []
    assert (await health(space)).healthy


async def test_a_clean_stop_remembers_the_last_record(space: RealSpace, backup: Backup) -> None:
    """A restore of a copy made minutes before is noticed although nothing but the last few records is missing."""
    await space.add("ada")
    await backup.take()
    (last,) = await post(space, "ada", 1)
    await space.stop_steward()
    backup.put_back()
    steward = await space.start_steward()
    assert [found.was for found in steward.marks.file.regressions] == [last]


def connect(space: RealSpace, name: str, **options: object) -> tidings.DirectAgent:
    return connect_directly(space.home.name, name=name, home=space.home.home, **options)  # type: ignore[arg-type]


async def texts(endpoint: tidings.DirectAgent, count: int) -> list[str]:
    found = []
    for _ in range(count):
        message = await endpoint.next_message(10)
        await message.ack()
        found.append(message.text)
    return found


async def whole(endpoint: tidings.DirectAgent) -> None:
    """Connected, every membership confirmed, nothing left to read."""
    held = endpoint.transport._channels.memberships
    await eventually(lambda: endpoint.transport.state == "ready" and all(each.is_whole for each in held.values()))


async def set_back(space: RealSpace, backup: Backup) -> None:
    await mark_head(space)
    await space.stop_steward()
    backup.put_back()
    await space.start_steward()


async def test_an_endpoint_that_stays_up_while_the_log_goes_backwards_joins_again_and_hears_what_is_new(
    space: RealSpace, backup: Backup
) -> None:
    places = ["general", "later"]
    await space.add("ada", read=places, post=places)
    await space.add("bob", read=places)
    errors: list[BaseException] = []
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        bob.on("error", errors.append)
        await ada.send("general", "kept")
        assert await texts(bob, 1) == ["kept"]
        await mark_head(space)
        await backup.take()
        await whole(bob)
        await bob.join("later")
        for number in range(10):
            await ada.send("general", f"lost {number}", timeout=10)
        last = await ada.send("later", "lost too")
        assert len(await texts(bob, 11)) == 11
        epoch = bob.transport.read_state.epoch
        await set_back(space, backup)
        await eventually(lambda: bob.transport.read_state.epoch == serving(space).marks.file.epoch != epoch)
        await whole(bob)
        for channel in places:
            sent = await ada.send(channel, f"new in {channel}", timeout=10)
            assert sent.seq <= last.seq, "a sequence that bob has seen before"
        assert sorted(await texts(bob, 2)) == ["new in general", "new in later"]
        held = (await bob.call(MembershipsRequest())).memberships
        assert {each.pattern for each in held} == set(places)
        assert len(bob.transport.queue) == 0, "what the log kept is not surfaced again"
    assert [type(each) for each in errors if isinstance(each, LogRegressed)] == [LogRegressed]


async def test_what_was_posted_before_anybody_noticed_that_the_log_went_backwards_is_not_missed(
    space: RealSpace, backup: Backup
) -> None:
    """The broker is back before the steward: live copies with sequences that were seen come first, and the join of
    whoever never left is written again after them."""
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await mark_head(space)
        await backup.take()
        await eventually(lambda: bob.transport.state == "ready")
        await bob.join("general")
        for number in range(10):
            await ada.send("general", f"lost {number}", timeout=10)
        assert len(await texts(bob, 10)) == 10
        await mark_head(space)
        await space.stop_steward()
        backup.put_back()
        await eventually(lambda: bob.transport.state == ada.transport.state == "ready")
        await ada.send("general", "new", timeout=10)
        await space.start_steward()
        await eventually(lambda: bob.transport.read_state.epoch == serving(space).marks.file.epoch)
        assert await texts(bob, 1) == ["new"]
        await whole(bob)
        assert len(bob.transport.queue) == 0


async def test_a_state_file_of_a_log_that_went_backwards_hides_nothing_new_and_shows_nothing_again(
    space: RealSpace, backup: Backup, tmp_path: Path
) -> None:
    await space.add("ada")
    await space.add("bob")
    state = tmp_path / "bob.state"
    async with connect(space, "bob", channels=["general"]):
        pass
    async with connect(space, "ada") as ada:
        await ada.send("general", "kept")
        await mark_head(space)
        await backup.take()
        await eventually(lambda: ada.transport.state == "ready")
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            for number in range(10):
                await ada.send("general", f"lost {number}", timeout=10)
            assert (await texts(bob, 11))[0] == "kept"
        await set_back(space, backup)
        await eventually(lambda: ada.transport.state == "ready")
        await ada.send("general", "new", timeout=10)
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            assert await texts(bob, 1) == ["new"]
            assert len(bob.transport.queue) == 0
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            assert bob.transport.read_state.epoch == serving(space).marks.file.epoch
            assert len(bob.transport.queue) == 0


async def test_an_endpoint_whose_connection_stood_hears_of_a_log_that_went_backwards_from_the_roster(
    space: RealSpace,
) -> None:
    """Its memberships may have been confirmed by a steward that had not noticed: the next one's word makes it ask."""
    await space.add("ada")
    await space.add("bob")
    errors: list[BaseException] = []
    async with connect(space, "ada") as ada, connect(space, "bob", channels=["general"]) as bob:
        bob.on("error", errors.append)
        for number in range(3):
            await ada.send("general", f"old {number}")
        assert len(await texts(bob, 3)) == 3
        await mark_head(space)
        rebuilds = bob.transport.connection.rebuilds
        await space.stop_steward()
        marks = msgspec.json.decode(space.home.marks.read_bytes())
        marks["marks"][-1][1] += 1  # as if another record had been there
        write_private(space.home.marks, msgspec.json.encode(marks).decode())
        steward = await space.start_steward()
        (found,) = steward.marks.file.regressions
        await eventually(lambda: bob.transport.read_state.epoch == found.epoch_after)
        await whole(bob)
        # bob remembers more than the steward's marks: the last record it saw is still there
        assert found.agreed < found.was
        assert f"agrees with what was seen only up to {found.was}:" in str(errors[-1])
        await ada.send("general", "new", timeout=10)
        assert await texts(bob, 1) == ["new"]
        assert bob.transport.connection.rebuilds == rebuilds
        assert len(bob.transport.queue) == 0


async def test_a_direct_message_with_the_sequence_of_one_in_hand_is_another_after_the_mailbox_went_backwards(
    space: RealSpace, backup: Backup
) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect(space, "ada") as ada, connect(space, "bob") as bob:
        await mark_head(space)
        await backup.take()
        await eventually(lambda: bob.transport.state == ada.transport.state == "ready")
        lost = await ada.dm(bob.id, "lost", timeout=10)
        in_hand = await bob.next_message(10)
        await space.stop_steward()
        backup.put_back()
        await space.start_steward()
        await eventually(lambda: bob.transport.state == ada.transport.state == "ready")
        new = await ada.dm(bob.id, "new", timeout=10)
        assert new.seq == lost.seq
        found = await bob.next_message(10)
        assert (in_hand.text, found.text) == ("lost", "new")
        await in_hand.ack()
        async with space.core() as js:
            mailbox = f"CONSUMER.INFO.DM_main.dm_{bob.id}"
            assert (await js.api(mailbox))["num_ack_pending"] == 1, "settling the one does not settle the other"
            await found.ack()
            assert (await js.api(mailbox))["num_ack_pending"] == 0


class HomeBackup(Backup):
    """Everything of the space, and what the steward remembers of it: a whole home that is put back."""

    async def take(self) -> None:
        await self.space.stop_steward()
        self.space.broker.stop()
        shutil.copytree(self.space.home.store, self.folder)
        shutil.copy(self.space.home.marks, self.folder.with_suffix(".marks"))
        self.space.broker.start()
        await self.space.start_steward()

    def put_back(self) -> None:
        super().put_back()
        shutil.copy(self.folder.with_suffix(".marks"), self.space.home.marks)


@pytest.mark.parametrize("marks", ["put back", "deleted"])
async def test_a_reader_tells_the_steward_of_a_log_that_was_put_back_together_with_its_marks(
    space: RealSpace, tmp_path: Path, marks: str
) -> None:
    """The steward's own memory agrees with the older log, or is gone: what a reader was told by it proves more."""
    await space.add("ada")
    await space.add("bob")
    copy, state = HomeBackup(space, tmp_path / "copy"), tmp_path / "bob.state"
    async with connect(space, "bob", channels=["general"], state=state):
        pass
    async with connect(space, "ada") as ada:
        await ada.send("general", "kept")
        await copy.take()
        await eventually(lambda: ada.transport.state == "ready")
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            for number in range(8):
                await ada.send("general", f"lost {number}", timeout=10)
            assert (await texts(bob, 9))[0] == "kept"
            epoch = bob.transport.read_state.epoch
        await space.stop_steward()
        copy.put_back()
        if marks == "deleted":
            space.home.marks.unlink()
        await space.start_steward()
        await eventually(lambda: ada.transport.state == "ready")
        new = [f"new {number}" for number in range(5)]
        for text in new:
            await ada.send("general", text, timeout=10)
        errors: list[BaseException] = []
        notices: list[tidings.Notice] = []
        late = connect(space, "bob", channels=["general"], state=state)
        late.on("error", errors.append)
        late.on("notice", notices.append)
        async with late as bob:
            assert await texts(bob, 5) == new
            assert len(bob.transport.queue) == 0
            (found,) = serving(space).marks.file.regressions
            assert found.epoch_before == epoch
            assert bob.transport.read_state.epoch == found.epoch_after == await epoch_of(space)
        assert sum(isinstance(each, LogRegressed) for each in errors) == 1
        assert [each.kind for each in notices] == ["set_back"]
        said = await health(space)
        assert "the log went backwards" in said.problems[0]
        # once is enough, whoever remembers it too
        async with connect(space, "bob", channels=["general"], state=state) as bob:
            assert len(bob.transport.queue) == 0
        assert len(serving(space).marks.file.regressions) == 1


async def test_what_only_a_reader_says_of_the_log_concerns_that_reader_and_is_named(
    space: RealSpace, caplog: pytest.LogCaptureFixture
) -> None:
    """No agent can make everybody read again by inventing a past; it is told how it differs, and is named."""
    await space.add("ada")
    await post(space, "ada")
    epoch = await epoch_of(space)
    async with space.agent("ada") as ada:
        joined = await ada.control.call(JoinRequest("general", epoch=epoch))
        assert joined.stamp is not None
        seq, mark, proof = joined.stamp.seq, joined.stamp.mark, joined.stamp.proof
        assert joined.agreed is None
        again = await ada.control.call(JoinRequest("general", epoch=epoch, marks=(joined.stamp,)))
        assert (again.agreed, again.epoch) == (None, epoch)
        for forged in (
            Stamp(seq, "0" * 20),
            Stamp(seq, "0" * 20, epoch, proof),
            Stamp(seq + 5, mark, epoch, proof),
            Stamp(seq, "0" * 20, "another", proof),
        ):
            claims = (forged, Stamp(seq - 1, "no such record"), joined.stamp if forged.seq != seq else Stamp(1, ""))
            told = await ada.control.call(JoinRequest("general", epoch=epoch, marks=claims))
            assert told.epoch == epoch == await epoch_of(space)
            assert told.agreed == (seq if forged.seq != seq else 0)
        with pytest.raises(UsageError):
            await raw_call(ada.control, "member", "join", pattern="general", marks=[["x"]])
    said = await health(space)
    assert (said.healthy, said.regressions) == (True, ())
    assert len(said.doubts) == 1
    assert "ada remembers another record at" in caplog.text


async def test_marks_are_not_among_what_is_copied_and_damaged_ones_are_put_aside_and_told(
    space: RealSpace, backup: Backup
) -> None:
    await space.add("ada")
    await mark_head(space)
    await backup.take()
    await post_void(space, "ada", 3)
    lost = await mark_head(space)
    await space.stop_steward()
    home = space.home
    backup.put_back()
    steward = await space.start_steward()
    assert [found.was >= lost for found in steward.marks.file.regressions] == [True]
    await space.stop_steward()
    home.marks.write_text(home.marks.read_text()[:-40])
    await space.start_steward()
    said = await health(space)
    assert "could not be read and lies in" in said.problems[0]
    assert len(list(home.marks.parent.glob("main.json.damaged-*"))) == 1
    async with space.administer() as admin:
        assert damaged(space) == {"AUD_main"}
        assert (await admin.call(AcknowledgeRequest())).acknowledged == 2
    assert (await health(space)).healthy
