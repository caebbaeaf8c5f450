"""The authority of a space: made once, its broker's certificate again before its end, and neither open to others."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from tidings.errors import ConfigError
from tidings.server.certificate_files import CertificateFiles, server_name
from tidings.server.certificates import AUTHORITY_FOR, RENEWED_BEFORE, SERVER_FOR, ensure_certificates, name_of

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path / "tls")


def served(files: CertificateFiles) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(files.server.read_bytes())


def test_it_is_made_once_and_nobody_else_can_read_it(files: CertificateFiles) -> None:
    authority = ensure_certificates(files, "main", NOW)
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    assert ensure_certificates(files, "main", NOW + timedelta(days=200)) == authority
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.folder.iterdir())
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700


def test_the_brokers_is_made_again_well_before_its_end_by_the_same_authority(files: CertificateFiles) -> None:
    authority = ensure_certificates(files, "main", NOW)
    (first, _), late = served(files), NOW + SERVER_FOR - RENEWED_BEFORE + timedelta(hours=1)
    assert ensure_certificates(files, "main", late) == authority
    second, behind = served(files)
    assert second.serial_number != first.serial_number
    assert second.not_valid_after_utc == late + SERVER_FOR
    second.verify_directly_issued_by(behind)


def test_it_holds_from_yesterday_on_for_clocks_that_are_behind(files: CertificateFiles) -> None:
    ensure_certificates(files, "main", NOW)
    server, authority = served(files)
    assert server.not_valid_before_utc == authority.not_valid_before_utc == NOW - timedelta(days=1)
    assert authority.not_valid_after_utc == NOW + AUTHORITY_FOR


def test_it_signs_for_its_space_and_for_nothing_else(files: CertificateFiles) -> None:
    ensure_certificates(files, "main", NOW)
    server, authority = served(files)
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["main.tidings.internal"]
    allowed = authority.extensions.get_extension_for_class(x509.NameConstraints)
    assert allowed.critical
    assert allowed.value.permitted_subtrees == [x509.DNSName("main.tidings.internal")]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


@pytest.mark.parametrize("lost", ["server", "server_key", "half of it"])
def test_what_is_lost_of_the_brokers_is_made_again(files: CertificateFiles, lost: str) -> None:
    authority = ensure_certificates(files, "main", NOW)
    if lost == "half of it":
        files.server.write_bytes(files.server.read_bytes()[:300])
    else:
        getattr(files, lost).unlink()
    assert ensure_certificates(files, "main", NOW) == authority
    assert len(served(files)) == 2


def test_a_key_that_is_not_the_authoritys_and_a_damaged_certificate_are_said(files: CertificateFiles) -> None:
    known = ensure_certificates(files, "main", NOW)
    files.authority_key.write_bytes(files.server_key.read_bytes())
    files.server.unlink()
    with pytest.raises(ConfigError, match="one backup"):
        ensure_certificates(files, "main", NOW, known)
    files.authority.write_text("half")
    with pytest.raises(ConfigError, match="not a certificate"):
        ensure_certificates(files, "main", NOW, known)


def test_somebody_elses_certificate_is_taken_with_the_name_it_is_for(files: CertificateFiles) -> None:
    ensure_certificates(files, "main", NOW)
    assert name_of(files.server, files.server_key, NOW) == "main.tidings.internal"


def test_one_that_could_not_serve_is_refused_in_a_sentence(files: CertificateFiles) -> None:
    ensure_certificates(files, "main", NOW)
    pair = files.server, files.server_key
    for certificate, key, now, said in (
        (*pair, NOW + SERVER_FOR, "holds from 2026-11-16 to"),
        (files.server, files.authority_key, NOW, "is not the key of"),
        (files.authority, files.authority_key, NOW, "is for no name"),
        (files.server, files.server, NOW, "no certificate and its key"),
        (files.folder / "none.pem", files.server_key, NOW, "none.pem cannot be read: No such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            name_of(certificate, key, now)


@pytest.mark.parametrize("space", ["x" * 64, "Main_Space", "-", "a" * 48])
def test_whatever_a_space_is_called_its_certificate_is_made_and_verifies(files: CertificateFiles, space: str) -> None:
    ensure_certificates(files, space)
    assert name_of(files.server, files.server_key) == server_name(space)
    assert max(map(len, server_name(space).split("."))) <= 63


def test_the_authority_that_bundles_trust_is_never_replaced_by_another(files: CertificateFiles) -> None:
    known = ensure_certificates(files, "main", NOW)
    key = files.authority_key.read_bytes()
    files.authority.unlink()
    assert ensure_certificates(files, "main", NOW, known) == known, "it is in space.toml too"
    assert files.authority_key.read_bytes() == key
    for path in files.folder.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="a new authority, and every bundle"):
        ensure_certificates(files, "main", NOW, known)


@pytest.mark.parametrize("missing", ["authority", "authority_key"])
def test_one_that_was_never_trusted_is_made_anew_whatever_is_left_of_it(files: CertificateFiles, missing: str) -> None:
    """Killed while it was made, or `--listen off` after its key was lost."""
    before = ensure_certificates(files, "main", NOW)
    getattr(files, missing).unlink()
    made = ensure_certificates(files, "main", NOW)
    assert made != before
    assert ensure_certificates(files, "main", NOW) == made, "once"
    assert name_of(files.server, files.server_key, NOW) == server_name("main")


def test_a_key_of_the_authority_that_others_can_read_is_refused(files: CertificateFiles) -> None:
    ensure_certificates(files, "main", NOW)
    files.authority_key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        ensure_certificates(files, "main", NOW)
