"""All of Picker behind its gRPC port, against streams that do as they like: nothing raises past its boundary, hangs or
leaks, whatever is sent, in whatever order, on however many streams, while pool and policy change."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from picker.app import App
from picker.extproc.conversation import BodyMode
from picker.policy import load_policy
from picker.pool.endpoint import EndpointSpec
from picker.settings import Settings
from tests.support import messages

T = TypeVar("T")

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
POLICY = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: all, policy_family: all, cache_bucket: any, quantum: 512, %s}
"""
LIMITS = (
    "max_running_per_worker: 2",
    "max_running_per_worker: 1, max_queue_wait: 0.05",
    "prefill_busy_threshold: 20",
)

any_mode = st.sampled_from(list(BodyMode))
header_pairs = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "content-length",
                "content-encoding",
                "x-picker-endpoint",
                "x-picker-ttl-ms",
                "x-picker-tenant",
                "x",
            ]
        ),
        st.sampled_from(["", "0", "5", "99999999999", "gzip", "nowhere", "10.0.0.1:80", "\xff"]),
    ),
    max_size=3,
)
metadata = st.dictionaries(
    st.sampled_from(["envoy.lb.subset_hint", "picker", "other"]),
    st.dictionaries(
        st.sampled_from(["x-gateway-destination-endpoint-subset", "pin", "priority", "tolerations"]),
        st.sampled_from(["", "10.0.0.1:80", ["10.0.0.2:80", "x"], 3, None, {"a": [1]}]),
        max_size=2,
    ),
    max_size=2,
)
bodies = st.one_of(
    st.sampled_from([b'{"prompt": "hello"}', b'{"prompt": [1,2,3]}', b'{"messages":[]}', b"{", b""]),
    st.binary(max_size=50),
)
any_message = st.one_of(
    st.builds(
        messages.request_headers,
        st.sampled_from(["POST", "GET", "CONNECT", ""]),
        st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/models", "", "\xff"]),
        headers=header_pairs,
        end=st.booleans(),
        modes=st.one_of(st.none(), st.just(messages.FULL_DUPLEX), st.tuples(any_mode, any_mode)),
        metadata=metadata,
    ),
    st.builds(messages.request_body, bodies, end=st.booleans()),
    st.builds(messages.request_trailers),
    st.builds(messages.response_headers, st.integers(0, 999), end=st.booleans()),
    st.builds(messages.response_body, st.binary(max_size=50), end=st.booleans()),
    st.builds(messages.response_trailers),
    st.just(ProcessingRequest()),
).map(lambda message: message.SerializeToString())


@cache
def runner() -> asyncio.Runner:
    """One event loop for all examples: gRPC ties itself to the one that it is used on first."""
    return asyncio.Runner()


class _Alarm(logging.Handler):
    """Remembers what a stranger must not be able to cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class HostileStreams(RuleBasedStateMachine):
    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.runner = runner()
        self.alarm = _Alarm()
        logging.getLogger().addHandler(self.alarm)
        self.directory = TemporaryDirectory()
        self.calls: list[Any] = []
        self.within(self.start())

    def within(self, work: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
        return self.runner.run(asyncio.wait_for(work, seconds))

    async def start(self) -> None:
        pool = Path(self.directory.name) / "pool.json"
        pool.write_text(json.dumps({"endpoints": []}))
        sections = {
            "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0, "total_body_limit": 400},
            "requests": {"max_body_bytes": 300},
            "admin": {"port": 0, "grpc_port": 0},
            "policy": {"hints": {"pin": "accept"}},
        }
        self.app = App(Settings.model_validate(sections))
        addresses = await self.app.start()
        self.app.pool.replace(endpoints(2))
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{addresses.extproc}")
        self.process = self.channel.stream_stream(METHOD)
        await self.channel.channel_ready()
        await self.ask_well()
        # Each of the server's methods has a task that waits for its next call.
        await asyncio.sleep(0.05)
        self.tasks = len(tasks())

    @rule(target=streams)
    def open(self) -> Any:
        async def call() -> Any:
            return self.process()

        self.calls.append(self.within(call()))
        return self.calls[-1]

    @rule(stream=streams, message=st.one_of(any_message, st.binary(max_size=60)))
    def send(self, stream: Any, message: bytes) -> None:
        async def write() -> None:
            # On a stream that is over, by us or by Picker.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                await stream.write(message)

        self.within(write())

    @rule(target=streams, body=bodies)
    def ask(self, body: bytes) -> Any:
        """A request as a good gateway would send it."""
        stream = self.open()
        self.send(stream, messages.request_headers().SerializeToString())
        self.send(stream, messages.request_body(body, end=True).SerializeToString())
        return stream

    @rule(stream=streams)
    def half_close(self, stream: Any) -> None:
        async def close() -> None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                await stream.done_writing()

        self.within(close())

    @rule(stream=streams)
    def reset(self, stream: Any) -> None:
        async def cancel() -> None:
            stream.cancel()

        self.within(cancel())

    @rule(number=st.integers(0, 3), ready=st.booleans())
    def change_pool(self, number: int, ready: bool) -> None:
        async def change() -> None:
            self.app.pool.replace(endpoints(number, ready=ready))

        self.within(change())

    @rule(limit=st.sampled_from(LIMITS))
    def change_policy(self, limit: str) -> None:
        async def change() -> None:
            policy = load_policy(POLICY % limit)
            self.app.dispatcher.deliver(self.app.queue.reload(policy, self.app.clock()))

        self.within(change())

    @rule()
    def let_time_pass(self) -> None:
        self.within(asyncio.sleep(0.02))

    @invariant()
    def nothing_is_negative_and_nobody_is_alarmed(self) -> None:
        for endpoint in self.app.pool:
            load = self.app.ledger.load(endpoint.slot)
            assert load.running >= 0
            assert load.prefill_tokens >= 0
        assert 0 <= self.app.faces.extproc.budget.stats.held_bytes <= 400
        assert self.app.faces.extproc.stats.internal_errors == 0
        assert self.alarm.lines == []

    def teardown(self) -> None:
        try:
            self.within(self.finish())
            assert self.alarm.lines == []
        finally:
            self.within(self.stop())
            logging.getLogger().removeHandler(self.alarm)
            self.directory.cleanup()

    async def stop(self) -> None:
        await self.channel.close()
        await self.app.stop()

    async def ask_well(self) -> None:
        """A good request is routed, and leaves nothing behind."""
        stream = self.process()
        await stream.write(messages.request_headers().SerializeToString())
        await stream.write(messages.request_body(b'{"prompt": "hello"}', end=True).SerializeToString())
        answer = ProcessingResponse.FromString(await stream.read())
        assert messages.kind(answer) == "request_headers"
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass
        await self.until_quiet()

    async def until_quiet(self) -> None:
        def left() -> tuple[int, ...]:
            return self.app.faces.open_streams, len(self.app.queue), len(self.app.exchanges)

        for _ in range(1000):
            if not any(left()):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"streams, waiting and open requests left: {left()}")

    async def finish(self) -> None:
        """After the last stream's end nothing is left; a good request is still served."""
        for stream in self.calls:
            stream.cancel()
        self.app.pool.replace(endpoints(2))
        await self.until_quiet()
        await self.ask_well()
        for endpoint in self.app.pool:
            load = self.app.ledger.load(endpoint.slot)
            assert (load.running, load.prefill_tokens, len(load.bookings)) == (0, 0, 0)
        assert self.app.faces.extproc.budget.stats.held_bytes == 0
        for _ in range(1000):
            if len(tasks()) <= self.tasks:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(f"tasks left: {tasks()}")


def tasks() -> list[asyncio.Task[Any]]:
    """All but those of the test's own client calls."""
    return [task for task in asyncio.all_tasks() if "_AioCall" not in repr(task)]


def endpoints(number: int, *, ready: bool = True) -> list[EndpointSpec]:
    return [EndpointSpec(f"u{n}", f"pod-{n}", f"10.0.0.{n + 1}", 80, ready=ready) for n in range(number)]


HostileStreams.TestCase.settings = settings(
    max_examples=int(os.environ.get("PICKER_FUZZ_EXAMPLES", "15")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHostileStreams = HostileStreams.TestCase
