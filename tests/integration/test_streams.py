"""The streams have exactly these settings, get them back when somebody changes them, and say so."""

import json
from pathlib import Path
from typing import Any

import pytest

from tidings.contract.channels import JoinRequest
from tidings.errors import StreamMismatch
from tidings.nats.errors import ApiError
from tidings.nats.jetstream_api import NO_END
from tidings.server.streams import set_gate
from tidings.wire.frames import frame_id
from tidings_testing.real_space import RealSpace, real_space
from tools.pouring import pour

MINUTE = 60_000_000_000
MIB = 1024 * 1024
BASE = {
    "storage": "file",
    "num_replicas": 1,
    "retention": "limits",
    "discard": "new",
    "allow_direct": True,
    "max_age": 0,
    "max_msgs": -1,
    "max_msgs_per_subject": -1,
    "max_msg_size": 270_336,
    "duplicate_window": 10 * MINUTE,
    "discard_new_per_subject": False,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
}
RULING = [f"td.main.{each}" for each in ("member.>", "acl.>", "channel.>", "link.>", "lease.>", "space")]
MAILBOX = {"max_msgs_per_subject": 1_000, "discard_new_per_subject": True, "max_bytes": 8 * MIB}
#: for a budget of 64 MiB
EXPECTED: dict[str, dict[str, Any]] = {
    "LOG_main": {
        "subjects": ["td.main.chat.>", "td.main.via.>", *RULING],
        "max_bytes": 64 * MIB,
        "max_consumers": 16,
        "republish": {"src": "td.main.>", "dest": "td.main.live.>"},
    },
    "DM_main": {"subjects": ["td.main.dm.>"], "max_consumers": 10_000, **MAILBOX},
    "TASK_main": {"subjects": ["td.main.task.>"], "max_consumers": 1_000, **MAILBOX},
    "DLV_main": {
        "subjects": ["td.main.dlv.>"],
        "retention": "workqueue",
        "max_msgs_per_subject": 64,
        "discard_new_per_subject": True,
        "duplicate_window": 2 * MINUTE,
        "max_msg_size": 614_400,
        "max_bytes": 16 * MIB,
        "max_consumers": 10_000,
    },
    "AUD_main": {"subjects": ["td.main.aud.>"], "max_bytes": 4 * MIB, "max_consumers": 16},
    "DEAD_main": {"subjects": ["td.main.dead.>"], "max_bytes": 4 * MIB, "max_consumers": 16},
    "BLK_main": {
        "subjects": ["td.main.blk.*.*.b"],
        "discard": "old",
        "max_msgs_per_subject": 1,
        "max_age": 7 * 24 * 60 * MINUTE,
        "max_msg_size": 304 * 1024,
        "max_bytes": 8 * MIB,
        "max_consumers": 1,
        "duplicate_window": 2 * MINUTE,
    },
    "KV_td_state_main": {
        "subjects": ["$KV.td_state_main.>"],
        "discard": "old",
        "max_msgs_per_subject": 1,
        "max_bytes": 16 * MIB,
        "max_consumers": 16,
        "duplicate_window": 2 * MINUTE,
    },
}


async def test_every_stream_has_exactly_the_settings_of_the_design(space: RealSpace) -> None:
    async with space.core() as js:
        assert sorted((await js.api("STREAM.NAMES"))["streams"]) == sorted(EXPECTED)
        for name, special in EXPECTED.items():
            config = (await js.info(name))["config"]
            found = {key: config.get(key, False) for key in BASE | special}
            assert found == BASE | special, name


async def test_the_broker_is_configured_as_the_design_says(space: RealSpace) -> None:
    text = (space.home.run / "nats.conf").read_text()
    assert 'sync_interval: "1s"' in text
    assert "max_payload: 1048576" in text
    assert f'listen: "127.0.0.1:{space.info.port}"' in text
    assert "max_age" not in text


async def test_a_second_provisioning_changes_nothing(space: RealSpace) -> None:
    async with space.administer() as admin:
        assert await admin.provision() == []


async def change(space: RealSpace, stream: str, **settings: Any) -> None:
    async with space.core() as js:
        config = (await js.info(stream))["config"]
        await js.api(f"STREAM.UPDATE.{stream}", {**config, **settings})


@pytest.mark.parametrize(
    ("stream", "settings", "words"),
    [
        ("LOG_main", {"max_age": 3600 * 10**9}, "max_age is 3600000000000, should be 0"),
        ("LOG_main", {"discard": "old"}, "discard is 'old', should be 'new'"),
        ("LOG_main", {"allow_rollup_hdrs": True}, "allow_rollup_hdrs is True, should be False"),
        ("LOG_main", {"max_bytes": MIB}, "max_bytes is 1048576, should be 67108864"),
        ("DM_main", {"max_msgs_per_subject": 5}, "max_msgs_per_subject is 5, should be 1000"),
        ("DLV_main", {"max_consumers": 7}, "max_consumers is 7, should be 10000"),
        ("DLV_main", {"duplicate_window": MINUTE}, "duplicate_window is 60000000000"),
    ],
)
async def test_a_setting_that_was_changed_is_brought_back_and_told(
    space: RealSpace, stream: str, settings: dict[str, Any], words: str
) -> None:
    await change(space, stream, **settings)
    async with space.administer() as admin:
        (told,) = await admin.provision()
    assert told.startswith(f"{stream} reconciled")
    assert words in told
    async with space.core() as js:
        assert (await js.info(stream))["config"].get(next(iter(settings)), 0) == {**BASE, **EXPECTED[stream]}[
            next(iter(settings))
        ]


async def test_memberships_are_still_there_after_a_reconciliation(space: RealSpace) -> None:
    await space.add("ada")
    async with space.agent("ada") as ada:
        await ada.control.call(JoinRequest("general"))
        await change(space, "LOG_main", max_bytes=MIB)
        async with space.administer() as admin:
            await admin.provision()
        assert (await ada.control.call(JoinRequest("general"))).state == "resumed"


@pytest.mark.parametrize(
    ("stream", "settings", "word"),
    [
        ("LOG_main", {"storage": "memory"}, "storage"),
        ("LOG_main", {"retention": "workqueue"}, "retention"),
        ("DLV_main", {"retention": "limits"}, "retention"),
        ("DM_main", {"allow_msg_ttl": True}, "allow_msg_ttl"),
    ],
)
async def test_a_setting_the_broker_will_not_change_is_refused_by_name(
    tmp_path: Path, stream: str, settings: dict[str, Any], word: str
) -> None:
    async with real_space(tmp_path / "home", steward=False) as space:
        async with space.core() as js:
            config = (await js.info(stream))["config"]
            await js.api(f"STREAM.DELETE.{stream}")
            await js.api(f"STREAM.CREATE.{stream}", {**config, **settings})
        async with space.administer() as admin:
            with pytest.raises(StreamMismatch) as refused:
                await admin.provision()
        assert stream in str(refused.value)
        assert f"{word} is" in str(refused.value)


async def test_a_closed_gate_is_a_state_and_not_a_wrong_setting(tmp_path: Path) -> None:
    async with real_space(tmp_path / "home", steward=False) as space, space.core() as js:
        await set_gate(js, space.subjects, gate_open=False)
        async with space.administer() as admin:
            assert await admin.provision() == []
        config = (await js.info("LOG_main"))["config"]
        assert sorted(config["subjects"]) == sorted(RULING)
        assert config["max_bytes"] == (64 + 64) * MIB


async def test_several_spaces_live_side_by_side_in_one_home(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with real_space(home, "main") as main, real_space(home, "lab") as lab:
        assert main.info.port != lab.info.port
        assert main.info.id != lab.info.id
        for space in (main, lab):
            await space.add("ada")
        async with main.agent("ada") as there, lab.agent("ada") as here, lab.core() as js:
            for each in (there, here):
                assert (await each.control.call(JoinRequest("general"))).state == "opened"
            before = (await js.info("LOG_lab"))["state"]["last_seq"]
            await there.post("general", b"to main only")
            assert (await js.info("LOG_lab"))["state"]["last_seq"] == before
            assert (await js.api("STREAM.NAMES"))["streams"] == sorted(n.replace("main", "lab") for n in EXPECTED)


async def test_a_pair_that_floods_fills_its_own_subject_and_nobody_elses(space: RealSpace) -> None:
    for name in ("ada", "mal"):
        await space.add(name)
    async with space.agent("mal") as mal, space.agent("ada") as ada, space.core() as js:
        flood = space.subjects.direct(ada.id, mal.id)
        await pour(js, ((flood, b"x", {}) for _ in range(1_000)))
        refused = json.loads((await mal.connection.request(flood, b"x", timeout=5)).data)
        assert refused["error"]["err_code"] == 10077
        other = json.loads((await ada.connection.request(space.subjects.direct(mal.id, ada.id), b"x", timeout=5)).data)
        assert "error" not in other


@pytest.mark.parametrize("header", [{"Nats_TTL": "1s"}, {"Nats_Rollup": "all"}, {"Nats_Rollup": "sub"}])
async def test_a_sender_can_neither_age_nor_roll_up_the_log(space: RealSpace, header: dict[str, str]) -> None:
    await space.add("mal")
    async with space.agent("mal") as mal, space.core() as js:
        await mal.post("general", b"stays")
        before = (await js.info("LOG_main"))["state"]
        assert "error" in await mal.post("general", b"refused", **header)
        assert (await js.info("LOG_main"))["state"]["messages"] == before["messages"]


async def test_a_message_of_256_kib_fits_with_its_headers_and_a_larger_one_does_not(space: RealSpace) -> None:
    """N18: the limit is the payload's; headers have room of their own."""
    await space.add("ada")
    async with space.agent("ada") as ada:
        assert "seq" in await ada.post("general", b"x" * 256 * 1024)
    async with space.core() as js:
        with pytest.raises(ApiError, match="maximum allowed"):
            await js.publish("td.main.chat.X.general", b"x" * (264 * 1024 + 1))


async def test_a_replay_that_packs_differently_loses_nothing(space: RealSpace) -> None:
    """F6: attempt one packs [b], dies; attempt two packs [a], [b]. By position the broker would drop [a]."""
    granted = await space.add("ada")
    subject = space.subjects.delivery(granted.row.id)
    async with space.core() as core:

        async def publish(frame: bytes, name: str) -> None:
            await core.publish(subject, frame, {"Nats-Msg-Id": name})

        for frame in (b"b",):
            await publish(frame, frame_id(frame))
        for frame in (b"a", b"b"):
            await publish(frame, frame_id(frame))
        pages = [r async for page in core.read("DLV_main", subject, 1, 99) for r in page]
        assert [record.payload for record in pages] == [b"b", b"a"]
        await core.purge("DLV_main", subject_filter=subject, below=NO_END)
        for position, frame in enumerate((b"d",)):
            await publish(frame, f"{granted.row.id}:7:{position}")
        for position, frame in enumerate((b"c", b"d")):
            await publish(frame, f"{granted.row.id}:7:{position}")
        pages = [r async for page in core.read("DLV_main", subject, 1, 99) for r in page]
        assert b"c" not in [record.payload for record in pages], "what names by position would do"
