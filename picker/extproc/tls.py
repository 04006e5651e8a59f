"""TLS for the gRPC ports: none, a certificate made at start, or files that may be replaced while serving."""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

log = logging.getLogger(__name__)

_CERTIFICATE_DAYS = 365


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and its certificate chain, both PEM."""

    key: bytes
    certificate: bytes


def self_signed(name: str = "picker") -> KeyPair:
    """A fresh P-256 key and a certificate for `name`, good for a year.

    For gateways that encrypt without verifying, as endpoint pickers are commonly reached.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName("localhost")]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )


def fixed_context(pair: KeyPair) -> ssl.SSLContext:
    """A server's context with this pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    # OpenSSL reads them from files only.
    with TemporaryDirectory() as directory:
        key, certificate = Path(directory, "key"), Path(directory, "certificate")
        key.write_bytes(pair.key)
        certificate.write_bytes(pair.certificate)
        context.load_cert_chain(certificate, key)
    return context


def file_context(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """A context from PEM files, read again at a handshake after they changed; running connections go on.

    With `client_ca`, clients must show a certificate that it signed. Raises OSError or ValueError when the files
    cannot be read or do not fit together at the start; later such faults are logged and the last good pair kept.
    """
    files = _WatchedFiles(certificate, key, client_ca)
    first = files.context

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = files.current()

    # Called at each handshake, whether the client names a server or not.
    first.sni_callback = choose
    return first


class _WatchedFiles:
    """Reads key, certificate and client CA, and reads them anew when any of them changed on disk."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._seen = self._fingerprint()
        self.context = self._read()

    def current(self) -> ssl.SSLContext:
        """The context by the files as they are now, or the last good one when they are of no use yet."""
        try:
            fingerprint = self._fingerprint()
            if fingerprint != self._seen:
                self.context = self._read()
                self._seen = fingerprint
                log.info("TLS certificate reloaded from %s", self._certificate)
        except (OSError, ValueError) as error:
            log.warning("keeping the TLS certificate in use: %s", error)
        return self.context

    def _fingerprint(self) -> tuple[object, ...]:
        # Kubernetes replaces a mounted secret by moving a symbolic link: inode and time change with it.
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        states = [os.stat(path) for path in paths]
        return tuple((state.st_ino, state.st_mtime_ns, state.st_size) for state in states)

    def _read(self) -> ssl.SSLContext:
        pair = KeyPair(self._key.read_bytes(), self._certificate.read_bytes())
        _check(pair)
        context = fixed_context(pair)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=self._client_ca.read_text())
        return context


def _check(pair: KeyPair) -> None:
    """Raises ValueError when key and certificate do not belong together, as half-way through a rotation."""
    try:
        key = serialization.load_pem_private_key(pair.key, password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the TLS key cannot be used: {error}") from error
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    if key.public_key() != certificate.public_key():
        raise ValueError("the TLS key does not belong to the certificate")
