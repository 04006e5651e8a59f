"""The graceful stop of the Envoy beside Picker, and of Picker with it, with the real Envoy and the real script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from picker.simulation.envoy import EnvoyProcess
from tests.kube.binaries import Binaries
from tests.kube.chart import Rendered, Renderer
from tests.kube.control_plane import Process
from tests.kube.live import PickerProcess, on_these_ports
from tests.support.ports import free_ports

pytestmark = [pytest.mark.kube, pytest.mark.e2e]


class SlowEngine:
    """Answers when it is told to, but for a prompt that is in a hurry."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        if b"hurry" not in await request.read():
            self.asked.set()
            await self.answer.wait()
        return web.Response(text="done")


@contextlib.asynccontextmanager
async def serving(engine: SlowEngine) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_drain_waits_for_the_last_request(binaries: Binaries, envoy: str, tmp_path: Path) -> None:
    rendered = Renderer(binaries.helm)("mode=standalone")
    port, status, admin = free_ports(3)
    engine = SlowEngine()
    async with serving(engine) as engine_port, aiohttp.ClientSession() as session:
        config = _on_these_ports(rendered.envoy, port, status, admin, engine_port)
        (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(config))
        (tmp_path / "drain.sh").write_text(rendered.one("ConfigMap", "-envoy")["data"]["drain.sh"])
        args = rendered.container("envoy")["args"]
        args[args.index("/etc/envoy/envoy.yaml")] = str(tmp_path / "envoy.yaml")
        process = Process([envoy, *args], tmp_path / "envoy.log")
        try:
            await _until_ready(session, status, process)
            request = asyncio.create_task(_get(session, port))
            await engine.asked.wait()

            drain = await asyncio.create_subprocess_exec("bash", str(tmp_path / "drain.sh"), "60", str(admin))
            await _until_ready(session, status, process, ready=False)
            with pytest.raises(TimeoutError):
                # Longer than the script's pause for the endpoints: from here on the request alone holds it.
                await asyncio.wait_for(drain.wait(), 7)
            assert process.running

            engine.answer.set()
            assert await request == "done"
            assert await asyncio.wait_for(drain.wait(), 10) == 0
        finally:
            process.stop()


async def test_picker_stays_until_its_envoy_has_gone(binaries: Binaries, envoy: str, tmp_path: Path) -> None:
    """A client that goes on using its connection while the last request runs must not find Envoy without a Picker."""
    rendered = Renderer(binaries.helm)("mode=standalone")
    engine = SlowEngine()
    (tmp_path / "drain.sh").write_text(rendered.one("ConfigMap", "-envoy")["data"]["drain.sh"])
    async with (
        serving(engine) as engine_port,
        aiohttp.ClientSession() as patient,
        aiohttp.ClientSession() as brisk,
    ):
        (tmp_path / "pool.yaml").write_text(f"endpoints: [{{name: a, address: '127.0.0.1:{engine_port}'}}]\n")
        picker = PickerProcess("picker", tmp_path, _settings(rendered, tmp_path / "pool.yaml"))
        await picker.start()
        config = on_these_ports(rendered.envoy, picker.ports["extproc"])
        admin = config["admin"]["address"]["socket_address"]["port_value"]
        try:
            async with EnvoyProcess(json.dumps(config), directory=tmp_path) as gateway:
                await until_status(brisk, gateway.port, "hurry", 200)
                slow = asyncio.create_task(_ask(patient, gateway.port, "take your time"))
                await engine.asked.wait()

                stopping = asyncio.create_task(picker.stop())
                drain = await asyncio.create_subprocess_exec(
                    "bash", str(tmp_path / "drain.sh"), "60", str(admin)
                )
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(drain.wait(), 7)
                assert await _ask(brisk, gateway.port, "hurry") == 200
                assert not stopping.done()

                engine.answer.set()
                assert await slow == 200
                assert await asyncio.wait_for(drain.wait(), 30) == 0
                assert not stopping.done(), "Envoy is still there"
            assert await asyncio.wait_for(stopping, 30) == 0
        finally:
            await picker.kill()


def _settings(rendered: Rendered, pool: Path) -> dict[str, Any]:
    """What the chart gives Picker, but for the ports and the pool."""
    settings: dict[str, Any] = yaml.safe_load(rendered.settings)
    settings["extproc"] |= {"host": "127.0.0.1", "port": 0, "health_port": 0}
    settings["admin"] |= {"host": "127.0.0.1", "port": 0, "grpc_port": 0}
    settings["pool"] = {"file": str(pool)}
    settings["queue"]["drain_notice"] = 0.5
    return settings


async def _ask(session: aiohttp.ClientSession, port: int, prompt: str) -> int:
    body = {"model": "m", "prompt": prompt}
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def until_status(session: aiohttp.ClientSession, port: int, prompt: str, status: int) -> None:
    async with asyncio.timeout(30):
        while await _ask(session, port, prompt) != status:
            await asyncio.sleep(0.05)


def _on_these_ports(config: Any, port: int, status: int, admin: int, engine: int) -> Any:
    """Without ext_proc, to one engine: what is tried here is the stop, not the choice."""
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    resources = config["static_resources"]
    clusters = {entry["name"]: entry for entry in resources["clusters"]}
    for listener, number in zip(resources["listeners"], (port, status), strict=True):
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": number}
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    del manager["access_log"]
    _address(clusters["admin"])["port_value"] = admin
    engines = clusters["admin"] | {"name": "engines"}
    engines["load_assignment"] = yaml.safe_load(yaml.safe_dump(engines["load_assignment"]))
    _address(engines)["port_value"] = engine
    resources["clusters"] = [engines, clusters["admin"]]
    return config


def _address(cluster: Any) -> Any:
    [locality] = cluster["load_assignment"]["endpoints"]
    [endpoint] = locality["lb_endpoints"]
    return endpoint["endpoint"]["address"]["socket_address"]


async def _get(session: aiohttp.ClientSession, port: int) -> str:
    async with session.get(f"http://127.0.0.1:{port}/v1/models") as response:
        return await response.text()


async def _ready(session: aiohttp.ClientSession, status: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"http://127.0.0.1:{status}/ready") as response:
            return response.status == 200
    return False


async def _until_ready(
    session: aiohttp.ClientSession, status: int, process: Process, ready: bool = True
) -> None:
    while await _ready(session, status) is not ready:
        assert process.running, process.tail()
        await asyncio.sleep(0.05)
