"""Behind a real Envoy, with an open-loop client: what Picker adds, beside a bare echo ext_proc server and no server.

    python -m tests.benchmarks.bench_gateway                        # all of it, about ten minutes
    python -m tests.benchmarks.bench_gateway --only 300B            # one kind of request
    python -m tests.benchmarks.bench_gateway --target HOST:PORT     # another endpoint picker in Picker's place

Picker runs with everything on: tokens, three classes, 64 endpoints that are scraped each second and whose KV events
flow, its metrics, and Envoy's configuration as we ship it. It has a core for itself; Envoy, the engines and the client
share the other. Saturation is measured with 64 clients that ask again at once; the latencies with requests at random
instants, at half and at four fifths of what Picker can do, and the echo server's at the same rates. "Added" is a
quantile less the same quantile without any ext_proc server, at the same rate in the same run. How much the echo adds is
what asking any server costs here: Envoy, the network, and how long this machine lets a process wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from picker.simulation.envoy_config import ResponseObservation
from tests.benchmarks.gateway import servers
from tests.benchmarks.gateway.client import Load, closed_loop, open_loop
from tests.benchmarks.gateway.servers import Running

PODS = 64
EVENT_MESSAGES_A_SECOND = 320.0
CLIENTS = 64
SHARES_OF_SATURATION = (0.5, 0.8)
SENTENCE = "a plain sentence of the kind that people write. "


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request. `shared`: the part of its prompt that all of them have, 0..1."""

    name: str
    size: int
    shared: float = 0.0
    chunks: int = 0

    def requests(self, headers: Sequence[tuple[str, str]]) -> Callable[[], bytes]:
        """Makes the bytes of one request after the other; the prompts differ from the end of the shared part on."""
        head = (SENTENCE * (int(self.size * self.shared) // len(SENTENCE) + 1))[
            : int(self.size * self.shared)
        ]
        extra = [*headers, ("x-chunks", str(self.chunks))] if self.chunks else headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in extra)
        serials = count()

        def make() -> bytes:
            serial = next(serials)
            tail = f"{serial:08d} " + f"{serial:08d} {SENTENCE}" * ((self.size - len(head)) // 57 + 1)
            prompt = (head + tail)[: max(self.size - 60, 1)]
            body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
            return (
                f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{lines}"
                f"content-length: {len(body)}\r\n\r\n"
            ).encode() + body

        return make


CASES = [
    Case("300B", 300),
    Case("16KB", 16_000),
    Case("220KB", 220_000),
    Case("220KB, 90 % shared", 220_000, shared=0.9),
]
STREAMS = Case("300B, 1,000 events in the answer", 300, chunks=1000)


@dataclass(slots=True)
class Measured:
    """A server under one kind of request. Seconds a request at saturation: `cpu` of the processor, `tokenizing` in the
    stage of that name. `added_p99`: seconds, by requests a second.
    """

    per_second: float
    cpu: float
    tokenizing: float
    added_p99: dict[float, float] = field(default_factory=dict)

    @property
    def rates(self) -> list[float]:
        return [self.per_second * share for share in SHARES_OF_SATURATION]


@dataclass(slots=True)
class Bench:
    directory: Path
    ports: dict[str, Any]
    target: str | None
    seconds: float

    async def case(self, case: Case) -> None:
        access_log = ResponseObservation.ACCESS_LOG
        async with AsyncExitStack() as exits:
            bare = await exits.enter_async_context(servers.alone(self._room("alone")))
            async with self._measured(access_log) as server:
                measured = await self._compare(case, bare, server)
            async with self._echo(access_log) as server:
                echo = await self._compare(case, bare, server, measured.rates)
            # Longer prompts are tokenized in threads, and wait for one: their stage is not the processor's time.
            if measured.tokenizing and case.size < 1000:
                more = measured.cpu - echo.cpu
                print(
                    f"{case.name:19} {'picker':10} at saturation {more * 1e6:.0f} us CPU/request above the echo, "
                    f"{(more - measured.tokenizing) * 1e6:.0f} without tokenizing   target 250",
                    flush=True,
                )
                half = measured.rates[0]
                late = measured.added_p99[half]
                print(
                    f"{case.name:19} {'picker':10} at 50% p99 {late * 1e3:.1f} ms   target 5; "
                    f"{(late - echo.added_p99[half]) * 1e3:.1f} more than the echo",
                    flush=True,
                )

    async def streams(self) -> None:
        """Processor time of answers in 1,000 pieces, as we ship it and where the gateway sends every piece through."""
        requests = STREAMS.requests(servers.destination(self.ports))
        for observation in ResponseObservation:
            for open_server in (self._echo, self._measured):
                async with open_server(observation) as server:
                    before = server.cpu_seconds()
                    load = await closed_loop(server.port, requests, 8, self.seconds)
                    each = (server.cpu_seconds() - before) / max(1, len(load.latencies))
                    print(
                        f"{observation:11} {server.name:10} {load.per_second:7.1f} answers/s {each * 1e6:9.0f} us CPU"
                        f"/answer {each * 1e6 / STREAMS.chunks:7.2f} us/piece",
                        flush=True,
                    )

    async def _compare(
        self, case: Case, bare: Running, server: Running, rates: Sequence[float] = ()
    ) -> Measured:
        """At saturation, and at `rates` requests a second; by default at the shares of its own saturation."""
        requests = case.requests(servers.destination(self.ports))
        await closed_loop(server.port, requests, CLIENTS, min(2.0, self.seconds))
        before, stages = server.cpu_seconds(), await server.stage_seconds()
        full = await closed_loop(server.port, requests, CLIENTS, self.seconds)
        cpu = (server.cpu_seconds() - before) / max(1, len(full.latencies))
        tokenizing = _means(stages, await server.stage_seconds()).get("tokenize", 0.0)
        print(
            f"{case.name:19} {server.name:10} saturation {full.per_second:7.1f}/s"
            + (f" {cpu * 1e6:8.0f} us CPU/request" if server.pid else "")
            + (f"  {full.refused} refused" if full.refused else ""),
            flush=True,
        )
        if not full.latencies:
            raise RuntimeError(
                f"{server.name} answered nothing with 200; {full.refused} requests got something else"
            )
        measured = Measured(full.per_second, cpu, tokenizing)
        for rate in rates or measured.rates:
            without = await open_loop(bare.port, requests, rate, self.seconds)
            load = await open_loop(server.port, requests, rate, self.seconds)
            measured.added_p99[rate] = load.quantile(0.99) - without.quantile(0.99)
            print(f"{case.name:19} {server.name:10} {_added(rate, load, without)}", flush=True)
        if stages:
            means = _means(stages, await server.stage_seconds())
            parts = ", ".join(f"{stage} {mean * 1e6:.0f}" for stage, mean in means.items())
            print(f"{case.name:19} {server.name:10} mean us of each stage: {parts}", flush=True)
        return measured

    def _echo(self, observation: ResponseObservation) -> Any:
        return servers.echo(self._room("echo"), observation)

    def _measured(self, observation: ResponseObservation) -> Any:
        if self.target is not None:
            return servers.other(self._room("other"), self.target, observation)
        return servers.picker(self._room("picker"), self.ports, observation)

    def _room(self, name: str) -> Path:
        room = self.directory / name
        room.mkdir(exist_ok=True)
        return room


def _added(rate: float, load: Load, without: Load) -> str:
    figures = "  ".join(
        f"p{name} {max(0.0, load.quantile(q) - without.quantile(q)) * 1e3:6.1f}"
        for name, q in (("50", 0.5), ("99", 0.99), ("99.9", 0.999))
    )
    trouble = (
        f"  {load.refused} refused, {load.unanswered} unanswered" if load.refused or load.unanswered else ""
    )
    return f"at {rate:6.1f}/s  ms added: {figures}{trouble}"


def _means(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Seconds that a request spent in each stage."""
    means = {}
    for stage, (seconds, requests) in after.items():
        earlier = before.get(stage, (0.0, 0.0))
        if requests > earlier[1]:
            means[stage] = (seconds - earlier[0]) / (requests - earlier[1])
    return means


async def idle(directory: Path, pods: int, seconds: float) -> None:
    """What a Picker costs that nobody asks anything of: its pods are scraped each second and publish nothing."""
    async with servers.engines(pods, 0.0) as ports:
        (directory / "idle").mkdir()
        async with servers.picker(directory / "idle", ports, ResponseObservation.ACCESS_LOG) as server:
            await asyncio.sleep(5.0)
            before = server.cpu_seconds()
            await asyncio.sleep(seconds)
            used = (server.cpu_seconds() - before) / seconds
            print(f"idle, {pods} pods: {used:.1%} of one core   target 10%", flush=True)


async def run(only: Sequence[str], target: str | None, seconds: float) -> None:
    os.sched_setaffinity(0, {servers.OTHER_CORE})
    wanted = [case for case in CASES if not only or case.name in only]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with servers.engines(PODS, EVENT_MESSAGES_A_SECOND) as ports:
            bench = Bench(directory, ports, target, seconds)
            for case in wanted:
                await bench.case(case)
            if not only or "streams" in only:
                await bench.streams()
        if target is None and (not only or "idle" in only):
            await idle(directory, 100, max(seconds, 20.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(case.name for case in CASES), "streams", "idle"]
    parser.add_argument(
        "--only", action="append", choices=names, default=[], help="may be given several times"
    )
    parser.add_argument(
        "--target", metavar="HOST:PORT", help="another ext_proc endpoint picker, for the same pool"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each measurement takes")
    options = parser.parse_args()
    asyncio.run(run(options.only, options.target, options.seconds))


if __name__ == "__main__":
    main()
