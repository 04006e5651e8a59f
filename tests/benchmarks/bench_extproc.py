"""Cost of the ext_proc path: Picker's server against a bare echo server, one core each for server and client.

    python -m tests.benchmarks.bench_extproc                        # Picker's server with a decision that costs nothing
    python -m tests.benchmarks.bench_extproc --target HOST:PORT     # any ext_proc server, for instance a whole Picker

Each case is one stream a request, as Envoy opens it: headers and a body in two messages, the answer with the
destination, the body back; with `chunks`, also that many response chunks that must come back. The echo server does
the least that the protocol allows, in the same gRPC library. Servers take turns, so that a noisy machine is noisy
for both; the ratio is what counts. CPU time is the server process's own, over all of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.extproc.conversation import BodyMode
from picker.extproc.handler import Arrival, Headers, Routed
from picker.extproc.server import SERVICE_NAME, ExtProcServer
from picker.rpc import RpcServer
from tests.support import messages

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs
METHOD = f"/{SERVICE_NAME}/Process"
SERVER_CORE, CLIENT_CORE = 0, 1
CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request. `chunks` None: the gateway does not send responses."""

    name: str
    body_bytes: int
    requests: int
    chunks: int | None = None

    def messages(self) -> tuple[list[bytes], list[bytes]]:
        """The serialized messages of the request, and those of the response."""
        response_mode = BodyMode.NONE if self.chunks is None else BodyMode.FULL_DUPLEX_STREAMED
        headers = [
            ("content-type", "application/json"),
            ("user-agent", "OpenAI/Python 2.0.0"),
            ("accept", "application/json"),
            ("authorization", "Bearer sk-0123456789abcdef"),
            ("content-length", str(self.body_bytes)),
            ("x-forwarded-proto", "http"),
            ("x-request-id", "0e6b45a3-24d2-4a0b-9c4b-0a4f0c3b9d0e"),
        ]
        request = [
            messages.request_headers(headers=headers, modes=(BodyMode.FULL_DUPLEX_STREAMED, response_mode)),
            messages.request_body(b"x" * self.body_bytes),
            messages.request_body(b"", end=True),
        ]
        response = []
        if self.chunks is not None:
            event = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
            response = [
                messages.response_headers(headers=[("content-type", "text/event-stream")]),
                *(messages.response_body(event) for _ in range(self.chunks)),
                messages.response_body(b"", end=True),
            ]
        return [m.SerializeToString() for m in request], [m.SerializeToString() for m in response]


CASES = [
    Case("300 B", 300, requests=1500),
    Case("16 KB", 16_384, requests=1500),
    Case("300 B + 100 chunks", 300, requests=150, chunks=100),
]


# The servers


class NoExchange:
    wants_response_body = False

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None: ...

    def response_chunk(self, data: bytes) -> None: ...

    def finished(self, delivered: bool) -> None: ...


class FixedDestination:
    """A decision without any cost."""

    async def route(self, arrival: Arrival) -> Routed:
        return Routed("10.0.0.7:8000", NoExchange())


HEADERS_ANSWER = ProcessingResponse(request_headers={}).SerializeToString()
RESPONSE_HEADERS_ANSWER = ProcessingResponse(response_headers={}).SerializeToString()


async def echo(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """The least that a server can do: parse each message and send it back as it came."""
    while (data := await context.read()) is not EOF:
        message = ProcessingRequest.FromString(data)
        reply = ProcessingResponse()
        match message.WhichOneof("request"):
            case "request_headers":
                await context.write(HEADERS_ANSWER)
                continue
            case "response_headers":
                await context.write(RESPONSE_HEADERS_ANSWER)
                continue
            case "request_body":
                body, streamed = (
                    message.request_body,
                    reply.request_body.response.body_mutation.streamed_response,
                )
            case _:
                body, streamed = (
                    message.response_body,
                    reply.response_body.response.body_mutation.streamed_response,
                )
        streamed.body = body.body
        streamed.end_of_stream = body.end_of_stream
        await context.write(reply.SerializeToString())


async def serve(kind: str) -> None:
    picker = ExtProcServer(FixedDestination())
    if kind == "picker":
        served = RpcServer(max_message_bytes=picker.max_message_bytes, budget=picker.budget)
        picker.add_to(served)
        print(await served.listen("127.0.0.1", 0), flush=True)
        await asyncio.Event().wait()
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(echo)
    service = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": method})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@dataclass(slots=True)
class Server:
    """A server under measurement; `pid` None: one that somebody else runs."""

    name: str
    target: str
    pid: int | None = None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        if self.pid is None:
            return 0.0
        with open(f"/proc/{self.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(kind: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_extproc", "--serve", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(kind, f"127.0.0.1:{int(process.stdout.readline())}", process.pid)
    finally:
        process.terminate()
        process.wait()


# The load


async def measure(server: Server, case: Case, requests: int) -> None:
    async with grpc.aio.insecure_channel(server.target) as channel:
        method = channel.stream_stream(METHOD)
        await load(method, case, CONCURRENCY)
        cpu, start = server.cpu_seconds(), time.perf_counter()
        await load(method, case, requests)
        server.seconds.append((time.perf_counter() - start) / requests)
        server.cpu.append((server.cpu_seconds() - cpu) / requests)


async def load(method: grpc.aio.StreamStreamMultiCallable, case: Case, requests: int) -> None:
    request, response = case.messages()
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await one_stream(method, case, request, response)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))


async def one_stream(
    method: grpc.aio.StreamStreamMultiCallable, case: Case, request: list[bytes], response: list[bytes]
) -> None:
    call = method()
    for message in request:
        await call.write(message)
    await read_to_end(call, "request_body", case.body_bytes)
    if response:
        writing = asyncio.ensure_future(write_all(call, response))
        await read_to_end(call, "response_body", None)
        await writing
    await call.done_writing()
    while await call.read() is not EOF:
        pass


async def write_all(call: grpc.aio.StreamStreamCall, serialized: list[bytes]) -> None:
    for message in serialized:
        await call.write(message)


async def read_to_end(call: grpc.aio.StreamStreamCall, which: str, size: int | None) -> None:
    """Read up to the end of a body, and check that it is the whole of it."""
    got = 0
    async for streamed in pieces(call, which):
        got += len(streamed.body)
        if streamed.end_of_stream:
            break
    assert size is None or got == size


async def pieces(call: grpc.aio.StreamStreamCall, which: str) -> AsyncIterator[Any]:
    while (data := await call.read()) is not EOF:
        reply = ProcessingResponse.FromString(data)
        if reply.WhichOneof("response") == which:
            yield getattr(reply, which).response.body_mutation.streamed_response
    raise AssertionError("the stream ended before the body")


# The report


def report(case: Case, servers: list[Server]) -> None:
    base = servers[-1]
    for server in servers:
        per_second = 1 / statistics.median(server.seconds)
        cpu = statistics.median(server.cpu) * 1e6
        line = f"{case.name:20} {server.name:8} {per_second:8.0f} streams/s"
        if server.pid is not None:
            line += f" {cpu:8.0f} us CPU/request"
        if server is not base:
            line += f"   {statistics.median(server.seconds) / statistics.median(base.seconds):5.2f} x time"
            if server.pid is not None:
                line += f"   {cpu / (statistics.median(base.cpu) * 1e6):5.2f} x CPU"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="measure the server at HOST:PORT in place of one started here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of requests")
    parser.add_argument("--serve", choices=["picker", "echo"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        os.sched_setaffinity(0, {SERVER_CORE})
        asyncio.run(serve(options.serve))
        return
    os.sched_setaffinity(0, {CLIENT_CORE})
    for case in CASES:
        requests = max(1, int(case.requests * options.scale))
        with measured(options.target) as first, started("echo") as base:
            for _ in range(options.rounds):
                for server in (first, base):
                    asyncio.run(measure(server, case, requests))
            report(case, [first, base])


def measured(target: str | None) -> contextlib.AbstractContextManager[Server]:
    return started("picker") if target is None else contextlib.nullcontext(Server(target, target))


if __name__ == "__main__":
    main()
