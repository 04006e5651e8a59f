"""Engines that can fail, Picker as a process, a real Envoy, and a client that checks every byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from picker.simulation.prompts import DEFAULT_TOKENIZER
from tests.faults.client import CheckingClient
from tests.faults.engine import CheckedEngine
from tests.faults.process import PickerChild

MODES = tuple(ResponseObservation)


@dataclass(slots=True)
class FaultCluster:
    engines: list[CheckedEngine]
    picker: PickerChild
    envoy: EnvoyProcess
    client: CheckingClient
    pool: Path

    def write_pool(self, engines: Sequence[CheckedEngine], **extras: Any) -> None:
        write_pool(self.pool, engines, **extras)

    async def held(self, count: int) -> None:
        """Wait until so many requests wait in Picker."""
        await self.picker.until("picker_queue_requests", count)


@asynccontextmanager
async def cluster(
    directory: Path,
    *,
    engines: int = 2,
    policy: str | None = None,
    settings: dict[str, dict[str, Any]] | None = None,
    log: Path | None = None,
    preamble: str = "",
    pool_extras: dict[str, Any] | None = None,
    **envoy_options: Any,
) -> AsyncIterator[FaultCluster]:
    """`envoy_options` are those of `EnvoyOptions`."""
    async with AsyncExitStack() as exits:
        running = [CheckedEngine() for _ in range(engines)]
        for engine in running:
            await engine.start()
            exits.push_async_callback(engine.die)
        pool = directory / "pool.json"
        write_pool(pool, running, **(pool_extras or {}))
        sections: dict[str, dict[str, Any]] = {
            "pool": {"file": str(pool), "scrape_interval": 0.1, "scrape_timeout": 0.5, "stale_after": 1.0},
            "tokens": {"models": {"*": str(DEFAULT_TOKENIZER)}},
            "policy": {"reload_interval": 0.2},
            "queue": {"drain_notice": 0.0},
        }
        if policy is not None:
            (directory / "policy.yaml").write_text(policy)
            sections["policy"] |= {
                "file": str(directory / "policy.yaml"),
                "hints": {"policy_class": "accept"},
            }
        for name, values in (settings or {}).items():
            sections.setdefault(name, {}).update(values)
        picker = PickerChild(sections, directory, log or directory / "picker.log", preamble)
        exits.push_async_callback(picker.close)
        await picker.start()
        options = EnvoyOptions(picker=("127.0.0.1", picker.extproc_port), **envoy_options)
        envoy = EnvoyProcess(bootstrap(options).to_json(), directory=directory)
        await exits.enter_async_context(envoy)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = CheckingClient(f"http://127.0.0.1:{envoy.port}", session)
        yield FaultCluster(running, picker, envoy, client, pool)


def write_pool(
    path: Path, engines: Sequence[CheckedEngine], *, each: Sequence[dict[str, Any]] = (), **extras: Any
) -> None:
    """Put a new pool file in place in one step. `extras` go to every entry, `each` has one for each."""
    own = each or [{} for _ in engines]
    entries = [
        {"name": f"pod-{engine.address}", "address": engine.address, **extras, **more}
        for engine, more in zip(engines, own, strict=True)
    ]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"endpoints": entries}))
    new.replace(path)
