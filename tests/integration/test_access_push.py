"""N21: a change of access reaches an agent that is connected, wherever it is, and it goes on with what is new."""

import json
from pathlib import Path
from typing import Any

import pytest

import tidings
from tidings.admin.agents import AgentFile, Ledger
from tidings.client.connect import connect_directly as connect
from tidings.errors import DeniedError
from tidings.nats import jwt
from tidings_testing.real_space import RealSpace
from tidings_testing.waiting import eventually


def export(space: RealSpace, name: str, folder: Path) -> Path:
    """A bundle with its own copy of the credential, as on another machine."""
    row = Ledger(space.home.issued).active(name)
    assert row is not None
    bundle = folder / f"{name}.json"
    content = {
        "space": "main",
        "space_id": space.info.id,
        "steward_key": space.info.steward_key,
        "url": space.info.url,
        "agent": {"name": name, "id": row.id},
        "creds": space.home.agent_creds(name).read_text(),
    }
    bundle.write_text(json.dumps(content))
    bundle.chmod(0o600)
    return bundle


def heard(endpoint: tidings.DirectAgent) -> tuple[list[dict[str, Any]], list[Any]]:
    changes: list[dict[str, Any]] = []
    errors: list[Any] = []
    endpoint.on("access", changes.append)
    endpoint.on("error", errors.append)
    return changes, errors


async def set_access(space: RealSpace, name: str, read: tuple[str, ...], post: tuple[str, ...]) -> None:
    async with space.administer() as admin:
        await admin.set_access(name, AgentFile(name, read=read, post=post))


async def test_n21_wider_access_reaches_an_agent_elsewhere_while_it_only_listens(
    space: RealSpace, tmp_path: Path
) -> None:
    await space.add("ada")
    await space.add("bob", read=["general", "ops"], post=["general", "ops"])
    async with (
        connect(bundle=export(space, "ada", tmp_path)) as ada,
        connect("main", name="bob", home=space.home.home) as bob,
    ):
        changes, errors = heard(ada)
        await ada.join("general")
        await set_access(space, "ada", ("general", "ops"), ("general", "ops"))
        await eventually(lambda: changes)
        assert (changes[0]["read"], changes[0]["dropped"]) == (["general", "ops"], [])
        assert "jwt" not in changes[0]
        assert ada.transport.connection.token_used == ada.transport.identity.token(), (
            "it is connected with what it kept"
        )
        assert "ops" in json.dumps(jwt.decode(ada.transport.identity.token()))
        await ada.join("ops")
        await bob.send("ops", "welcome")
        assert (await ada.next_message(10)).text == "welcome"
        assert (errors, len(changes)) == ([], 1)


async def test_n21_narrower_access_reaches_an_agent_elsewhere_before_its_old_credential_is_cut(
    space: RealSpace, tmp_path: Path
) -> None:
    await space.add("ada", read=["general", "ops"], post=["general", "ops"])
    await space.add("bob", read=["general", "ops"], post=["general", "ops"])
    async with (
        connect(bundle=export(space, "ada", tmp_path), channels=["general", "ops"]) as ada,
        connect("main", name="bob", home=space.home.home) as bob,
    ):
        changes, errors = heard(ada)
        await set_access(space, "ada", ("general",), ("general",))  # ends when the old credential is void
        assert [(each["read"], each["dropped"]) for each in changes] == [(["general"], ["ops"])]
        assert ada.transport.joined == ["general"]
        await bob.send("ops", "secret")
        await bob.send("general", "open")
        assert (await ada.next_message(10)).text == "open"
        assert (await ada.send("general", "still here")).seq > 0
        with pytest.raises(DeniedError):
            await ada.send("ops", "no longer")
        assert (errors, ada.transport.connection.rebuilds) == ([], 1)


async def test_n21_a_bundle_older_than_its_record_is_renewed_when_it_connects(space: RealSpace, tmp_path: Path) -> None:
    await space.add("ada")
    bundle = export(space, "ada", tmp_path)
    await set_access(space, "ada", ("general", "ops"), ("general",))
    async with connect(bundle=bundle) as ada:
        await eventually(lambda: "ops" in json.dumps(jwt.decode(ada.transport.connection.token_used)))


async def test_a_change_of_access_is_no_presence_of_the_agent(space: RealSpace) -> None:
    await space.add("ada")
    await space.add("bob")
    async with connect("main", name="bob", home=space.home.home) as bob:
        told: list[str] = []
        bob.on("presence", lambda agent: told.append(agent.name))
        before = (await bob.transport.resolve("ada")).access
        await set_access(space, "ada", ("general", "ops"), ("general",))
        await eventually(
            lambda: (row := bob.transport.roster.get(bob.transport.roster.resolve("ada").id)) and row.access > before
        )
        assert "ada" not in told
