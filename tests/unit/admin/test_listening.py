"""Where a space listens: what can be said, and what is remembered."""

import base64
import errno
import socket
import tomllib
from pathlib import Path

import pytest

from tidings.admin import listening
from tidings.admin.creation import broker_config, create_space
from tidings.admin.home import SpaceHome
from tidings.admin.listening import address_for, listen_on, parse_listen, public_host, websocket_on
from tidings.errors import BrokerFailed, UsageError
from tidings.nats.address import parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.0.2.7", "192.0.2.7", None),
        ("0.0.0.0:4222", "0.0.0.0", 4222),
        ("[::]:4222", "::", 4222),
        ("[2001:db8::7]", "2001:db8::7", None),
    ],
)
def test_an_address_with_or_without_a_port(text: str, host: str, port: int | None) -> None:
    assert parse_listen(text) == (host, port)


@pytest.mark.parametrize("text", ["", "broker.example", "192.0.2.7:0", "192.0.2.7:70000", "192.0.2", "::1", "on"])
def test_what_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as|between"):
        parse_listen(text)


def test_it_is_remembered_until_it_is_off_and_the_authority_stays(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    made = create_space(home, port=None, open_space=False, budget=None)
    assert made.url == made.address == f"nats://127.0.0.1:{made.port}"
    assert listen_on(home, None) == made
    assert not home.certificates.folder.exists(), "nobody asked for it"
    assert "tls" not in broker_config(home, made).render()
    listening = listen_on(home, "127.0.0.2:4333")
    assert listening == home.read_info() == listen_on(home, None)
    found = parse_address(listening.url)
    assert (found.host, found.port, found.name) == ("127.0.0.2", 4333, "main.tidings.internal")
    assert found.authority == base64.b64decode(listening.authority)
    assert listening.address == "tls://127.0.0.2:4333"
    rendered = broker_config(home, listening).render()
    assert 'listen: "127.0.0.2:4333"' in rendered
    assert "handshake_first: true" in rendered
    assert "allow_non_tls" not in rendered
    off = listen_on(home, "off")
    assert (off.url, off.authority) == ("nats://127.0.0.1:4333", listening.authority)
    assert listen_on(home, "127.0.0.2").authority == listening.authority


def test_others_are_given_the_address_it_listens_on_or_the_usual_one_of_the_machine(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    create_space(home, port=None, open_space=False, budget=None)
    assert public_host(home.read_info()) == "127.0.0.1"
    assert public_host(listen_on(home, "127.0.0.2")) == "127.0.0.2"


def test_a_bundle_for_elsewhere_says_whom_to_trust_whatever_address_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = SpaceHome(tmp_path, "main")
    plain = create_space(home, port=None, open_space=False, budget=None)
    assert address_for(plain, ["nats://tunnel:7"]) == "nats://tunnel:7"
    info = listen_on(home, "0.0.0.0:4333")
    by_name = parse_address(address_for(info, ["tls://broker.example:443"]))
    assert (by_name.host, by_name.port, by_name.name) == ("broker.example", 443, "main.tidings.internal")
    assert by_name.authority == base64.b64decode(info.authority)
    whole = info.url_at("elsewhere")
    assert address_for(info, [whole]) == whole
    monkeypatch.setattr(listening, "public_host", lambda info: info.host)
    with pytest.raises(UsageError, match="does not say by which address"):
        address_for(info, [])


def test_where_it_takes_websockets_is_remembered_beside_it(tmp_path: Path) -> None:
    home = SpaceHome(tmp_path, "main")
    made = create_space(home, port=None, open_space=False, budget=None)
    assert websocket_on(home, None) == made
    assert "websocket {" not in broker_config(home, made).render()
    taking = websocket_on(home, "127.0.0.2:8443")
    assert taking == home.read_info() == websocket_on(home, None)
    assert (taking.url, taking.address) == (made.url, made.address), "programs of this machine go on as they did"
    assert taking.addresses == f"{made.address} and wss://127.0.0.2:8443"
    found = parse_address(taking.ws_url_at("mesh.example"))
    assert (found.url, found.name) == ("wss://mesh.example:8443", "main.tidings.internal")
    assert found.authority == base64.b64decode(taking.authority)
    rendered = broker_config(home, taking).render()
    assert (
        'websocket { listen: "127.0.0.2:8443", same_origin: true, handshake_timeout: "3s", tls { cert_file:' in rendered
    )
    assert "no_tls" not in rendered
    assert 'listen: "127.0.0.1:' in rendered
    both = listen_on(home, "127.0.0.2:4333")
    assert both.authority == taking.authority
    given = [parse_address(url).url for url in address_for(both, []).split(",")]
    assert given == ["tls://127.0.0.2:4333", "wss://127.0.0.2:8443"]
    chosen = address_for(both, ["mesh.example", "wss://mesh.example"])
    assert [parse_address(url).url for url in chosen.split(",")] == [
        "tls://mesh.example:4333",
        "wss://mesh.example:8443",
    ]
    assert chosen.count("authority=") == 2
    with pytest.raises(UsageError, match="port 4333 is the broker's own"):
        websocket_on(home, "127.0.0.2:4333")
    assert websocket_on(home, "off").ws == ""
    assert websocket_on(home, "127.0.0.3").ws_port == 8443, "addresses in bundles stay good"


def test_a_port_that_only_an_administrator_may_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = SpaceHome(tmp_path, "main")
    made = create_space(home, port=None, open_space=False, budget=None)

    def refuse(_self: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(
        "tidings.server.nats_server.socket.socket", type("Refusing", (socket.socket,), {"bind": refuse})
    )
    with pytest.raises(BrokerFailed, match="may not listen on port 443: choose one above 1023"):
        websocket_on(home, "127.0.0.2:443")
    assert home.read_info() == made


def test_a_space_that_never_listened_is_read_by_the_version_before_and_one_of_a_later_version_here(
    tmp_path: Path,
) -> None:
    home = SpaceHome(tmp_path, "main")
    create_space(home, port=None, open_space=False, budget=None)
    assert not {"listen", "authority", "certificate", "ws", "ws_port"} & set(tomllib.loads(home.info_path.read_text()))
    home.info_path.write_text(home.info_path.read_text() + 'moon = "full"\n')
    assert home.read_info().name == "main"
