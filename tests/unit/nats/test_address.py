"""Addresses: where a server is, and whom a client trusts there."""

import ssl
from pathlib import Path

import pytest

from tidings.nats.address import (
    Address,
    moved,
    nearest,
    parse_address,
    parse_addresses,
    shown,
    trusting,
    with_authority,
)
from tidings.nats.errors import Unwritable
from tidings.server.certificate_files import CertificateFiles
from tidings.server.certificates import ensure_certificates


def test_what_an_address_trusts_is_read_as_it_was_written_and_not_shown() -> None:
    url = trusting("192.0.2.7", 4222, b"\x30\x82\xff\xfe", "main.tidings.internal")
    found = parse_address(url)
    assert found == Address("192.0.2.7", 4222, True, b"\x30\x82\xff\xfe", "main.tidings.internal", True)
    assert found.server_name == "main.tidings.internal"
    assert shown(f"{url},nats://[::1]:7") == "tls://192.0.2.7:4222,nats://[::1]:7"
    assert parse_addresses(f"{url}, host")[1] == Address("host", 4222)


@pytest.mark.parametrize(
    "url",
    [
        "http://host:1",
        "nats://host:99999",
        "nats://",
        "nats://host:1?authority=AAAA",
        "tls://host:1?authority=A",
        "tls://host:1?authority=",
        "tls://host:1?authority=!!!!",
        "tls://host:1?trust=everybody",
        "tls://host:1?handshake=last",
        "tls://host:1?name",
        "ws://host:1",
        "ws://192.0.2.7:80",
        "ws://127.0.0.1:80?name=x",
        "wss://host:1?trust=everybody",
        "wss://host:1/a b",
    ],
)
def test_what_is_no_address_is_refused_and_never_guessed(url: str) -> None:
    with pytest.raises(Unwritable):
        parse_address(url)


def test_without_an_authority_the_systems_roots_decide_and_the_host_is_the_name() -> None:
    found = parse_address("tls://broker.example:4222?handshake=first")
    context = found.context()
    assert (found.server_name, found.tls_first, context.verify_mode) == ("broker.example", True, ssl.CERT_REQUIRED)
    assert context.check_hostname


def test_with_one_nobody_else_is_trusted(tmp_path: Path) -> None:
    der = ensure_certificates(CertificateFiles(tmp_path / "tls"), "main")
    context = parse_address(trusting("127.0.0.1", 1, der, "main.tidings.internal")).context()
    assert context.get_ca_certs(binary_form=True) == [der]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    with pytest.raises(Unwritable, match="not a certificate"):
        parse_address(trusting("127.0.0.1", 1, b"no certificate", "main.tidings.internal")).context()


def test_a_server_that_listens_everywhere_is_reached_on_loopback() -> None:
    assert [nearest(host) for host in ("0.0.0.0", "::", "192.0.2.7")] == ["127.0.0.1", "::1", "192.0.2.7"]


def test_a_websocket_is_encrypted_unless_it_is_on_this_machine_and_may_have_a_path() -> None:
    found = parse_address("wss://mesh.example/nats")
    assert (found.port, found.tls, found.tls_first, found.websocket, found.path) == (443, True, True, True, "/nats")
    assert (found.url, found.full_url) == ("wss://mesh.example:443/nats",) * 2
    assert parse_address("ws://localhost") == Address("localhost", 80, websocket=True)
    assert parse_address("ws://[::1]:8080").url == "ws://[::1]:8080"


TRUSTED = trusting("192.0.2.7", 4222, b"\x30\x82", "main.tidings.internal")
IN_WEBSOCKET = parse_address(TRUSTED)._replace(port=8443, websocket=True).full_url


@pytest.mark.parametrize(
    ("before", "url", "after"),
    [
        (TRUSTED, "192.0.2.8", "tls://192.0.2.8:4222"),
        (TRUSTED, "192.0.2.8:7", "tls://192.0.2.8:7"),
        (TRUSTED, "tls://mesh.example", "tls://mesh.example:4222"),
        (TRUSTED, "nats://mesh.example:7", "tls://mesh.example:7"),
        (TRUSTED, "wss://mesh.example", "wss://mesh.example:443"),
        (TRUSTED, "ws://127.0.0.1:7", "wss://127.0.0.1:7"),
        (f"{TRUSTED},{IN_WEBSOCKET}", "wss://mesh.example", "wss://mesh.example:8443"),
        (f"{TRUSTED},{IN_WEBSOCKET}", "mesh.example", "tls://mesh.example:4222"),
        (IN_WEBSOCKET, "mesh.example", "wss://mesh.example:8443"),
    ],
)
def test_a_space_that_moved_is_trusted_as_before_and_never_spoken_to_in_plain(
    before: str, url: str, after: str
) -> None:
    found = parse_address(moved(before, [url]))
    assert found.url == after
    assert (found.authority, found.name) == (b"\x30\x82", "main.tidings.internal")
    assert (found.tls, found.tls_first) == (True, True)


def test_several_addresses_may_be_given_one_by_one_or_with_commas() -> None:
    assert shown(moved(TRUSTED, ["a,b:7", "wss://c"])) == "tls://a:4222,tls://b:7,wss://c:443"
    assert moved("nats://127.0.0.1:7", ["host:9", "tls://there?name=x"]) == "nats://host:9,tls://there?name=x"
    assert moved(TRUSTED, [IN_WEBSOCKET]) == IN_WEBSOCKET
    with pytest.raises(Unwritable):
        moved(TRUSTED, [" , "])


def test_another_authority_is_trusted_by_every_address_that_trusted_one_and_nothing_else_changes() -> None:
    renewed = with_authority(f"{TRUSTED}, {IN_WEBSOCKET},nats://127.0.0.1:7", b"\x30\x83")
    assert [each.authority for each in parse_addresses(renewed)] == [b"\x30\x83", b"\x30\x83", None]
    assert [each._replace(authority=b"\x30\x82") for each in parse_addresses(renewed)[:2]] == [
        parse_address(TRUSTED),
        parse_address(IN_WEBSOCKET),
    ]
