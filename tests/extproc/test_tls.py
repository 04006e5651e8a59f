"""TLS of the gRPC port: self-signed, from files that rotate, and with client certificates."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from picker.extproc.server import ExtProcServer
from picker.extproc.tls import KeyPair, file_context, fixed_context, self_signed
from tests.support import messages
from tests.support.handlers import StubHandler
from tests.support.messages import kind
from tests.support.servers import GatewayStream, listening


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.certificate = self._sign(self.name, self.key.public_key(), None, ca=True)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, dns_name: str) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_name)])
        certificate = self._sign(subject, key.public_key(), dns_name, ca=False)
        return KeyPair(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            certificate.public_bytes(serialization.Encoding.PEM),
        )

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, dns_name: str | None, *, ca: bool
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), True)
        )
        if dns_name is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), False)
        return builder.sign(self.key, hashes.SHA256())


@asynccontextmanager
async def channel_to(
    port: int, roots: bytes, client: KeyPair | None = None, name: str = "picker"
) -> AsyncIterator[grpc.aio.Channel]:
    credentials = grpc.ssl_channel_credentials(
        roots, client.key if client else None, client.certificate if client else None
    )
    options = [("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        yield channel


async def ask(channel: grpc.aio.Channel) -> str:
    stream = GatewayStream(_process(channel))
    await stream.send(messages.request_headers("GET", end=True))
    reply = await stream.receive()
    assert reply is not None
    await stream.finish()
    return kind(reply)


def _process(channel: grpc.aio.Channel) -> Any:
    return ExternalProcessorStub(channel).Process()


def write(directory: Path, pair: KeyPair) -> tuple[Path, Path]:
    certificate, key = directory / "tls.crt", directory / "tls.key"
    # As Kubernetes does it: new files, moved into place.
    for path, content in ((key, pair.key), (certificate, pair.certificate)):
        fresh = path.with_suffix(".new")
        fresh.write_bytes(content)
        os.replace(fresh, path)
    return certificate, key


async def test_a_certificate_made_at_start() -> None:
    pair = self_signed()
    server = ExtProcServer(StubHandler())
    async with (
        listening(server, tls=fixed_context(pair)) as port,
        channel_to(port, pair.certificate) as channel,
    ):
        assert await ask(channel) == "request_headers"


async def test_replaced_files_are_used_at_the_next_handshake(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    certificate, key = write(tmp_path, old.issue("picker"))
    server = ExtProcServer(StubHandler())
    async with (
        listening(server, tls=file_context(certificate, key)) as port,
        channel_to(port, old.pem) as before,
    ):
        running = GatewayStream(_process(before))
        await running.send(messages.request_headers())
        write(tmp_path, new.issue("picker"))
        async with channel_to(port, new.pem) as after:
            assert await ask(after) == "request_headers"
        await running.send(messages.request_body(b"{}", end=True))
        reply = await running.receive()
        assert reply is not None
        assert kind(reply) == "request_headers"


async def test_a_half_done_rotation_keeps_the_old_pair(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = write(tmp_path, authority.issue("picker"))
    server = ExtProcServer(StubHandler())
    async with listening(server, tls=file_context(certificate, key)) as port:
        key.write_bytes(authority.issue("picker").key)
        async with channel_to(port, authority.pem) as channel:
            assert await ask(channel) == "request_headers"
        key.write_bytes(locked(authority.issue("picker").key))
        async with channel_to(port, authority.pem) as channel:
            assert await ask(channel) == "request_headers"
        key.unlink()
        async with channel_to(port, authority.pem) as channel:
            assert await ask(channel) == "request_headers"


def locked(key: bytes) -> bytes:
    """The key, with a password that nobody is told."""
    return serialization.load_pem_private_key(key, password=None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


def test_files_that_do_not_fit_are_refused_at_start(tmp_path: Path) -> None:
    authority = Authority()
    certificate, key = write(tmp_path, authority.issue("picker"))
    with pytest.raises(OSError, match="nowhere"):
        file_context(tmp_path / "nowhere", key)
    key.write_bytes(authority.issue("picker").key)
    with pytest.raises(ValueError, match="does not belong"):
        file_context(certificate, key)
    key.write_bytes(locked(authority.issue("picker").key))
    with pytest.raises(ValueError, match="encrypted"):
        file_context(certificate, key)
    key.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"(?i)pem|deserialize|key"):
        file_context(certificate, key)


@asynccontextmanager
async def asking_for_names(directory: Path, authority: Authority) -> AsyncIterator[tuple[int, Path]]:
    """A server that asks its clients for a name and for this authority's word for it: its port, and the file that says
    whose word counts.
    """
    certificate, key = write(directory, authority.issue("picker"))
    ca = directory / "ca.crt"
    ca.write_bytes(authority.pem)
    server = ExtProcServer(StubHandler(), client_names=frozenset({"gateway.example"}))
    async with listening(server, tls=file_context(certificate, key, ca)) as port:
        yield port, ca


async def assert_shut_out(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(channel)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_must_show_a_known_name_where_that_is_asked(tmp_path: Path) -> None:
    authority, stranger = Authority(), Authority()
    async with asking_for_names(tmp_path, authority) as (port, _):
        async with channel_to(port, authority.pem, authority.issue("gateway.example")) as channel:
            assert await ask(channel) == "request_headers"
        async with channel_to(port, authority.pem, authority.issue("other.example")) as channel:
            assert await _process(channel).code() is grpc.StatusCode.PERMISSION_DENIED
        for client in (None, stranger.issue("gateway.example")):
            async with channel_to(port, authority.pem, client) as channel:
                await assert_shut_out(channel)


async def test_a_replaced_client_ca_is_the_one_that_counts(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    async with asking_for_names(tmp_path, old) as (port, ca):
        for known, unknown in ((old, new), (new, old)):
            ca.with_suffix(".new").write_bytes(known.pem)
            os.replace(ca.with_suffix(".new"), ca)
            async with channel_to(port, old.pem, known.issue("gateway.example")) as channel:
                assert await ask(channel) == "request_headers"
            async with channel_to(port, old.pem, unknown.issue("gateway.example")) as channel:
                await assert_shut_out(channel)


async def test_a_client_that_names_no_server_gets_the_replaced_certificate_too(tmp_path: Path) -> None:
    """Envoy names none unless it is told to."""
    old, new = self_signed(), self_signed()
    certificate, key = write(tmp_path, old)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    async with listening(ExtProcServer(StubHandler()), tls=file_context(certificate, key)) as port:
        for pair in (old, new):
            write(tmp_path, pair)
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="")
            connection = writer.get_extra_info("ssl_object")
            shown = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True))
            assert shown == x509.load_pem_x509_certificate(pair.certificate)
            assert connection.selected_alpn_protocol() == "h2"
            writer.close()
