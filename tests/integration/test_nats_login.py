"""Every way to log in, for reading and for writing, against servers that ask for it."""

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bare import bare_server, guarded
from tidings.errors import AuthRevoked, BrokerUnreachable, UntrustedServer, UsageError
from tidings.wire.signing import KeyPair

pytest.importorskip("pyspark")

import pyarrow as pa

from tidings.delivery.login import GivenOptions, Login
from tidings.delivery.sink import SinkOptions, publish_batches
from tidings.delivery.source import NatsReader
from tidings.delivery.source_options import SourceOptions

ROW = pa.record_batch({"subject": ["logged.in"], "id": ["1"], "data": [b"in"]})


def write_and_read(url: str, **options: str) -> list[dict[str, Any]]:
    """One row into the stream `logged` and out again, with the same options."""
    publish_batches(SinkOptions.of({"url": url, **options}, ROW.schema.names, overwrite=False), [ROW])
    reader = NatsReader(SourceOptions.of({"url": url, "stream": "logged", **options}))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def text(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


def test_user_and_password_from_an_option_or_a_file(tmp_path: Path) -> None:
    with guarded(tmp_path / "js", 'user: ada, password: "s3cret"') as server:
        file = text(tmp_path / "password", "s3cret\n")
        assert len(write_and_read(server.url, user="ada", password="s3cret")) == 1
        assert len(write_and_read(server.url, user="ada", passwordFile=file)) == 1
        for wrong in ({}, {"user": "ada", "password": "other"}, {"token": "s3cret"}):
            with pytest.raises(AuthRevoked) as refused:
                write_and_read(server.url, **wrong)
            assert "other" not in str(refused.value)


def test_a_token_from_an_option_or_a_file(tmp_path: Path) -> None:
    with guarded(tmp_path / "js", 'token: "t0ken"') as server:
        assert len(write_and_read(server.url, token="t0ken")) == 1
        assert len(write_and_read(server.url, tokenFile=text(tmp_path / "token", "t0ken\n"))) == 1
        with pytest.raises(AuthRevoked):
            write_and_read(server.url, token="other")


def test_an_nkey_by_the_file_of_its_seed(tmp_path: Path) -> None:
    key, other = KeyPair.generate(), KeyPair.generate()
    with guarded(tmp_path / "js", f"users: [{{nkey: {key.id}}}]") as server:
        assert len(write_and_read(server.url, nkey=text(tmp_path / "nkey", f"# mine\n{key.seed}\n"))) == 1
        with pytest.raises(AuthRevoked):
            write_and_read(server.url, nkey=text(tmp_path / "other", other.seed))
    with pytest.raises(UsageError, match="holds no seed of a user"):
        write_and_read("nats://127.0.0.1:1", nkey=text(tmp_path / "empty", "nothing\n"))


def test_answers_come_on_the_inbox_a_user_may_listen_to(tmp_path: Path) -> None:
    narrow = 'users: [{user: ada, password: a, permissions: {subscribe: ["mine.>"], publish: ">"}}]'
    with guarded(tmp_path / "js", narrow) as server:
        assert len(write_and_read(server.url, user="ada", password="a", inboxPrefix="mine.box")) == 1


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, which signed server.pem (for 127.0.0.1) and client.pem, with their keys beside them."""
    if shutil.which("openssl") is None and not os.environ.get("CI"):
        pytest.skip("needs the command openssl to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test ca")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(*signing, "-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "names")
    return folder


def test_a_server_is_trusted_by_its_authority_and_asks_for_our_certificate(tmp_path: Path, certificates: Path) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "client.pem", "client.key"))
    tls = f'cert_file: "{certificates}/server.pem", key_file: "{certificates}/server.key", ca_file: "{ca}"'
    with guarded(tmp_path / "plain", "", f"tls {{ {tls} }}") as server:
        assert len(write_and_read(server.url, tlsCa=ca)) == 1
        with pytest.raises(UntrustedServer, match="its certificate is not by the authority"):
            write_and_read(server.url)
    with guarded(tmp_path / "mutual", "", f"tls {{ {tls}, verify: true }}") as server:
        assert len(write_and_read(server.url.replace("nats:", "tls:"), tlsCa=ca, tlsCert=cert, tlsKey=key)) == 1
        with pytest.raises(BrokerUnreachable):
            write_and_read(server.url, tlsCa=ca)
    with pytest.raises(UsageError, match="cannot be used"):
        write_and_read("nats://127.0.0.1:1", tlsCa=str(tmp_path / "nowhere.pem"))


def test_a_handshake_before_the_greeting(tmp_path: Path, certificates: Path) -> None:
    tls = f'cert_file: "{certificates}/server.pem", key_file: "{certificates}/server.key", handshake_first: true'
    folder = tmp_path / "first"
    folder.mkdir()
    with ExitStack() as stack:
        opened = stack.enter_context(bare_server(folder))
        opened.stream("logged")
        stack.close()
        server = stack.enter_context(bare_server(folder, f"tls {{ {tls} }}", greets=False))
        assert len(write_and_read(server.url, tlsCa=str(certificates / "ca.pem"), tlsFirst="true")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"creds": "/c", "token": "t"}, "creds and token are different ways to log in"),
        ({"user": "ada"}, "user needs password or passwordFile"),
        ({"password": "a"}, "they need user"),
        ({"user": "ada", "password": "a", "passwordFile": "/f"}, "one of them"),
        ({"tlsKey": "/k"}, "give tlsCert too"),
        ({"tlsFirst": "yes"}, "option tlsFirst is 'yes': one of false, true"),
    ],
)
def test_ways_to_log_in_that_cannot_be_meant_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Login.of(GivenOptions(options, Login.NAMES, "source"))


def test_a_file_that_is_not_there_is_named_with_its_option(tmp_path: Path) -> None:
    for name in ("creds", "nkey", "tokenFile"):
        with pytest.raises(UsageError, match=f"the file of the option {name} cannot be read"):
            write_and_read("nats://127.0.0.1:1", **{name: str(tmp_path / "nothing")})


def test_no_secret_is_in_a_representation_or_in_an_address() -> None:
    for secret in ({"user": "ada", "password": "hunter2"}, {"token": "hunter2"}):
        given = {"url": "nats://localhost", **secret}
        assert "hunter2" not in repr(SourceOptions.of({**given, "stream": "s"}))
        assert "hunter2" not in repr(SinkOptions.of(given, ROW.schema.names, overwrite=False))
    with pytest.raises(UsageError, match="give user and password as options") as refused:
        SourceOptions.of({"url": "nats://ada:hunter2@localhost", "stream": "s"})
    assert "hunter2" not in str(refused.value)
