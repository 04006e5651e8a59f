"""The whole of it on real parts: mock engines, Picker, and a real Envoy between them and the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from picker.app import Addresses, App
from picker.settings import Settings
from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from picker.simulation.mock_engine import MockEngine, MockEngineSettings
from picker.simulation.prompts import DEFAULT_TOKENIZER

MODEL = "tiny"


@dataclass(slots=True)
class Stack:
    """What a test needs of a running stack. `url` is Envoy's; `session` is an HTTP client with no limits."""

    app: App
    addresses: Addresses
    engines: list[MockEngine]
    envoy: EnvoyProcess
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.envoy.port}"

    async def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """Post a completion; the answer's JSON with `status` and `headers` beside it."""
        headers = options.pop("headers", {})
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **options}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            answer: dict[str, Any] = json.loads(await response.read() or b"{}")
            return answer | {"status": response.status, "headers": response.headers}

    async def settled(self) -> None:
        """Wait until nothing is booked and nothing waits: every end has been heard of."""
        async with asyncio.timeout(60):
            while len(self.app.exchanges) or len(self.app.queue) or self.app.faces.open_streams:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_stack(
    directory: Path,
    engines: Sequence[MockEngineSettings],
    *,
    endpoint_extras: Sequence[dict[str, Any]] = (),
    **options: Any,
) -> AsyncIterator[Stack]:
    """Start engines, and Picker and Envoy before them; stop all of it afterwards. For the options, see `gateway`."""
    async with AsyncExitStack() as exits:
        running = [await exits.enter_async_context(MockEngine(each)) for each in engines]
        extras = [*endpoint_extras, *({} for _ in running[len(endpoint_extras) :])]
        entries = [
            _entry(number, engine, extra)
            for number, (engine, extra) in enumerate(zip(running, extras, strict=True))
        ]
        stack = await exits.enter_async_context(gateway(directory, entries, **options))
        stack.engines = running
        yield stack


@asynccontextmanager
async def gateway(
    directory: Path,
    entries: Sequence[dict[str, Any]],
    *,
    policy: str | None = None,
    settings: dict[str, Any] | None = None,
    observation: ResponseObservation = ResponseObservation.ACCESS_LOG,
    **envoy_options: Any,
) -> AsyncIterator[Stack]:
    """Picker on a static pool with these entries, and Envoy in front, before engines that run already."""
    async with AsyncExitStack() as exits:
        pool = directory / "pool.yaml"
        pool.write_text(json.dumps({"endpoints": entries}))
        app = App(_settings(directory, pool, policy, settings or {}))
        addresses = await app.start()
        exits.push_async_callback(app.stop)
        options = EnvoyOptions(
            picker=("127.0.0.1", addresses.extproc), observation=observation, **envoy_options
        )
        envoy = EnvoyProcess(bootstrap(options).to_json(), directory=directory)
        await exits.enter_async_context(envoy)
        connector = aiohttp.TCPConnector(limit=0)
        session = await exits.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))
        )
        async with asyncio.timeout(60):
            while not app.health.ready or not app.pool.synced:
                await asyncio.sleep(0.01)
        yield Stack(app, addresses, [], envoy, session)


def _settings(directory: Path, pool: Path, policy: str | None, changes: dict[str, Any]) -> Settings:
    sections: dict[str, dict[str, Any]] = {
        "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0},
        "admin": {"port": 0, "grpc_port": 0},
        "pool": {"file": pool, "scrape_interval": 0.2},
        "tokens": {"models": {"*": DEFAULT_TOKENIZER}},
        "policy": {"hints": {"policy_class": "accept", "pin": "accept", "allow_list": "accept"}},
    }
    if policy is not None:
        (directory / "policy.yaml").write_text(policy)
        sections["policy"]["file"] = directory / "policy.yaml"
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    return Settings.model_validate(sections)


def _entry(number: int, engine: MockEngine, extra: dict[str, Any]) -> dict[str, Any]:
    addresses = engine.addresses
    return {
        "name": f"pod-{number}",
        "address": addresses.http,
        "kv_events": addresses.kv_events,
        "kv_replay": addresses.kv_replay,
        **extra,
    }
