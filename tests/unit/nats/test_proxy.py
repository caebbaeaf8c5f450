"""A proxy on the way: which one, what it is asked, and what its answer means."""

import pytest

from tidings.nats.address import parse_address
from tidings.nats.errors import ProtocolError, Unwritable
from tidings.nats.proxy import Proxy, check_tunnel, parse_proxy, proxy_for, tunnel_request

FAR = parse_address("wss://mesh.example")
PROXY = Proxy("proxy.example", 3128)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, PROXY),
        ({"https_proxy": "proxy.example:3128"}, PROXY),
        ({"ALL_PROXY": "http://proxy.example:3128/"}, PROXY),
        ({"HTTP_PROXY": "http://proxy.example:3128"}, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "other.example,.example"}, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "NO_PROXY": "*"}, None),
        ({"HTTPS_PROXY": "http://ada:s%40y@proxy.example"}, Proxy("proxy.example", 80, "ada:s@y")),
    ],
)
def test_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], found: Proxy | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(FAR) == found
    for other in ("tls://mesh.example:4222", "nats://mesh.example:4222", "ws://127.0.0.1:80"):
        assert proxy_for(parse_address(other)) is None, "it is for encrypted websockets alone"


@pytest.mark.parametrize("url", ["socks5://host:1080", "https://host:443", "http://", "http://host:port"])
def test_one_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Unwritable, match="HTTPS_PROXY"):
        parse_proxy(url)


def test_it_is_asked_for_a_tunnel_and_told_who_asks_if_it_wants_to_know() -> None:
    assert tunnel_request(PROXY, FAR) == b"CONNECT mesh.example:443 HTTP/1.1\r\nHost: mesh.example:443\r\n\r\n"
    known = tunnel_request(parse_proxy("http://ada:secret@proxy.example"), FAR)
    assert b"Proxy-Authorization: Basic YWRhOnNlY3JldA==\r\n" in known


def test_a_tunnel_is_what_2xx_opens_and_nothing_else() -> None:
    check_tunnel(PROXY, b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n")
    check_tunnel(PROXY, b"HTTP/1.0 200\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", r"proxy.example:3128 answered 403 Forbidden: it lets nobody through"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", r"407 .*: it wants a password"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", r"502 Bad Gateway$"),
        (b"HTTP/1.1 200 OK\r\n", "does not answer as a proxy does"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not answer as a proxy does"),
        (b"", "does not answer as a proxy does"),
        (b"HTTP/1.1 200 OK\r\n\r\nINFO {}\r\n", "speaks where the server should"),
    ],
)
def test_any_other_answer_is_said(answer: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        check_tunnel(PROXY, answer)
