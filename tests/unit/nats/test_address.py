"""Addresses: where a server is, and whom a client trusts there."""

import ssl
from pathlib import Path

import pytest

from tidings.broker.certificate_files import CertificateFiles
from tidings.broker.certificates import ensure_certificates
from tidings.nats.address import Address, nearest, parse_address, parse_addresses, shown, trusting
from tidings.nats.errors import Unwritable


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
