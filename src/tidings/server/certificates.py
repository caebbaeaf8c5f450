"""The certificate authority of a space, and the certificate its broker shows to other machines.

A space is its own authority: a key that signs nothing but the certificates of its broker, which are all for one name,
`<space>.tidings.internal`. Whoever trusts the space trusts that authority and that name, so an address that changes
costs nobody anything, and no other authority in the world can stand in between. Certificates begin a day before they
are made, for clocks that are behind, and the broker's is made again well before its end.
The authority's key is opened only here, by an admin process; the broker reads its own.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tidings.errors import ConfigError
from tidings.server.certificate_files import CertificateFiles, server_name
from tidings.util.private_files import check_private, private_dir, read_private, write_private

BACKDATED = timedelta(days=1)
AUTHORITY_FOR = timedelta(days=20 * 365)
#: how long a broker's certificate holds, and how long before its end another is made
SERVER_FOR, RENEWED_BEFORE = timedelta(days=397), timedelta(days=90)


def ensure_certificates(
    files: CertificateFiles, space: str, now: datetime | None = None, known: bytes | None = None
) -> bytes:
    """Make what is missing, and the broker's certificate again if it ends soon. Answers the authority's, in DER.

    `known`: the authority that bundles trust. It is not replaced by another.
    """
    now = now or datetime.now(UTC)
    private_dir(files.folder)
    if files.authority_key.exists():
        check_private(files.authority_key)
    if known is None:
        if not is_pair(files.authority, files.authority_key):  # or its making was interrupted: nobody trusts it yet
            _make_authority(files, space, now)
    elif not files.authority_key.exists() and not (files.server.exists() and files.authority.exists()):
        raise ConfigError(
            f"{files.authority_key} is gone, the key of the authority that every bundle trusts: take {files.folder} "
            "from a backup. If there is none, `tidings up --listen off`, then `--listen` again makes a new authority, "
            "and every bundle must be exported again"
        )
    elif not files.authority.exists():
        write_private(files.authority, _pem(x509.load_der_x509_certificate(known)))
    authority = _read_certificate(files.authority)
    if known is not None and authority.public_bytes(serialization.Encoding.DER) != known:
        raise ConfigError(
            f"{files.folder} holds another authority than the one that every bundle trusts: take that folder from a "
            "newer backup, or undo what put an older one there"
        )
    if not _is_good(files, authority, space, now):
        _make_server(files, authority, space, now)
    return authority.public_bytes(serialization.Encoding.DER)


def make_following(files: CertificateFiles, space: str, now: datetime | None = None) -> bytes:
    """The authority that will take this one's place, in DER; made once."""
    following = files.following
    private_dir(following.folder)
    if not is_pair(following.authority, following.authority_key):
        _make_authority(following, space, now or datetime.now(UTC))
    return _read_certificate(following.authority).public_bytes(serialization.Encoding.DER)


def authority_in(files: CertificateFiles) -> bytes | None:
    """The certificate of the authority there, in DER; None if there is none whole."""
    if not files.authority.exists():
        return None
    return _read_certificate(files.authority).public_bytes(serialization.Encoding.DER)


def promote_following(files: CertificateFiles) -> None:
    """Have it take its place. Interrupted, the same again completes it; the broker's certificate is made afterwards."""
    for ours, theirs in (
        (files.authority_key, files.following.authority_key),
        (files.authority, files.following.authority),
    ):
        if theirs.exists():
            theirs.replace(ours)


def name_of(certificate: Path, key: Path, now: datetime | None = None) -> str:
    """The name for which somebody's own certificate is, which must hold now and belong to the key."""
    now = now or datetime.now(UTC)
    try:
        held = x509.load_pem_x509_certificate(certificate.read_bytes())
        own = serialization.load_pem_private_key(key.read_bytes(), None)
        names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{certificate} and {key} are no certificate and its key, in PEM: {error}") from error
    except x509.ExtensionNotFound as error:
        raise ConfigError(f"{certificate} is for no name: clients would not accept it") from error
    single = [name for name in names.get_values_for_type(x509.DNSName) if "*" not in name]
    if not single:
        raise ConfigError(f"{certificate} is for no single name: one that says broker.example, not *.example")
    if own.public_key() != held.public_key():
        raise ConfigError(f"{key} is not the key of {certificate}")
    if not held.not_valid_before_utc <= now < held.not_valid_after_utc:
        held_for = f"{held.not_valid_before_utc:%Y-%m-%d} to {held.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError(f"{certificate} holds from {held_for}, and it is {now:%Y-%m-%d %H:%M} UTC")
    return single[0]


def compressed_key(authority: bytes) -> bytes:
    """The public key of an authority's certificate, in 33 bytes."""
    key = x509.load_der_x509_certificate(authority).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)


def is_signed_by(certificate: bytes, key: bytes) -> bool:
    """Was a certificate (DER) signed by the key of an authority, as `compressed_key` spells it?"""
    try:
        held = x509.load_der_x509_certificate(certificate)
        signer = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key)
        signer.verify(held.signature, held.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _make_authority(files: CertificateFiles, space: str, now: datetime) -> None:
    key = _new_key(files.authority_key)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tidings authority")])
    made = (
        _builder(name, name, key.public_key(), now, AUTHORITY_FOR)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(
            x509.NameConstraints(permitted_subtrees=[x509.DNSName(server_name(space))], excluded_subtrees=None),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    write_private(files.authority, _pem(made))


def _make_server(files: CertificateFiles, authority: x509.Certificate, space: str, now: datetime) -> None:
    signer = serialization.load_pem_private_key(read_private(files.authority_key).encode(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey) or signer.public_key() != authority.public_key():
        raise ConfigError(f"{files.authority_key} is not the key of {files.authority}: take both from one backup")
    key = _new_key(files.server_key)
    name = server_name(space)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tidings broker")])
    made = (
        _builder(subject, authority.subject, key.public_key(), now, SERVER_FOR)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    write_private(files.server, _pem(made) + _pem(authority))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, holds: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + holds)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(path, key.private_bytes(*form).decode())
    return key


def _is_good(files: CertificateFiles, authority: x509.Certificate, space: str, now: datetime) -> bool:
    """Does the broker's certificate hold for long enough, for this name, by this authority, with its key beside it?"""
    if not (files.server.exists() and files.server_key.exists()):
        return False
    try:
        held = _read_certificate(files.server)
        held.verify_directly_issued_by(authority)
        named = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = serialization.load_pem_private_key(read_private(files.server_key).encode(), None)
    except (ConfigError, InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False  # of the broker's own nothing is lost: it is made again
    return (
        named.get_values_for_type(x509.DNSName) == [server_name(space)]
        and key.public_key() == held.public_key()
        and held.not_valid_before_utc <= now < held.not_valid_after_utc - RENEWED_BEFORE
    )


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate ({error}): take it from a backup") from error


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def is_pair(certificate: Path, key: Path) -> bool:
    """Is this a certificate and its key? While both are being replaced it is not."""
    try:
        held = x509.load_pem_x509_certificate(certificate.read_bytes())
        own = serialization.load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return False
    return bool(own.public_key() == held.public_key())
