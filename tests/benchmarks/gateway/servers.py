"""What stands behind Envoy in a run: nothing, the echo server, Picker, or a server that somebody else runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from picker.extproc.messages import DESTINATION_HEADER
from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from picker.simulation.prompts import DEFAULT_TOKENIZER
from tests.benchmarks.bench_whole import POLICY

SERVER_CORE, OTHER_CORE = 0, 1


@dataclass(slots=True)
class Running:
    """One server with its own Envoy. `pid` None: its processor time is not ours to read. `port` is Envoy's."""

    name: str
    port: int
    pid: int | None = None
    metrics_url: str | None = None

    def cpu_seconds(self) -> float:
        return 0.0 if self.pid is None else sum(_cpu_seconds(pid) for pid in _family(self.pid))

    async def stage_seconds(self) -> dict[str, tuple[float, float]]:
        """Each stage's (seconds, requests) since the start; empty where the server has no such metrics."""
        if self.metrics_url is None:
            return {}
        async with aiohttp.ClientSession() as session, session.get(self.metrics_url) as response:
            families = text_string_to_metric_families(await response.text())
        sums: dict[str, list[float]] = {}
        for family in families:
            if family.name == "picker_stage_seconds":
                for sample in family.samples:
                    part = (
                        ("_sum", "_count").index(sample.name[20:])
                        if sample.name[20:] in ("_sum", "_count")
                        else None
                    )
                    if part is not None:
                        sums.setdefault(sample.labels["stage"], [0.0, 0.0])[part] = sample.value
        return {stage: (seconds, requests) for stage, (seconds, requests) in sums.items()}


def _family(pid: int) -> list[int]:
    """The process and its children: Picker's faces, where it has any."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(child) for child in children)]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def engines(pods: int, events_per_second: float) -> AsyncIterator[dict[str, Any]]:
    """The engines' ports: `http`, and `kv` with one a pod."""
    command = (
        "-m",
        "tests.benchmarks.gateway.engines",
        "--pods",
        str(pods),
        "--events-per-second",
        str(events_per_second),
    )
    async with _child(*command, core=OTHER_CORE) as process:
        yield json.loads(await _line(process, r"\{.*\}"))


@asynccontextmanager
async def alone(directory: Path) -> AsyncIterator[Running]:
    """Envoy without any ext_proc server."""
    async with _envoy(directory, ("127.0.0.1", 1), ResponseObservation.STREAM, ext_proc=False) as envoy:
        yield Running("no picker", envoy.port)


@asynccontextmanager
async def echo(directory: Path, observation: ResponseObservation) -> AsyncIterator[Running]:
    command = ("-m", "tests.benchmarks.bench_extproc", "--serve", "echo")
    async with _child(*command, core=SERVER_CORE) as process:
        port = int(await _line(process, r"\d+"))
        async with _envoy(directory, ("127.0.0.1", port), observation) as envoy:
            yield Running("echo", envoy.port, process.pid)


@asynccontextmanager
async def other(directory: Path, target: str, observation: ResponseObservation) -> AsyncIterator[Running]:
    """A server that somebody else runs, at HOST:PORT."""
    host, _, port = target.rpartition(":")
    async with _envoy(directory, (host, int(port)), observation) as envoy:
        yield Running(target, envoy.port)


@asynccontextmanager
async def picker(
    directory: Path,
    ports: dict[str, Any],
    observation: ResponseObservation,
    *,
    workers: int = 1,
) -> AsyncIterator[Running]:
    """The whole of it: a pod for each of the engines' KV ports, three classes, tokens, every stage measured."""
    config = _settings(directory, ports, workers)
    async with _child("-m", "picker", "serve", "--config", str(config), core=SERVER_CORE) as process:
        addresses = await _line(process, r"serving: Addresses\(.*?\)")
        found = {name: int(port) for name, port in re.findall(r"(\w+)=(\d+)", addresses)}
        reader = asyncio.create_task(_swallow(process))
        await _until_ready(found["admin"])
        async with _envoy(directory, ("127.0.0.1", found["extproc"]), observation, shipped=True) as envoy:
            yield Running("picker", envoy.port, process.pid, f"http://127.0.0.1:{found['admin']}/metrics")
        reader.cancel()


def _settings(directory: Path, ports: dict[str, Any], workers: int) -> Path:
    entries = [
        {
            "name": f"pod-{number}",
            "address": f"127.0.{1 + number // 250}.{1 + number % 250}:{ports['http']}",
            "kv_events": f"tcp://127.0.0.1:{port}",
        }
        for number, port in enumerate(ports["kv"])
    ]
    (directory / "pool.yaml").write_text(json.dumps({"endpoints": entries}))
    (directory / "policy.yaml").write_text(POLICY)
    settings: dict[str, dict[str, Any]] = {
        "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0},
        "admin": {"port": 0, "grpc_port": 0},
        "pool": {"file": str(directory / "pool.yaml")},
        "tokens": {"models": {"*": str(DEFAULT_TOKENIZER)}},
        "policy": {"file": str(directory / "policy.yaml")},
    }
    if workers > 1:
        settings["extproc"]["workers"] = workers
    config = directory / "settings.yaml"
    config.write_text(json.dumps(settings))
    return config


@asynccontextmanager
async def _envoy(
    directory: Path,
    picker: tuple[str, int],
    observation: ResponseObservation,
    *,
    ext_proc: bool = True,
    shipped: bool = False,
) -> AsyncIterator[EnvoyProcess]:
    """`shipped`: as Picker's users run it. The others take the destination from the client, and log nothing."""
    options = EnvoyOptions(picker=picker, observation=observation, strip_client_headers=shipped)
    config = json.loads(bootstrap(options).to_json())
    if not shipped:
        [chain] = config["staticResources"]["listeners"][0]["filterChains"]
        manager = chain["filters"][0]["typedConfig"]
        manager.pop("accessLog", None)
        if not ext_proc:
            manager["httpFilters"] = [
                each for each in manager["httpFilters"] if "ext_proc" not in each["name"]
            ]
    async with EnvoyProcess(json.dumps(config), directory=directory, concurrency=1) as envoy:
        yield envoy


@asynccontextmanager
async def _child(*arguments: str, core: int) -> AsyncIterator[asyncio.subprocess.Process]:
    pin = f"import os, runpy, sys; os.sched_setaffinity(0, {{{core}}}); sys.argv = sys.argv[1:]; "
    run = "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    module, *rest = arguments[1:]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", pin + run, module, *rest),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process, pattern: str) -> str:
    """The first match in the child's output."""
    assert process.stdout is not None
    seen: list[str] = []
    async with asyncio.timeout(60):
        while line := (await process.stdout.readline()).decode():
            if found := re.search(pattern, line):
                return found[0]
            seen.append(line)
    raise RuntimeError("the server did not start:\n" + "".join(seen))


async def _swallow(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.readline():
        pass


async def _until_ready(admin_port: int) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            async with session.get(f"http://127.0.0.1:{admin_port}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


def destination(ports: dict[str, Any]) -> Sequence[tuple[str, str]]:
    """What clients send where nobody chooses for them."""
    return [(DESTINATION_HEADER, f"127.0.0.1:{ports['http']}")]
