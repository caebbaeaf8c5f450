"""The connection of a link to a space: opened when it is needed, as whoever its credential is of."""

from pathlib import Path
from typing import Any

import pytest

from tidings.errors import ConfigError
from tidings.links import connection as module
from tidings.links.connection import LinkConnection
from tidings.nats import jwt
from tidings.util.private_files import write_private
from tidings.wire.signing import KeyPair


class Opened:
    """As much of a connection as is asked of it here."""

    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


async def test_with_another_key_in_its_file_it_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users: list[str] = []

    async def connect(_url: str, _creds: Path, user: str, **_more: Any) -> Opened:
        users.append(user)
        return Opened()

    monkeypatch.setattr(module, "connect", connect)
    old, new = KeyPair.generate(), KeyPair.generate()
    creds = tmp_path / "peer.creds"
    write_private(creds, jwt.credentials("token", old))
    link = LinkConnection("nats://127.0.0.1:1", creds, name="link")
    first = await link.get()
    assert await link.get() is first
    write_private(creds, jwt.credentials("another token", new))
    second = await link.get()
    assert (users, first.is_closed, second is first) == ([old.id, new.id], True, False)
    await link.close()


def test_its_credential_is_read_once_and_again_when_the_file_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read(path: Path) -> str:
        reads.append(path)
        return path.read_text()

    monkeypatch.setattr(module, "read_private", read)
    old, new = KeyPair.generate(), KeyPair.generate()
    creds = tmp_path / "peer.creds"
    write_private(creds, jwt.credentials("token", old))
    link = LinkConnection("nats://127.0.0.1:1", creds, name="link")
    assert [link.user, link.user, len(reads)] == [old.id, old.id, 1]
    write_private(creds, jwt.credentials("token", new))
    assert [link.user, link.user, len(reads)] == [new.id, new.id, 2]


def test_a_credential_that_others_may_read_by_now_is_refused_though_it_was_read(tmp_path: Path) -> None:
    creds = tmp_path / "peer.creds"
    key = KeyPair.generate()
    write_private(creds, jwt.credentials("token", key))
    link = LinkConnection("nats://127.0.0.1:1", creds, name="link")
    assert link.user == key.id
    creds.chmod(0o644)
    with pytest.raises(ConfigError):
        _ = link.user
