"""Cases of tests/CASES.md on the whole stack: a real Envoy, Picker with everything on, mock engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata.v3 import (
    Config,
    ConfigKeyValuePair,
    ConfigRule,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any as PackedMessage

from picker.extproc.handler import Arrival, Routed
from picker.requests import InferenceRequest
from picker.simulation.mock_engine import MockEngineSettings
from picker.telemetry.logs import FIELDS
from picker.tokens import TokenCount, Tokenizers
from picker.tokens.model import ModelTokenizer
from picker.tokens.sandbox import TemplateFailed
from tests.e2e.stack import MODEL, Stack, running_stack

pytestmark = pytest.mark.e2e

FAST = MockEngineSettings(prefill_rate=1e6, num_blocks=40_000)
ONE_AT_A_TIME = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: all, policy_family: all, cache_bucket: any, quantum: 512, max_running_per_worker: 1}
  - {name: short, quantum: 512, max_running_per_worker: 1, max_queue_wait: 0.3}
  - {name: never, quantum: 512, max_running_per_worker: 1, request_queue_limit_per_worker: 0}
"""
CLASS = "x-picker-policy-class"
SUBSET = "x-test-subset"


def subset_from_header() -> HttpFilter:
    """What a gateway would do: put the allow-list into metadata, here from a header of the test."""
    pair = ConfigKeyValuePair(
        metadata_namespace="envoy.lb.subset_hint", key="x-gateway-destination-endpoint-subset"
    )
    rule = ConfigRule(header=SUBSET, on_header_present=pair, remove=True)
    config = PackedMessage.pack(Config(request_rules=[rule]))
    return HttpFilter(name="envoy.filters.http.header_to_metadata", typed_config=config)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    engines = [FAST, FAST, FAST]
    async with running_stack(tmp_path, engines, filters_before=[subset_from_header()]) as running:
        yield running


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Stack]:
    """One engine that takes one request at a time, slowly: everybody else waits in Picker."""
    slow = MockEngineSettings(prefill_rate=1e6, iteration_time=0.05, num_blocks=40_000)
    async with running_stack(tmp_path, [slow], policy=ONE_AT_A_TIME) as running:
        yield running


def authority(stack: Stack, number: int) -> str:
    return stack.engines[number].addresses.http


def served(stack: Stack) -> list[int]:
    """How many inference requests each engine has seen."""
    return [len(engine.served) for engine in stack.engines]


async def occupy(stack: Stack, tokens: int = 40) -> asyncio.Task[dict[str, Any]]:
    """Take the narrow stack's only place for `tokens` times 50 ms."""
    task = asyncio.create_task(stack.complete([9] * 20, max_tokens=tokens))
    async with asyncio.timeout(60):
        while not served(stack)[0]:
            await asyncio.sleep(0.005)
    return task


async def waiting(stack: Stack, count: int) -> None:
    async with asyncio.timeout(60):
        while len(stack.app.queue) != count:
            await asyncio.sleep(0.005)


def load(stack: Stack) -> list[tuple[int, int]]:
    loads = [stack.app.ledger.load(endpoint.slot) for endpoint in stack.app.pool]
    return [(each.running, each.prefill_tokens) for each in loads]


class TestBodies:
    @pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
    @pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
    async def test_c09_bytes_pass_as_they_are(self, stack: Stack, http2: bool, chunked: bool) -> None:
        body = (
            '{ "user":"a","user":"b", "seed":12345678901234567890, "n":1, "temperature":1.0,'
            '"prompt":"\\u00e9 é \\ud83d a<b&c 0.30000000000000004",\n\n"model":"tiny","max_tokens":1}\n'
        ).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(http1=not http2, http2=http2, trust_env=False, limits=limits) as client:
            content = pieces() if chunked else body
            await client.post(f"{stack.url}/v1/completions", content=content)
        arrived = [each for engine in stack.engines for each in engine.served]
        assert [each.body_sha256 for each in arrived] == [hashlib.sha256(body).hexdigest()]

    async def test_c04_no_body_and_an_empty_body_differ(self, stack: Stack) -> None:
        async with stack.session.get(f"{stack.url}/v1/models") as response:
            assert response.status == 200
        for data in (b"", None):
            async with stack.session.post(f"{stack.url}/v1/completions", data=data) as response:
                assert response.status == 400
                assert json.loads(await response.read())["error"]["type"] == "invalid_request_error"
        assert served(stack).count(0) >= 2


class TestTokensThatCannotBeHad:
    @pytest.mark.parametrize("reason", ["multimodal", "no_tokenizer", "template_error", "tokenizer_error"])
    async def test_c18_the_request_is_routed_by_its_size(
        self, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A picture; no files for the model; a template that raises; and (C12 a) a tokenizer that does."""
        content: Any = "what is this? " * 20
        settings: dict[str, Any] = {}
        match reason:
            case "multimodal":
                picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
                content = [{"type": "text", "text": content}, picture]
            case "no_tokenizer":
                settings = {"tokens": {"models": {MODEL: tmp_path / "missing"}}}
            case "template_error":
                monkeypatch.setattr(
                    ModelTokenizer, "encode_prompt", raising(TemplateFailed("no such filter"))
                )
            case "tokenizer_error":
                monkeypatch.setattr(ModelTokenizer, "encode_prompt", raising(ValueError("poisoned")))
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        async with running_stack(tmp_path, [FAST], settings=settings) as stack:
            async with stack.session.post(f"{stack.url}/v1/chat/completions", json=body) as response:
                await response.read()
            await stack.settled()
            (arrived,) = stack.engines[0].served
            assert arrived.headers.getall("x-gateway-destination-endpoint") == [authority(stack, 0)]
            estimated = stack.app.faces.tokenizers.stats.estimated
            assert {str(name): number for name, number in estimated.items() if number} == {reason: 1}
            decision = next(iter(stack.app.telemetry.decisions))
            assert decision.estimated
            assert decision.uncached_tokens > 20


def raising(error: Exception) -> Any:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    return raise_it


class TestSpoofing:
    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_c14_no_client_names_its_own_destination(self, stack: Stack, method: str) -> None:
        async with _outsider() as (address, hits):
            for name in ("x-gateway-destination-endpoint", "X-Gateway-Destination-Endpoint"):
                headers = [
                    (name, address),
                    (name, address),
                    ("x-gateway-destination-endpoint-subset", address),
                ]
                path = "/v1/models" if method == "GET" else "/v1/completions"
                body = None if method == "GET" else {"model": MODEL, "prompt": "hi", "max_tokens": 1}
                async with stack.session.request(
                    method, stack.url + path, json=body, headers=headers
                ) as response:
                    assert response.status == 200
                async with stack.session.post(
                    f"{stack.url}/v1/completions", data=b"{", headers=headers
                ) as bad:
                    assert bad.status == 400
            assert hits == []
        for engine in stack.engines:
            for each in engine.served:
                assert each.headers.getall("x-gateway-destination-endpoint") == [engine.addresses.http]
                assert "x-gateway-destination-endpoint-subset" not in each.headers


class TestSubset:
    async def test_c15_only_what_the_hint_names(self, stack: Stack) -> None:
        second = authority(stack, 1)
        for hint in (second, f"junk, ,{second}", f"{second},10.9.9.9:1"):
            answer = await stack.complete("hello", headers={SUBSET: hint})
            assert answer["status"] == 200
        assert served(stack) == [0, 3, 0]

    @pytest.mark.parametrize("hint", [",", "10.9.9.9:1", "127.0.0.1:1"])
    async def test_c15_an_empty_or_unknown_hint_is_503_and_reaches_nobody(
        self, stack: Stack, hint: str
    ) -> None:
        answer = await stack.complete("hello", headers={SUBSET: hint})
        assert (answer["status"], answer["error"]["code"]) == (503, "no_endpoint")
        assert answer["headers"]["x-picker-dropped-reason"] == "no_endpoint"
        assert served(stack) == [0, 0, 0]

    async def test_c04_a_request_without_a_body_heeds_it_too(self, stack: Stack) -> None:
        for hint, status in ((authority(stack, 2), 200), ("10.9.9.9:1", 503)):
            async with stack.session.get(f"{stack.url}/v1/models", headers={SUBSET: hint}) as response:
                assert response.status == status
        assert stack.app.faces.extproc.stats.routed == 1

    async def test_c15_the_one_it_names_is_waited_for(self, tmp_path: Path) -> None:
        """B is full and A is idle: who may only have B goes to B, later."""
        slow = MockEngineSettings(prefill_rate=1e6, iteration_time=0.05)
        options: dict[str, Any] = {"policy": ONE_AT_A_TIME, "filters_before": [subset_from_header()]}
        async with running_stack(tmp_path, [FAST, slow], **options) as stack:
            only_b = {SUBSET: authority(stack, 1)}
            first = asyncio.create_task(stack.complete([3] * 20, max_tokens=20, headers=only_b))
            async with asyncio.timeout(60):
                while not served(stack)[1]:
                    await asyncio.sleep(0.005)
            second = asyncio.create_task(stack.complete([4] * 20, headers=only_b))
            await waiting(stack, 1)
            assert (await stack.complete([5] * 20))["status"] == 200
            assert (await first)["status"] == (await second)["status"] == 200
            assert served(stack) == [1, 2]

    async def test_c15_one_that_it_names_and_that_is_tainted_is_not_taken(self, tmp_path: Path) -> None:
        tainted = [{"taints": ["gpu=old:NoSchedule"]}]
        async with running_stack(
            tmp_path, [FAST, FAST], endpoint_extras=tainted, filters_before=[subset_from_header()]
        ) as stack:
            answer = await stack.complete("hello", headers={SUBSET: authority(stack, 0)})
            assert (answer["status"], answer["error"]["code"]) == (503, "no_endpoint")
            assert served(stack) == [0, 0]


class TestQueueOutcomes:
    async def test_c13_a_held_request_is_served_when_there_is_room(self, narrow: Stack) -> None:
        first = await occupy(narrow)
        answer = await narrow.complete("held")
        assert answer["status"] == 200
        assert (await first)["status"] == 200
        await narrow.settled()

    async def test_c09_what_was_held_is_passed_on_byte_for_byte(self, narrow: Stack) -> None:
        await occupy(narrow, 10)
        body = (
            b'{"model":"tiny", "prompt" : "\\u00e9", "n":1.0,"max_tokens":1, "user":"'
            + b"x" * 200_000
            + b'"}\n'
        )
        async with narrow.session.post(f"{narrow.url}/v1/completions", data=body) as response:
            assert response.status == 200
            await response.read()
        assert narrow.engines[0].served[1].body_sha256 == hashlib.sha256(body).hexdigest()
        assert narrow.app.queue.flows()[0].queue.stats.dispatched_requests == 2

    async def test_c22_a_wait_past_its_limit_is_429_with_retry_after(self, narrow: Stack) -> None:
        await occupy(narrow)
        answer = await narrow.complete("late", headers={CLASS: "short"})
        assert (answer["status"], answer["error"]["code"]) == (429, "deadline")
        assert float(answer["headers"]["retry-after"]) >= 1

    async def test_c22_the_same_where_the_limit_passes_before_the_queue(
        self, narrow: Stack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its tokens take longer to count than it may wait."""
        await occupy(narrow)
        tokenize = Tokenizers.tokenize

        async def slowly(tokenizers: Tokenizers, request: InferenceRequest) -> TokenCount:
            await asyncio.sleep(0.4)
            return await tokenize(tokenizers, request)

        monkeypatch.setattr(Tokenizers, "tokenize", slowly)
        answer = await narrow.complete("late", headers={CLASS: "short"})
        assert (answer["status"], answer["error"]["code"]) == (429, "deadline")

    async def test_c22_a_full_queue_is_429(self, narrow: Stack) -> None:
        await occupy(narrow)
        answer = await narrow.complete("no room", headers={CLASS: "never"})
        assert (answer["status"], answer["error"]["code"]) == (429, "queue_full_requests")

    async def test_c22_an_empty_pool_is_503_in_every_column(self, tmp_path: Path) -> None:
        async with running_stack(tmp_path, [], policy=ONE_AT_A_TIME) as stack:
            for name in ("all", "short", "never"):
                answer = await stack.complete("x", headers={CLASS: name})
                assert (answer["status"], answer["error"]["code"]) == (503, "no_endpoint")

    async def test_c22_shutting_down_is_503_for_who_waits(self, narrow: Stack) -> None:
        await occupy(narrow, 100)
        held = asyncio.create_task(narrow.complete("held"))
        await waiting(narrow, 1)
        narrow.app.dispatcher.deliver(narrow.app.queue.shut_down(narrow.app.clock()))
        answer = await held
        assert (answer["status"], answer["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in answer["headers"]

    async def test_c23_a_client_that_leaves_is_out_at_once_and_uncharged(self, narrow: Stack) -> None:
        first = await occupy(narrow)
        x = asyncio.create_task(narrow.complete([1] * 50))
        await waiting(narrow, 1)
        y = asyncio.create_task(narrow.complete([2] * 60))
        await waiting(narrow, 2)
        x.cancel()
        await waiting(narrow, 1)
        await first
        assert (await y)["status"] == 200
        await narrow.settled()
        stats = narrow.app.queue.flows()[0].queue.stats
        assert (stats.cancelled, stats.dispatched_cost) == (1, 20 + 60)
        assert load(narrow) == [(0, 0)]

    async def test_c24_a_pin_to_a_busy_engine_blocks_nobody_else(self, tmp_path: Path) -> None:
        slow = MockEngineSettings(prefill_rate=1e6, iteration_time=0.05)
        async with running_stack(tmp_path, [slow, slow], policy=ONE_AT_A_TIME) as stack:
            pin_a = {"x-picker-endpoint": "pod-0"}
            first = asyncio.create_task(stack.complete([3] * 20, max_tokens=40, headers=pin_a))
            async with asyncio.timeout(60):
                while not served(stack)[0]:
                    await asyncio.sleep(0.005)
            pinned = asyncio.create_task(stack.complete([4] * 20, headers=pin_a))
            await waiting(stack, 1)
            assert (await stack.complete([5] * 20))["status"] == 200
            assert (await stack.complete([6] * 20, headers={"x-picker-endpoint": "pod-1"}))["status"] == 200
            assert not pinned.done()
            assert served(stack) == [1, 2]
            assert (await first)["status"] == (await pinned)["status"] == 200
            assert served(stack) == [2, 2]


class TestAborts:
    async def test_c21_no_abort_leaks_a_count(self, tmp_path: Path) -> None:
        """200 requests, a fifth each: never aborted, while queued, during upload, before headers, mid-stream."""
        engines = [MockEngineSettings(prefill_rate=2e4, iteration_time=0.01, num_blocks=40_000)] * 2
        policy = ONE_AT_A_TIME.replace("max_running_per_worker: 1", "max_running_per_worker: 8")
        async with running_stack(tmp_path, engines, policy=policy) as stack:
            lowest = asyncio.create_task(_lowest_load(stack))
            dice = random.Random(11)
            kinds = ["never", "queued", "upload", "waiting", "stream"] * 40
            dice.shuffle(kinds)
            await asyncio.gather(*(_request(stack, kind, number) for number, kind in enumerate(kinds)))
            await stack.settled()
            lowest.cancel()
            assert load(stack) == [(0, 0), (0, 0)]
            assert await _result(lowest) >= 0
            before = served(stack)
            await asyncio.gather(*(stack.complete([number % 900 + 1] * 40) for number in range(100)))
            fresh = [now - then for now, then in zip(served(stack), before, strict=True)]
            assert min(fresh) >= 40, "as in a fresh process: nobody is taken for idle or for busy"

    async def test_c12_a_fault_of_ours_is_a_500_and_leaves_nothing_behind(
        self, stack: Stack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("poisoned")

        with monkeypatch.context() as patch:
            patch.setattr(type(stack.app.selector), "choose", fail)
            answer = await stack.complete("x")
            assert answer["status"] == 500
            assert "poisoned" not in json.dumps(answer["error"])
        assert (await stack.complete("x"))["status"] == 200
        await stack.settled()
        assert load(stack) == [(0, 0)] * 3


class TestHints:
    async def test_a_rank_behind_a_shared_port_is_named_to_the_engine(self, tmp_path: Path) -> None:
        hints = {"hints": {"rank": "accept"}}
        ranks = [{"ranks": 2}]
        async with running_stack(
            tmp_path, [FAST], settings={"policy": hints}, endpoint_extras=ranks
        ) as stack:
            for rank in ("1", "0"):
                answer = await stack.complete("x", headers={"x-data-parallel-rank": rank})
                assert answer["status"] == 200
            answer = await stack.complete("x", headers={"x-data-parallel-rank": "2"})
            assert (answer["status"], answer["error"]["code"]) == (503, "no_endpoint")
            seen = [each.headers.getall("x-data-parallel-rank") for each in stack.engines[0].served]
            assert seen == [["1"], ["0"]]

    async def test_an_explained_decision_is_in_the_log_with_all_its_terms(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        hints = {"hints": {"explain": "accept"}}
        async with running_stack(tmp_path, [FAST, FAST], settings={"policy": hints}) as stack:
            with caplog.at_level("INFO", logger="picker.decisions"):
                await stack.complete("hello", headers={"x-picker-explain": "1"})
        lines = [vars(each)[FIELDS] for each in caplog.records if FIELDS in vars(each)]
        explained = [each for each in lines if "candidates" in each]
        assert len(explained) == 1
        assert {each.split()[0] for each in explained[0]["candidates"]} == {"pod-0", "pod-1"}
        assert "uncached_tokens" in explained[0]["candidates"][0]

    async def test_a_fallback_list_names_the_next_best_too(self, tmp_path: Path) -> None:
        """Not sent through this Envoy, whose cluster takes one address only."""
        async with running_stack(tmp_path, [FAST, FAST], settings={"extproc": {"choices": 2}}) as stack:
            body = json.dumps({"model": MODEL, "prompt": "hello"}).encode()
            now = stack.app.clock()
            arrival = Arrival("POST", "/v1/completions", "x", [], body, True, {}, now, True)
            routed = await stack.app.faces.pipeline.route(arrival)
            assert isinstance(routed, Routed)
            best, second = routed.endpoint.split(",")
            assert {best, second} == {engine.addresses.http for engine in stack.engines}
            loads = {each.spec.authority: stack.app.ledger.load(each.slot) for each in stack.app.pool}
            assert (loads[best].running, loads[second].running) == (1, 0)
            routed.exchange.response_headers(200, [], second)
            assert (loads[best].running, loads[second].running) == (0, 1), "the booking follows who served"
            routed.exchange.finished(True)
            assert load(stack) == [(0, 0)] * 2


class TestMetricLabels:
    async def test_c30_clients_cannot_make_series(self, stack: Stack) -> None:
        stack_metrics = stack.app.telemetry.metrics

        def series() -> int:
            return sum(not line.startswith(b"#") for line in stack_metrics.expose()[0].splitlines())

        async def flood(start: int) -> int:
            for number in range(start, start + 50):
                name = f'm{number}"\\\n{"x" * 100}'
                headers = {CLASS: f"class-{number}", "x-picker-tenant": f"tenant {number}"}
                await stack.complete("x", model=name, headers=headers)
            await asyncio.sleep(1.1)  # the share gauges' next sample
            return series()

        assert await flood(0) == await flood(100)


@asynccontextmanager
async def _outsider() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server outside the pool that nobody may reach."""
    hits: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", hits


async def _lowest_load(stack: Stack) -> int:
    lowest = 0
    try:
        while True:
            lowest = min(lowest, *(value for pair in load(stack) for value in pair))
            await asyncio.sleep(0.002)
    except asyncio.CancelledError:
        return lowest


async def _result(task: asyncio.Task[int]) -> int:
    return await task


async def _request(stack: Stack, kind: str, number: int) -> None:
    """One request that is aborted, or not, at a certain moment."""
    url = f"{stack.url}/v1/completions"
    body = {"model": MODEL, "prompt": [number + 1] * 40, "max_tokens": 8, "stream": kind == "stream"}
    if kind == "upload":
        _, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        return
    timeout = {"queued": 0.01, "waiting": 0.06}.get(kind)
    try:
        async with asyncio.timeout(timeout), stack.session.post(url, json=body) as response:
            assert response.status == 200
            if kind == "stream":
                await response.content.readany()
                response.close()
                return
            await response.read()
    except (TimeoutError, aiohttp.ClientError):
        assert kind != "never"
