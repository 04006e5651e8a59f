"""TLS between a real Envoy and Picker: self-signed, files that rotate under streams, and client certificates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from envoy_data_plane.envoy.config.core.v3 import DataSource, TransportSocket
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    TlsCertificate,
    UpstreamTlsContext,
)
from envoy_data_plane.google.protobuf import Any as PackedMessage

from picker.app import App
from picker.extproc.tls import KeyPair
from picker.settings import Settings
from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from tests.extproc.test_tls import Authority
from tests.faults.client import CheckingClient, End
from tests.faults.cluster import write_pool
from tests.faults.engine import CheckedEngine


@dataclass(slots=True)
class Secured:
    app: App
    client: CheckingClient
    envoy: EnvoyProcess


@asynccontextmanager
async def secured(
    directory: Path,
    tls: dict[str, Any],
    socket: TransportSocket | None = None,
    observation: ResponseObservation = ResponseObservation.ACCESS_LOG,
) -> AsyncIterator[Secured]:
    """`socket`: how Envoy speaks TLS to Picker; by default without checking anything."""
    async with AsyncExitStack() as exits:
        engine = CheckedEngine()
        await engine.start()
        exits.push_async_callback(engine.die)
        write_pool(directory / "pool.json", [engine])
        app = App(
            Settings.model_validate(
                {
                    "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0, "tls": tls},
                    "admin": {"port": 0, "grpc_port": 0},
                    "pool": {"file": directory / "pool.json"},
                }
            )
        )
        addresses = await app.start()
        exits.push_async_callback(app.stop)
        options = EnvoyOptions(
            picker=("127.0.0.1", addresses.extproc), picker_tls=True, observation=observation
        )
        config = bootstrap(options)
        if socket is not None:
            config.static_resources.clusters[1].transport_socket = socket
        envoy = await exits.enter_async_context(EnvoyProcess(config.to_json(), directory=directory))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        async with asyncio.timeout(60):
            while not app.health.ready:
                await asyncio.sleep(0.01)
        yield Secured(app, CheckingClient(f"http://127.0.0.1:{envoy.port}", session), envoy)


def verifying(authority: Authority, client: KeyPair | None = None) -> TransportSocket:
    """Envoy checks that Picker is `picker` by that authority, and shows a certificate if it has one."""
    own = [
        TlsCertificate(
            certificate_chain=DataSource(inline_bytes=client.certificate),
            private_key=DataSource(inline_bytes=client.key),
        )
        for client in [client]
        if client is not None
    ]
    trusted = CertificateValidationContext(trusted_ca=DataSource(inline_bytes=authority.pem))
    common = CommonTlsContext(alpn_protocols=["h2"], tls_certificates=own, validation_context=trusted)
    context = UpstreamTlsContext(common_tls_context=common, sni="picker")
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=PackedMessage.pack(context))


def files(directory: Path, pair: KeyPair, **more: Any) -> dict[str, Any]:
    (directory / "tls.key").write_bytes(pair.key)
    (directory / "tls.crt").write_bytes(pair.certificate)
    return {
        "mode": "files",
        "cert_file": directory / "tls.crt",
        "key_file": directory / "tls.key",
        **more,
    }


async def test_self_signed(tmp_path: Path) -> None:
    async with secured(tmp_path, {"mode": "self-signed"}) as stack:
        assert (await stack.client.send()).end is End.WHOLE


async def test_a_self_signed_certificate_does_not_pass_where_it_is_checked(tmp_path: Path) -> None:
    async with secured(tmp_path, {"mode": "self-signed"}, verifying(Authority())) as stack:
        assert (await stack.client.send()).end is End.GATEWAY_ERROR
        assert stack.app.faces.extproc.stats.streams == 0


@pytest.mark.parametrize("observation", list(ResponseObservation))
async def test_files_rotate_under_running_streams(tmp_path: Path, observation: ResponseObservation) -> None:
    """The old authority's certificate serves the streams that began with it; new connections get the new one."""
    first, second = Authority(), Authority()
    tls = files(tmp_path, first.issue("picker"))
    async with secured(tmp_path, tls, verifying(first), observation) as stack:
        running = [asyncio.create_task(stack.client.send(events=60, pause=0.05)) for _ in range(10)]
        async with asyncio.timeout(60):
            while stack.app.faces.extproc.stats.routed < 10:
                await asyncio.sleep(0.01)
        files(tmp_path, second.issue("picker"))
        # On the connections that are open.
        assert {(await stack.client.send()).end for _ in range(5)} == {End.WHOLE}
        options = EnvoyOptions(picker=("127.0.0.1", stack_port(stack)), picker_tls=True)
        config = bootstrap(options)
        config.static_resources.clusters[1].transport_socket = verifying(second)
        (tmp_path / "second").mkdir()
        async with EnvoyProcess(config.to_json(), directory=tmp_path / "second") as newcomer:
            client = CheckingClient(f"http://127.0.0.1:{newcomer.port}", stack.client.session)
            assert (await client.send()).end is End.WHOLE
        assert {answer.end for answer in await asyncio.gather(*running)} == {End.WHOLE}


@pytest.mark.parametrize(
    ("name", "passes"), [("gateway.example", True), ("other.example", False), (None, False)]
)
async def test_only_a_gateway_with_an_allowed_name_is_served(
    tmp_path: Path, name: str | None, passes: bool
) -> None:
    authority = Authority()
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    more = {"client_ca_file": tmp_path / "ca.crt", "client_names": ["gateway.example"]}
    tls = files(tmp_path, authority.issue("picker"), **more)
    client = None if name is None else authority.issue(name)
    async with secured(tmp_path, tls, verifying(authority, client)) as stack:
        answer = await stack.client.send()
        assert answer.end is (End.WHOLE if passes else End.GATEWAY_ERROR)
        assert stack.app.faces.extproc.stats.routed == int(passes)
        if passes:
            async with asyncio.timeout(60):
                while not stack.app.exchanges.stats.ended_by_access_log:
                    await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(0.2)
            assert stack.app.faces.access_log.stats.entries == 0, "who may not ask may not tell either"


def stack_port(stack: Secured) -> int:
    """Picker's gateway port, as the Envoy of the stack was told it."""
    config = json.loads((stack.envoy.directory / "envoy.json").read_text())
    picker = config["staticResources"]["clusters"][1]["loadAssignment"]["endpoints"][0]["lbEndpoints"][0]
    return int(picker["endpoint"]["address"]["socketAddress"]["portValue"])
