"""Where the pipeline keeps its tables and its checkpoint: a folder, or a URI of a store that several machines reach.

Tables are opened by deltalake, with its own options (`--storage KEY=VALUE`) and its own variables of the environment
(`AWS_*`, `AZURE_*`, `GOOGLE_*`). A secret belongs into those: the list of processes shows a command line to every user,
so one is refused there. No option is ever printed, not even in a refusal.
Two drivers must not both win a commit. On S3 that takes conditional writes, so they are on, and turning them off is
refused. A store that does not answer is given up after half a minute, so that a halt is seen and said.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tidings.errors import UsageError

STORES = ("s3", "s3a", "abfss", "hdfs", "gs")
KNOWN = "a folder, or a URI that begins with file://, " + ", ".join(f"{name}://" for name in STORES)
_SECRET = re.compile(
    r"(?i)secret|password|token|sas|signature|credential|private|(account|storage|service|^access)_key$"
)
#: what lets two writers both win
_UNSAFE = {
    "aws_s3_allow_unsafe_rename": ("true", "1"),
    "aws_conditional_put": ("disabled",),
    "conditional_put": ("disabled",),
}
PATIENCE = {"timeout": "20s", "connect_timeout": "5s", "max_retries": "4", "retry_timeout": "30s"}


def checked_place(option: str, text: str) -> str:
    """An absolute path, or the URI of a store as it was given."""
    if "://" not in text:
        return str(Path(text).absolute())
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(f"{option} is {text!r}: after file:// comes a path that begins with /")
        return unquote(parts.path)
    if parts.scheme not in STORES:
        raise UsageError(f"{option} begins with {parts.scheme}://: {KNOWN} is needed")
    if parts.query or parts.fragment or parts.password or (parts.username and parts.scheme != "abfss"):
        raise UsageError(f"{option} holds more than a place: what proves who you are belongs into the environment")
    if not parts.netloc:
        raise UsageError(f"{option} is {text!r}: after {parts.scheme}:// comes a bucket, a container or a server")
    return text.rstrip("/")


def is_folder(place: str) -> bool:
    """Does it lie in the files of this machine (which others may share)?"""
    return "://" not in place or place.startswith("file://")


def below(place: str | Path, name: str) -> str:
    return f"{str(place).rstrip('/')}/{name}"


def checked_storage(given: Sequence[str]) -> dict[str, str]:
    """Options for deltalake out of KEY=VALUE, without secrets and without what would lose a commit."""
    options: dict[str, str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise UsageError("--storage takes KEY=VALUE, such as AWS_ENDPOINT_URL=https://store.example")
        if _SECRET.search(key) and not key.lower().endswith("_file"):
            raise UsageError(
                f"--storage {key}: every user of the machine reads a command line. Set {key.upper()} in the environment"
            )
        options[key] = value
    refuse_unsafe(options)
    return options


def refuse_unsafe(options: Mapping[str, str]) -> None:
    for where, named in (("--storage", options), ("the environment", os.environ)):
        for key, value in named.items():
            if value.lower() in _UNSAFE.get(key.lower(), ()):
                raise UsageError(
                    f"{where} has {key}={value}: two drivers could both win a commit, and one would be lost"
                )


def for_table(uri: str, options: Mapping[str, str]) -> dict[str, str]:
    """What deltalake is given to open a table there."""
    if is_folder(uri):
        return dict(options)
    given = {key.lower() for key in options}
    more = PATIENCE | ({"aws_conditional_put": "etag"} if uri.startswith("s3") else {})
    return {**{key: value for key, value in more.items() if key not in given}, **options}


def for_spark(place: str) -> str:
    """The same place as Spark calls it: Hadoop's S3 is s3a."""
    return place.replace("s3://", "s3a://", 1) if place.startswith("s3://") else place
