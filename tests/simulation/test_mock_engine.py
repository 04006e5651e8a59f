"""The mock engine over real HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.simulation.mock_engine import MockEngine, MockEngineSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32" / "recording.jsonl"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine() -> AsyncIterator[MockEngine]:
    settings = MockEngineSettings(
        block_size=32,
        num_blocks=80,
        max_num_seqs=8,
        max_model_len=2048,
        prefill_rate=1e7,
        iteration_time=1e-4,
    )
    async with MockEngine(settings) as engine:
        yield engine


async def post(
    client: aiohttp.ClientSession, engine: MockEngine, path: str, body: object, **headers: str
) -> tuple[int, dict[str, Any]]:
    async with client.post(engine.addresses.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def complete(client: aiohttp.ClientSession, engine: MockEngine, **body: object) -> dict[str, Any]:
    status, answer = await post(client, engine, "/v1/completions", {"model": "tiny", **body})
    assert status == 200, answer
    return answer


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_recorded_requests_get_the_ids_and_cached_tokens_of_a_real_server(
    client: aiohttp.ClientSession, engine: MockEngine
) -> None:
    for line in GOLDEN.read_text().splitlines():
        record = json.loads(line)
        if record.get("id") == "continue-generated":
            break
        if record["kind"] != "request":
            continue
        status, answer = await post(client, engine, record["endpoint"], record["body"])
        assert status == 200
        assert answer["choices"][0]["prompt_token_ids"] == record["prompt_token_ids"], record["id"]
        assert len(answer["choices"][0]["token_ids"]) == len(record["output_token_ids"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == record["cached_tokens"], record["id"]
        assert answer["choices"][0]["finish_reason"] == record["finish_reason"]
        assert set(answer["usage"]) <= set(record["usage"])


async def test_a_streamed_answer_has_the_same_tokens_and_ends_with_done(
    client: aiohttp.ClientSession, engine: MockEngine
) -> None:
    body = {"model": "tiny", "prompt": "A walk", "max_tokens": 7, "return_token_ids": True}
    whole = await complete(client, engine, **body)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.post(engine.addresses.url + "/v1/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 7
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_chat_streams_deltas(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    async with client.post(engine.addresses.url + "/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.content if line.strip()]
    deltas = [json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert all("content" in delta for delta in deltas)


async def test_batches_are_one_engine_request_each(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    answer = await complete(client, engine, prompt=["one", "two", "three"], max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    answer = await complete(client, engine, prompt=[[5, 6], [7]], max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == 3
    body = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 2, "stream": True}
    async with client.post(engine.addresses.url + "/v1/completions", json=body) as response:
        text = await response.text()
    assert text.count("data: ") == 5


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "does not exist"),
        ("/v1/completions", {"model": "tiny"}, 400, "prompt must be"),
        ("/v1/completions", {"model": "tiny", "prompt": [5, 99999]}, 400, "out of vocabulary"),
        ("/v1/completions", {"model": "tiny", "prompt": [], "max_tokens": 1}, 400, "prompt must be"),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * 3000}, 400, "maximum context length"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 0}, 400, "positive integer"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "at least one message"),
        ("/v1/chat/completions", {"model": "tiny", "messages": ["hi"]}, 400, "object with a role"),
        ("/v1/completions", [1], 400, "JSON object"),
    ],
)
async def test_bad_requests_get_an_error_in_vllms_shape(
    client: aiohttp.ClientSession,
    engine: MockEngine,
    path: str,
    body: object,
    status: int,
    message: str,
) -> None:
    got, answer = await post(client, engine, path, body)
    assert got == status
    assert message in answer["error"]["message"]
    assert answer["error"]["code"] == status


async def test_what_was_served_is_remembered(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    body = b'{"model": "tiny",  "prompt": "x", "max_tokens": 1}'
    url = engine.addresses.url
    async with client.post(url + "/v1/completions", data=body, headers={"X-Request-Id": "abc"}) as response:
        assert response.headers["X-Request-Id"] == "abc"
        assert (await response.json())["id"] == "cmpl-abc"
    async with client.get(url + "/nowhere") as response:
        assert response.status == 404
    first, second = engine.served
    assert first.request_id == "abc"
    assert first.body_sha256 == hashlib.sha256(body).hexdigest()
    assert (first.arrival, first.completion, first.status) == (0, 0, 200)
    assert (second.method, second.path, second.status) == ("GET", "/nowhere", 404)


async def test_the_number_at_once_is_bounded_and_a_leaving_client_frees_its_slot(
    client: aiohttp.ClientSession,
) -> None:
    settings = MockEngineSettings(max_num_seqs=1, prefill_rate=1e7, iteration_time=0.001)
    async with MockEngine(settings) as engine:
        holder = asyncio.create_task(complete(client, engine, prompt="hold", max_tokens=20_000))
        await until(lambda: len(engine.model.running) == 1)
        waiter = asyncio.create_task(complete(client, engine, prompt="wait", max_tokens=1))
        leaver = asyncio.create_task(complete(client, engine, prompt="leave", max_tokens=1))
        await until(lambda: len(engine.model.waiting) == 2)
        leaver.cancel()
        await until(lambda: len(engine.model.waiting) == 1)
        holder.cancel()
        await waiter
        assert engine.model.cache.usage == 0.0
        assert sorted(served.status or 0 for served in engine.served) == [200, 499, 499]


async def test_kv_events_replay_and_reset(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    ids = list(range(100, 170))
    await complete(client, engine, prompt=ids, max_tokens=1)
    status, answer = await post(client, engine, "/reset_prefix_cache", {})
    assert (status, answer) == (200, {"success": True})
    await complete(client, engine, prompt=ids, max_tokens=1)
    async with client.get(engine.addresses.url + "/kv_event_sources") as response:
        source = (await response.json())["0"]
    assert source["topic"] == f"kv@{engine.addresses.http}@tiny"
    assert source["endpoint"].startswith("tcp://*:")
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(source["replay_endpoint"].replace("*", "127.0.0.1"))
        await socket.send_multipart([b"", bytes(8)])
        batches = [msgspec.msgpack.decode((await socket.recv_multipart())[3]) for _ in range(2)]
    finally:
        context.destroy(linger=0)
    assert [[event["type"] for event in batch[1]] for batch in batches] == [
        ["BlockStored"],
        ["AllBlocksCleared", "BlockStored"],
    ]
    assert batches[0][1][0]["token_ids"] == ids[:64]


async def test_metrics_have_vllms_names_and_labels(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    for _ in range(2):
        await complete(client, engine, prompt=[9] * 70, max_tokens=3)
    async with client.get(engine.addresses.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    labels = '{engine="0",model_name="tiny"}'
    assert f"vllm:prefix_cache_queries_total{labels} 140.0" in lines
    assert f"vllm:prefix_cache_hits_total{labels} 64.0" in lines
    assert f"vllm:num_requests_running{labels} 0.0" in lines
    assert f"vllm:num_requests_waiting{labels} 0.0" in lines
    assert f"vllm:kv_cache_usage_perc{labels} 0.0" in lines
    assert f"vllm:generation_tokens_total{labels} 6.0" in lines
    assert f"vllm:time_to_first_token_seconds_count{labels} 2.0" in lines
    assert f"vllm:inter_token_latency_seconds_count{labels} 4.0" in lines
    config = next(line for line in lines if line.startswith("vllm:cache_config_info"))
    assert 'block_size="32"' in config
    assert 'num_gpu_blocks="80"' in config
    real = (GOLDEN.parent / "metrics.txt").read_text()
    ours = {line.split("{")[0] for line in lines if line.startswith("vllm:")}
    assert all(f"\n{name}{{" in real for name in ours if not name.endswith("_created"))


async def test_the_small_routes(client: aiohttp.ClientSession, engine: MockEngine) -> None:
    url = engine.addresses.url
    async with client.get(url + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with client.get(url + "/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "tiny"
    async with client.get(url + "/version") as response:
        assert (await response.json())["version"] == "0.32.0"
    _, answer = await post(client, engine, "/tokenize", {"prompt": "You are"})
    assert answer["tokens"][0] == 0
    assert answer["count"] == len(answer["tokens"])
    _, chat = await post(client, engine, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert chat["tokens"].count(0) == 1


async def test_prefill_time_follows_the_uncached_tokens(client: aiohttp.ClientSession) -> None:
    """In model time, so that a busy machine cannot fail it."""
    settings = MockEngineSettings(prefill_rate=1e5, iteration_time=1e-4, max_num_batched_tokens=8192)
    async with MockEngine(settings) as engine:
        spent = []
        for _ in range(2):
            before = engine.model.stats.busy_seconds
            await complete(client, engine, prompt=[7] * 1600, max_tokens=1)
            spent.append(engine.model.stats.busy_seconds - before)
    assert spent == [pytest.approx(0.0161), pytest.approx(0.00026)]


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_no_error(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    settings = MockEngineSettings(prefill_rate=1e7, iteration_time=0.001)
    body = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 20_000, "stream": True}
    async with MockEngine(settings) as engine:
        async with client.post(engine.addresses.url + "/v1/completions", json=body) as response:
            await response.content.readline()
        await until(lambda: not engine.model.running)
        await until(lambda: engine.served[0].completion is not None)
        assert engine.served[0].status == 499
        assert engine.model.stats.aborted == 2
    assert not caplog.records
