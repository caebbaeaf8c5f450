"""A place is a folder or a URI, and no secret and no unsafe setting gets beside it."""

from pathlib import Path

import pytest

from tidings.delivery.process import ProcessOptions, parse
from tidings.delivery.storage import checked_place, checked_storage, for_spark, for_table, is_folder
from tidings.errors import UsageError

SECRET = "not-to-be-printed"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("/shared/lake/", "/shared/lake"),
        ("file:///shared/a%20lake", "/shared/a lake"),
        ("s3://team/lake/", "s3://team/lake"),
        ("s3a://team", "s3a://team"),
        ("abfss://box@team.dfs.core.windows.net/lake", "abfss://box@team.dfs.core.windows.net/lake"),
        ("hdfs://names:8020/lake", "hdfs://names:8020/lake"),
    ],
)
def test_a_place_is_a_path_or_the_uri_as_it_was_given(given: str, place: str) -> None:
    assert checked_place("--lake", given) == place
    assert is_folder(place) == place.startswith("/")


def test_a_relative_folder_is_that_of_whoever_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert checked_place("--lake", "lake") == str(tmp_path / "lake")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ftp://team/lake", "--lake begins with ftp://: a folder, or a URI that begins with file://, s3://"),
        ("file://other/lake", "a path that begins with /"),
        ("s3:///lake", "comes a bucket"),
        (f"s3://key:{SECRET}@team/lake", "holds more than a place"),
        (f"abfss://box@team.dfs.core.windows.net/lake?sig={SECRET}", "holds more than a place"),
    ],
)
def test_what_is_no_place_is_refused_in_a_sentence(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        checked_place("--lake", given)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        *("AWS_SECRET_ACCESS_KEY", "aws_session_token", "azure_storage_account_key", "AZURE_STORAGE_SAS_TOKEN"),
        *("access_key", "client_secret", "google_service_account_key", "password"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UsageError, match=f"Set {key.upper()} in the environment") as caught:
        checked_storage([f"{key}={SECRET}"])
    assert SECRET not in str(caught.value)


def test_what_is_no_secret_is_taken() -> None:
    given = ["AWS_REGION=eu-central-1", "AWS_ACCESS_KEY_ID=AKIA", "aws_web_identity_token_file=/run/token", "empty="]
    assert list(checked_storage(given)) == ["AWS_REGION", "AWS_ACCESS_KEY_ID", "aws_web_identity_token_file", "empty"]
    with pytest.raises(UsageError, match="KEY=VALUE"):
        checked_storage(["AWS_REGION"])


def test_what_would_let_two_drivers_both_win_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for unsafe in ("AWS_S3_ALLOW_UNSAFE_RENAME=true", "aws_conditional_put=disabled"):
        with pytest.raises(UsageError, match="both win"):
            checked_storage([unsafe])
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with pytest.raises(UsageError, match="the environment has AWS_S3_ALLOW_UNSAFE_RENAME"):
        checked_storage([])


def test_a_table_in_s3_is_opened_with_conditional_writes_and_a_patience_that_can_be_changed() -> None:
    options = for_table("s3a://team/lake", {"Timeout": "60s"})
    assert options["aws_conditional_put"] == "etag"
    assert (options["Timeout"], "timeout" in options) == ("60s", False)
    assert for_table("/shared/lake", {}) == {}


def test_spark_calls_s3_s3a() -> None:
    assert for_spark("s3://team/cp") == for_spark("s3a://team/cp") == "s3a://team/cp"
    assert for_spark("hdfs://names/cp") == "hdfs://names/cp"


def test_the_process_takes_places_and_shows_no_option_of_the_store() -> None:
    _, options = parse(["--home", "h", "--space", "s", "--lake", "s3://team/lake", "--storage", f"endpoint={SECRET}"])
    assert isinstance(options, ProcessOptions)
    assert (options.lake, options.checkpoint, options.storage) == ("s3://team/lake", None, {"endpoint": SECRET})
    assert SECRET not in repr(options)
