"""The folder of a checkpoint, wherever it is: on this machine, or wherever Spark can write through Hadoop.

Spark writes a checkpoint through Hadoop's file systems, so what lies in one is read and written through the same, with
the settings and credentials that Spark has. A folder of this machine needs no JVM for that.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from py4j.protocol import Py4JError, Py4JJavaError

from tidings.delivery.storage import below, for_spark, is_folder
from tidings.errors import PrerequisiteMissing, StoreError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JARS = {"s3a": "hadoop-aws", "abfss": "hadoop-azure", "gs": "gcs-connector"}


class CheckpointFolder(Protocol):
    """Files of a folder by their names below it."""

    @property
    def place(self) -> str:
        """As Spark is given it."""

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, content: bytes) -> None:
        """Make it, or write it anew; folders on the way are made."""

    def remove(self, name: str) -> None:
        """It need not be there."""

    def names(self, name: str) -> list[str]:
        """What lies in a folder below; nothing if there is none."""

    def put_aside(self, mark: str) -> None:
        """Rename all of it, if it is there: its name gets the mark as an ending."""


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> str:
        return str(self.path)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def names(self, name: str) -> list[str]:
        try:
            return [path.name for path in (self.path / name).iterdir()]
        except FileNotFoundError:
            return []

    def put_aside(self, mark: str) -> None:
        with suppress(FileNotFoundError):
            self.path.rename(self.path.with_name(f"{self.path.name}.{mark}"))


class HadoopFolder:
    """`PrerequisiteMissing` if this Spark has no file system of that kind."""

    def __init__(self, spark: SparkSession, place: str) -> None:
        self._place = for_spark(place)
        jvm: Any = spark._jvm
        self._path_of = jvm.org.apache.hadoop.fs.Path
        settings: Any = spark.sparkContext._jsc.hadoopConfiguration()
        try:
            self._files = self._path(self._place).getFileSystem(settings)
        except Py4JJavaError as error:
            raise PrerequisiteMissing(_lacking(self._place, error)) from None

    @property
    def place(self) -> str:
        return self._place

    def _path(self, text: str) -> Any:
        return self._path_of(text)

    def _at(self, name: str) -> Any:
        return self._path(below(self._place, name))

    def read(self, name: str) -> bytes | None:
        try:
            stream = self._files.open(self._at(name))
        except Py4JJavaError as error:
            if _is_absent(error):
                return None
            raise self._failed("read", error) from error
        try:
            return bytes(stream.readAllBytes())
        except Py4JError as error:
            raise self._failed("read", error) from error
        finally:
            stream.close()

    def write(self, name: str, content: bytes) -> None:
        try:
            stream = self._files.create(self._at(name), True)
            stream.write(content, 0, len(content))
            stream.close()
        except Py4JError as error:
            raise self._failed("written", error) from error

    def remove(self, name: str) -> None:
        try:
            self._files.delete(self._at(name), False)
        except Py4JError as error:
            raise self._failed("written", error) from error

    def names(self, name: str) -> list[str]:
        try:
            return [str(each.getPath().getName()) for each in self._files.listStatus(self._at(name))]
        except Py4JJavaError as error:
            if _is_absent(error):
                return []
            raise self._failed("read", error) from error

    def put_aside(self, mark: str) -> None:
        path = self._path(self._place)
        try:
            if self._files.exists(path) and not self._files.rename(path, self._path(f"{self._place}.{mark}")):
                raise StoreError(f"the checkpoint {self._place} cannot be renamed: move it away, and delivery goes on")
        except Py4JError as error:
            raise self._failed("renamed", error) from error

    def _failed(self, what: str, error: Py4JError) -> StoreError:
        return StoreError(f"the checkpoint {self._place} cannot be {what}: {_words(error)}")


def folder_at(spark: SparkSession, place: str) -> CheckpointFolder:
    return LocalFolder(Path(place)) if is_folder(place) else HadoopFolder(spark, place)


def _is_absent(error: Py4JJavaError) -> bool:
    return bool(error.java_exception.getClass().getName() == "java.io.FileNotFoundException")


def _words(error: Py4JError) -> str:
    if isinstance(error, Py4JJavaError):
        return (str(error.java_exception).splitlines() or [""])[0]
    return (str(error).splitlines() or [type(error).__name__])[0]


def _lacking(place: str, error: Py4JJavaError) -> str:
    scheme = urlsplit(place).scheme
    jar = f"add {_JARS[scheme]} of the version of its Hadoop to its jars" if scheme in _JARS else "add its jars"
    return (
        f"this Spark cannot open the checkpoint {place} ({_words(error)}): {jar}, or keep the checkpoint in a folder. "
        "With the tables in a store it may be lost: delivery goes on from them"
    )
