"""How another space is reached is kept, read strictly, and forgotten whole."""

import stat
from pathlib import Path

import pytest

from tidings.admin.link_peers import LinkPeers, PeerAccess
from tidings.errors import ConfigError
from tidings.nats import jwt
from tidings.wire.signing import ACCOUNT, KeyPair

LINK = "abcdefghijkl"


def access(**changes: str) -> PeerAccess:
    fields = {
        "link": LINK,
        "space": "acme",
        "id": KeyPair.generate(ACCOUNT).id,
        "steward": KeyPair.generate().id,
        "url": "nats://127.0.0.1:4222",
    }
    return PeerAccess(**{**fields, **changes})


def creds() -> str:
    return jwt.credentials("a.b.c", KeyPair.generate())


@pytest.fixture
def peers(tmp_path: Path) -> LinkPeers:
    return LinkPeers(tmp_path / "links" / "peers")


def test_what_was_put_is_found_and_nobody_else_reads_it(peers: LinkPeers) -> None:
    told, secret = access(), creds()
    peers.put(told, secret)
    assert peers.get(LINK) == told
    assert peers.all() == [told]
    assert peers.creds(LINK).read_text() == secret
    assert {stat.S_IMODE(path.stat().st_mode) for path in peers.folder.iterdir()} == {0o600}


def test_what_was_forgotten_is_gone_with_its_credential_and_may_be_forgotten_again(peers: LinkPeers) -> None:
    peers.put(access(), creds())
    peers.forget(LINK)
    peers.forget(LINK)
    assert peers.get(LINK) is None
    assert list(peers.folder.iterdir()) == []


def test_one_file_without_the_other_is_none(peers: LinkPeers) -> None:
    peers.put(access(), creds())
    peers.creds(LINK).unlink()
    assert peers.get(LINK) is None


@pytest.mark.parametrize("text", ["{", "{}", '{"link": 1}'])
def test_a_damaged_file_is_named(peers: LinkPeers, text: str) -> None:
    peers.put(access(), creds())
    path = peers.folder / f"{LINK}.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{LINK}.json is damaged"):
        peers.get(LINK)


def test_a_place_that_is_none_and_a_credential_that_is_none_are_refused(peers: LinkPeers) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        access(url="http://example.test")
    with pytest.raises(ConfigError, match="not the credential"):
        peers.put(access(), "nothing")
    assert not peers.folder.exists()
