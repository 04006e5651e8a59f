"""TLS for the gRPC ports: none, a certificate made at start, or files that may be replaced while serving."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
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


def fixed_credentials(pair: KeyPair) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(pair.key, pair.certificate)])


def file_credentials(certificate: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Credentials from PEM files, read again at a handshake after they changed; running streams go on.

    With `client_ca`, clients must show a certificate that it signed. Raises OSError or ValueError when the files
    cannot be read or do not fit together at the start; later such faults are logged and the last good pair kept.
    """
    files = _WatchedFiles(certificate, key, client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.load(),
        files.reloaded,  # type: ignore[arg-type]  # the stub leaves out that None means no change
        require_client_authentication=client_ca is not None,
    )


class _WatchedFiles:
    """Reads key, certificate and client CA, and reads them anew when any of them changed on disk.

    gRPC asks from its own threads, hence the lock.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()

    def load(self) -> grpc.ServerCertificateConfiguration:
        with self._lock:
            self._seen = self._fingerprint()
            return self._read()

    def reloaded(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None when nothing changed (or what is there cannot be used yet)."""
        with self._lock:
            try:
                fingerprint = self._fingerprint()
                if fingerprint == self._seen:
                    return None
                configuration = self._read()
            except (OSError, ValueError) as error:
                log.warning("keeping the TLS certificate in use: %s", error)
                return None
            self._seen = fingerprint
            log.info("TLS certificate reloaded from %s", self._certificate)
            return configuration

    def _fingerprint(self) -> tuple[object, ...]:
        # Kubernetes replaces a mounted secret by moving a symbolic link: inode and time change with it.
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        states = [os.stat(path) for path in paths]
        return tuple((state.st_ino, state.st_mtime_ns, state.st_size) for state in states)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        pair = KeyPair(self._key.read_bytes(), self._certificate.read_bytes())
        _check(pair)
        client_ca = None if self._client_ca is None else self._client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], client_ca)


def _check(pair: KeyPair) -> None:
    """Raises ValueError when key and certificate do not belong together, as half-way through a rotation."""
    key = serialization.load_pem_private_key(pair.key, password=None)
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    if key.public_key() != certificate.public_key():
        raise ValueError("the TLS key does not belong to the certificate")


async def refuse_strangers(names: frozenset[str], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """End the call unless its client's certificate carries one of the names; without names, anybody may call."""
    if names and not names & names_of_peer(context.auth_context()):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the client certificate has no allowed name")


def names_of_peer(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """The names in the client's verified certificate: its subject alternative names, or its common name."""
    names = auth_context.get("x509_subject_alternative_name") or auth_context.get("x509_common_name") or ()
    return frozenset(name.decode("utf-8", "replace") for name in names)
