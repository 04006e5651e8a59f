"""Faces and core: how many decisions a core makes, and what a request costs on either side of the socket.

The first part drives the core by its socket, without gRPC: another process sends requests that have been read, 256 at
a time, and ends each as soon as its answer has come. The second sends whole requests over gRPC to `picker serve` with
one process, two and three faces, and to the bare echo server, and reads the processor time of each process.

Decisions a second are per second of the core's processor time, and the least of several measurements, so that a busy
machine shows them too; beside them is what the same decisions cost without any message. With N faces
the throughput is the lesser of N / (face's time a request) and 1 / (core's time a request), if there are cores for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from picker.app import App
from picker.extproc import handover
from picker.extproc.handover import Placed, Prepared
from picker.faces.answering import Answering
from picker.faces.channel import Channel
from picker.faces.messages import Answer, Answered, Decide, Finished, FromCore, FromFace
from picker.faces.protocol import core_end, face_end
from picker.requests import Hints, Route
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.simulation.prompts import DEFAULT_TOKENIZER
from tests.benchmarks import bench_extproc
from tests.benchmarks.bench_whole import POLICY, new_app
from tests.support import messages

OUTSTANDING = 256
CORE, OTHER = 0, 1


# The core by its socket


class Driver:
    """A face that reads nothing: it sends the same requests again and again."""

    def __init__(self, prompts: int, tokens: int) -> None:
        self.channel: Channel[FromFace, FromCore] = Channel(face_end(), self.take, self.over)
        self.lost = asyncio.Event()
        self.serial = 0
        self.requests = [self.request(number, tokens) for number in range(prompts)]

    @staticmethod
    def request(number: int, tokens: int) -> Prepared:
        keys = PromptKeys.of_tokens([range(number * 100, number * 100 + tokens)])
        keys.blocks(16)
        hints = Hints(policy_class=("premium", "standard", "batch")[number % 3])
        stages = (("parse", 1e-4), ("tokenize", 1e-4), ("hash", 1e-4))
        demand = Demand(tokens, keys)
        return Prepared(
            Route.CHAT, hints, demand, time.monotonic(), True, model="m", max_tokens=16, stages=stages
        )

    def ask(self) -> None:
        self.serial += 1
        self.channel.send(Decide(self.serial, self.requests[self.serial % len(self.requests)]))

    def take(self, message: FromCore) -> None:
        assert isinstance(message, Answer), message
        self.channel.send(Answered(message.serial, True))
        self.channel.send(Finished(message.serial, True))
        self.ask()

    def over(self) -> None:
        self.lost.set()

    async def run(self, end: socket.socket) -> None:
        await self.channel.connect(end)
        for _ in range(OUTSTANDING):
            self.ask()
        await self.lost.wait()


async def decisions(endpoints: int, tokens: int, seconds: float) -> None:
    os.sched_setaffinity(0, {CORE})
    app = new_app(endpoints)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.benchmarks.bench_faces", "--drive", str(theirs.fileno())]
        driver = await asyncio.create_subprocess_exec(
            *command, "--tokens", str(tokens), pass_fds=[theirs.fileno()]
        )
    answering: Answering
    channel: Channel[FromCore, FromFace] = Channel(
        core_end(),
        lambda message: answering.take(message),
        lambda: None,  # type: ignore[arg-type]
    )
    answering = Answering(app.deciding, channel.send)
    await channel.connect(ours)
    stats = app.ledger.stats
    while stats.booked < 2_000:
        await asyncio.sleep(0.05)
    cost = float("inf")
    for _ in range(10):
        before, cpu = stats.booked, time.process_time()
        await asyncio.sleep(seconds / 10)
        if made := stats.booked - before:
            cost = min(cost, (time.process_time() - cpu) / made)
    channel.close()
    await driver.wait()
    answering.close()
    alone = await direct(app, tokens)
    await app.scraper.close()
    print(
        f"{endpoints:>3} endpoints, {tokens:>5} tokens  {cost * 1e6:5.0f} us of the core, {1 / cost:7,.0f} a second;"
        f"   {alone * 1e6:5.0f} us by a direct call"
    )


async def direct(app: App, tokens: int) -> float:
    """Seconds of a decision without messages, and of the end of its request."""
    best, requests = float("inf"), [Driver.request(number, tokens) for number in range(64)]

    def follow(answer: handover.Answer) -> None:
        assert isinstance(answer, Placed), answer
        assert answer.progress is not None
        placed.append(answer.progress)

    placed: list[handover.Progress] = []
    for _ in range(20):
        started = time.process_time()
        for request in requests:
            app.deciding.begin(request, follow)
        for progress in placed:
            progress.answered(True)
            progress.finished(True, None)
        placed.clear()
        await asyncio.sleep(0)
        best = min(best, (time.process_time() - started) / len(requests))
    return best


def drive(descriptor: int, tokens: int) -> None:
    os.sched_setaffinity(0, {OTHER})

    async def run() -> None:
        await Driver(64, tokens).run(socket.socket(fileno=descriptor))

    asyncio.run(run())


# Whole requests


@dataclass(slots=True)
class Serving:
    """A server under load: its gRPC address, and its processes by their part in the work."""

    name: str
    target: str
    processes: dict[int, str]

    def cpu_seconds(self) -> dict[str, float]:
        spent: dict[str, float] = {}
        for pid, part in self.processes.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            spent[part] = spent.get(part, 0.0) + seconds
        return spent


@contextmanager
def serving(workers: int) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory() as directory:
        pool, policy = Path(directory, "pool.json"), Path(directory, "policy.yaml")
        endpoints = [
            {"name": f"pod-{n}", "address": f"10.0.0.{n + 1}:8000", "metrics": False, "block_size": 16}
            for n in range(64)
        ]
        pool.write_text(json.dumps({"endpoints": endpoints}))
        policy.write_text(POLICY)
        config = Path(directory, "picker.json")
        config.write_text(
            json.dumps(
                {
                    "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0, "workers": workers},
                    "admin": {"port": 0, "grpc_port": 0},
                    "pool": {"file": str(pool)},
                    "policy": {"file": str(policy)},
                    "tokens": {"models": {"*": str(DEFAULT_TOKENIZER)}},
                    "log": {"format": "json", "decisions_per_second": 0},
                    "queue": {"drain_grace": 0},
                }
            )
        )
        command = [sys.executable, "-m", "picker", "serve", "--config", str(config)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            port = next(match[1] for line in process.stderr if (match := re.search(r"extproc=(\d+)", line)))
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            parts = {process.pid: "core" if children else "all"} | {int(pid): "faces" for pid in children}
            yield Serving(f"{workers} face{'s' * (workers > 1)}", f"127.0.0.1:{port}", parts)
        finally:
            process.terminate()
            process.wait()


class Completion(bench_extproc.Case):
    """A small request that a picker can read."""

    def messages(self) -> tuple[list[bytes], list[bytes]]:
        body = json.dumps({"model": "m", "prompt": "a plain sentence " * 16, "max_tokens": 1}).encode()
        request = [
            messages.request_headers(headers=[("content-type", "application/json")]),
            messages.request_body(body.ljust(self.body_bytes)),
            messages.request_body(b"", end=True),
        ]
        return [message.SerializeToString() for message in request], []


CASE = Completion("300 B", 320, requests=800)
CHANNELS = 16


async def load(target: str, requests: int) -> float:
    """Seconds that a request took, by many connections as a gateway's threads have them."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(target, options) for _ in range(CHANNELS)]
    started = time.perf_counter()
    left = iter(range(requests))
    request, response = CASE.messages()

    async def client(number: int) -> None:
        method = channels[number % CHANNELS].stream_stream(bench_extproc.METHOD)
        for _ in left:
            await bench_extproc.one_stream(method, CASE, request, response)

    await asyncio.gather(*(client(number) for number in range(64)))
    took = (time.perf_counter() - started) / requests
    await asyncio.gather(*(channel.close() for channel in channels))
    return took


async def whole_requests(rounds: int) -> None:
    with serving(1) as one, serving(2) as two, serving(3) as three, bench_extproc.started("echo") as bare:
        assert bare.pid is not None
        echo = Serving("echo", bare.target, {bare.pid: "all"})
        seconds: dict[str, list[float]] = {}
        spent: dict[str, dict[str, list[float]]] = {}
        for round_ in range(rounds + 1):
            for server in (one, two, three, echo):
                before = server.cpu_seconds()
                took = await load(server.target, CASE.requests)
                if round_ == 0:
                    continue  # connections, caches and the interpreter warm up
                seconds.setdefault(server.name, []).append(took)
                for part, total in server.cpu_seconds().items():
                    cost = (total - before[part]) / CASE.requests
                    spent.setdefault(server.name, {}).setdefault(part, []).append(cost)
        for name, times in seconds.items():
            costs = {part: statistics.median(each) for part, each in spent[name].items()}
            line = "   ".join(f"{part} {cost * 1e6:5.0f} us" for part, cost in costs.items())
            ratio = statistics.median(seconds["echo"]) / statistics.median(times)
            print(f"{name:8} {1 / statistics.median(times):6.0f} requests/s  {ratio:5.2f} x echo   {line}")
            if "faces" in costs:
                print(
                    f"{'':8} a core for the core and one for each face give up to"
                    f" {min(int(name[0]) / costs['faces'], 1 / costs['core']):,.0f} requests/s"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement of decisions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=["decisions", "requests"])
    options = parser.parse_args()
    if options.drive is not None:
        drive(options.drive, options.tokens)
        return
    if options.only != "requests":
        print(f"The core by its socket, {OUTSTANDING} requests at a time, 3 classes")
        for endpoints, tokens in ((8, 0), (8, 2048), (64, 0), (64, 2048)):
            asyncio.run(decisions(endpoints, tokens, options.seconds))
    if options.only != "decisions":
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        print("\nWhole requests of 300 bytes over gRPC, 64 endpoints")
        asyncio.run(whole_requests(options.rounds))


if __name__ == "__main__":
    main()
