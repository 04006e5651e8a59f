"""Clients that nobody trusts, against the whole stack: what they say of routing counts for nothing, what they send
costs them and nobody else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import zstandard

from picker.requests.hints import _CONTROL_HEADERS, _HINTS, _PASSED_ON
from tests.faults.client import End
from tests.faults.cluster import FaultCluster, cluster
from tests.faults.engine import CheckedEngine
from tests.support.clients import upload_without_end

DESTINATION = "x-gateway-destination-endpoint"
OUR_ID = "x-picker-request-id"
# Everything that steers a picker, an engine's rank or a sidecar, and what Envoy itself might read.
STEERING = sorted(
    _CONTROL_HEADERS
    | {name for names, _ in _HINTS.values() for name in names if name not in _PASSED_ON}
    | {"x-picker-anything-at-all", OUR_ID, "x-envoy-original-dst-host"}
)
VALUES = ("10.9.9.9:1", "5000")

# One stack for all: nothing that these clients do may matter to the next one.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(directory: Path) -> AsyncIterator[FaultCluster]:
    """Two engines; a class that a client must not give itself; the default trust."""
    policy = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: all, policy_family: all, cache_bucket: any, quantum: 512}
  - {name: premium, quantum: 512, strict_priority: 5}
"""
    settings = {
        "policy": {"hints": {}, "file": str(directory / "policy.yaml")},
        "log": {"level": "debug"},
        "requests": {"max_body_bytes": 4 << 20},
    }
    async with cluster(directory, policy=policy, settings=settings) as running:
        yield running


@pytest.fixture
def stack(shared: FaultCluster) -> FaultCluster:
    for engine in shared.engines:
        engine.arrivals.clear()
    return shared


def mixed_case(name: str) -> str:
    return "".join(char.upper() if at % 2 else char for at, char in enumerate(name))


async def raw(stack: FaultCluster, headers: Iterable[tuple[str, str]], body: bytes, path: str) -> int:
    """One HTTP/1.1 request, its headers as they are; the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/1.1", "host: models.example", "connection: close"]
    lines += [f"content-length: {len(body)}"] if body else []
    lines += [f"{name}: {value}" for name, value in headers]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return int(answer.split(b" ", 2)[1])


BODY = json.dumps({"model": "tiny", "prompt": [3] * 20, "events": 1}).encode()


def arrivals(engines: Iterable[CheckedEngine]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(address, headers) of every request that an engine got."""
    return [(engine.address, headers) for engine in engines for headers in engine.arrivals]


def assert_nothing_steered(stack: FaultCluster, count: int) -> None:
    """Every request came, at an engine of the pool, and with no control header but ours, once."""
    came = arrivals(stack.engines)
    assert len(came) == count
    for address, headers in came:
        assert [value for name, value in headers if name == DESTINATION] == [address]
        ids = [value for name, value in headers if name == OUR_ID]
        assert len(ids) <= 1
        assert not set(ids) & set(VALUES)
        steering = {name for name, _ in headers if name in STEERING or name.startswith("x-picker-")}
        assert steering <= {DESTINATION, OUR_ID, "x-envoy-original-dst-host"}


class TestRoutingHints:
    """Each of them, with a value that would matter, alone and doubled; and all at once."""

    @pytest.mark.parametrize(("body", "path"), [(BODY, "/v1/completions"), (b"", "/v1/models")])
    async def test_http1(self, stack: FaultCluster, body: bytes, path: str) -> None:
        sent = 0
        for name in STEERING:
            for value in VALUES:
                status = await raw(stack, [(mixed_case(name), value), (name.upper(), value)], body, path)
                assert status == 200, (name, value)
                sent += 1
        everything = [(mixed_case(name), "5000") for name in STEERING for _ in range(2)]
        assert await raw(stack, everything, body, path) == 200
        assert_nothing_steered(stack, sent + 1)
        await self.premium_never_worked(stack)

    async def test_http2(self, stack: FaultCluster) -> None:
        async with httpx.AsyncClient(http1=False, http2=True, trust_env=False) as client:
            sent = 0
            for name in STEERING:
                for value in VALUES:
                    headers = [(name, value), (name, value), ("content-type", "application/json")]
                    response = await client.post(
                        f"{stack.client.url}/v1/completions", content=BODY, headers=headers
                    )
                    assert response.status_code == 200, (name, value)
                    sent += 1
        assert_nothing_steered(stack, sent)
        await self.premium_never_worked(stack)

    async def test_a_client_cannot_have_our_header_taken_off_as_hop_by_hop(self, stack: FaultCluster) -> None:
        for named in (DESTINATION, f"close, {DESTINATION}", f"keep-alive, {OUR_ID}, {DESTINATION}"):
            status = await raw(stack, [("connection", named)], BODY, "/v1/completions")
            assert status == 200
        assert_nothing_steered(stack, 3)

    async def test_a_class_is_not_the_clients_to_choose(self, stack: FaultCluster) -> None:
        headers = {"x-picker-policy-class": "premium", "x-dynamo-meta-policy-class": "premium"}
        assert (await stack.client.send(headers=headers)).end is End.WHOLE
        await self.premium_never_worked(stack)

    @staticmethod
    async def premium_never_worked(stack: FaultCluster) -> None:
        await stack.picker.idle()
        assert not [line for line in stack.picker.log_lines() if line.get("class") == "premium"]


class TestCodings:
    """What is compressed is read, and goes on as it came."""

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "identity", "gzip, zstd"])
    async def test_the_prompt_is_counted_and_the_bytes_are_untouched(
        self, stack: FaultCluster, coding: str
    ) -> None:
        plain = json.dumps({"model": "tiny", "prompt": [5] * 333}).encode()
        packed = plain
        for part in coding.split(", "):
            packed = ENCODERS[part](packed)
        before = await stack.picker.metrics()
        response = await post(stack, packed, coding)
        assert response.status_code == 200
        assert hashlib.sha256(packed).hexdigest() in response.text
        _, headers = arrivals(stack.engines)[0]
        assert ("content-encoding", coding) in headers
        after = await stack.picker.idle()
        counted = "picker_prompt_tokens_total"
        assert after[counted] - before[counted] == 333

    @pytest.mark.parametrize("coding", ["br", "compress", "x-unknown", "gzip, gzip, gzip, gzip"])
    async def test_an_unsupported_coding_is_415(self, stack: FaultCluster, coding: str) -> None:
        response = await post(stack, BODY, coding)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_content_encoding"
        assert arrivals(stack.engines) == []

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
    async def test_damaged_data_is_400(self, stack: FaultCluster, coding: str) -> None:
        whole = ENCODERS[coding](BODY * 50)
        for damaged in (BODY, whole[: len(whole) // 2], whole[:10] + b"\xff" * 30 + whole[10:]):
            assert (await post(stack, damaged, coding)).status_code == 400
        assert arrivals(stack.engines) == []

    @pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "gzip, gzip"])
    async def test_bombs_are_413_and_take_no_memory(self, stack: FaultCluster, coding: str) -> None:
        """Four at once, again and again, each of which would be half a gigabyte."""
        bomb = await asyncio.to_thread(make_bomb, coding)
        await post(stack, BODY, "identity")
        before = stack.picker.peak_rss()
        for _ in range(4):
            for response in await asyncio.gather(*(post(stack, bomb, coding) for _ in range(4))):
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "body_too_large"
        await stack.picker.idle()
        assert stack.picker.peak_rss() - before < 50e6
        assert len(arrivals(stack.engines)) == 1


ENCODERS = {
    "identity": bytes,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


async def post(
    stack: FaultCluster, body: bytes, coding: str, path: str = "/v1/completions"
) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        headers = {"content-encoding": coding, "content-type": "application/json"}
        return await client.post(stack.client.url + path, content=body, headers=headers)


def make_bomb(coding: str) -> bytes:
    """Half a gigabyte of zeros, packed."""
    piece = bytes(1 << 20)
    if coding == "zstd":
        packer = zstandard.ZstdCompressor().compressobj()
    else:
        packer = zlib.compressobj(9, wbits=31 if coding.startswith("gzip") else 15)
    packed = b"".join(packer.compress(piece) for _ in range(512)) + packer.flush()
    return gzip.compress(packed) if coding == "gzip, gzip" else packed


class TestTemplates:
    ESCAPES = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(999999999) %}{% for j in range(999999999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ lipsum.__globals__ }}",
    )

    async def test_what_a_client_writes_is_never_a_template(
        self, stack: FaultCluster, tmp_path: Path
    ) -> None:
        """In a message, as a template of its own, as an argument of the template, as a tool's description."""
        await post(stack, BODY, "identity")
        before, escaped = stack.picker.rss(), tmp_path / "escaped"
        for escape in (*self.ESCAPES, f"{{{{ cycler.__init__.__globals__.os.system('touch {escaped}') }}}}"):
            for body in self.bodies(escape):
                response = await post(stack, json.dumps(body).encode(), "identity", "/v1/chat/completions")
                assert response.status_code == 200, response.text
        metrics = await stack.picker.idle()
        assert metrics["picker_extproc_internal_errors_total"] == 0
        assert stack.picker.rss() - before < 30e6
        assert not escaped.exists()

    @staticmethod
    def bodies(text: str) -> list[dict[str, Any]]:
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        tool = {"type": "function", "function": {"name": text[:60], "description": text, "parameters": {}}}
        return [
            chat,
            chat | {"chat_template": text},
            chat | {"chat_template_kwargs": {"x": text, "messages": text, "raise_exception": text}},
            chat | {"chat_template_kwargs": {"__class__": text, "range": text, "bos_token": text}},
            chat | {"tools": [tool]},
            {"model": "tiny", "messages": [{"role": text, "content": [{"type": "text", "text": text}]}]},
        ]


class TestLogs:
    FORGERIES = (
        'x"}\n{"level":"critical","message":"forged"}',
        "x\r\nforged",
        "x\x1b[2J\x1b[31mforged",
        "x\u2028forged\u0085forged",
        "\ud83d forged",
    )

    @pytest.mark.parametrize("form", ["json", "console"])
    async def test_no_value_of_a_client_forges_a_line(self, tmp_path: Path, form: str) -> None:
        settings = {"log": {"level": "debug", "format": form}}
        async with cluster(tmp_path, engines=1, settings=settings) as stack:
            for forgery in self.FORGERIES:
                body = json.dumps({"model": forgery, "prompt": "x", "user": forgery}).encode()
                assert (await post(stack, body, "identity")).status_code == 200
                await post(stack, json.dumps({"model": forgery, "prompt": {forgery: 1}}).encode(), "x")
            await stack.picker.idle()
            for line in stack.picker.log.read_bytes().split(b"\n"):
                text = line.decode()
                assert text.isascii() or form == "console"
                assert not text.startswith("forged")
                assert all(char.isprintable() for char in text)
                assert form == "console" or not text or json.loads(text)["message"] != "forged"


class TestFloods:
    async def test_hundreds_of_names_of_everything(self, stack: FaultCluster) -> None:
        """Models, tenants, sessions, ids and classes: what is remembered of them is bounded."""

        async def one(client: httpx.AsyncClient, number: int) -> None:
            name = f"{number}-{'n' * (number % 200)}"
            headers = {
                "x-picker-tenant": name,
                "x-session-affinity": name,
                "x-request-id": name,
                "x-picker-policy-class": name,
            }
            body = {"model": name[:200], "prompt": "hello", "cache_salt": name}
            response = await client.post(f"{stack.client.url}/v1/completions", json=body, headers=headers)
            assert response.status_code == 200

        async def flood(start: int) -> tuple[int, int]:
            async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
                for number in range(start, start + 400, 20):
                    await asyncio.gather(*(one(client, number + step) for step in range(20)))
            await stack.picker.idle()
            return await stack.picker.series(), stack.picker.rss()

        series, memory = await flood(0)
        more_series, more_memory = await flood(400)
        assert more_series <= series + 5
        assert more_memory - memory < 20e6


class TestMalformedRequests:
    """C43 on the whole stack: an answer in words for each, no 500, and nothing reaches an engine."""

    BAD = (
        b"",
        b"[]",
        b'"text"',
        b"{",
        b"{}",
        b"\xff\xfe{}",
        b'\xef\xbb\xbf{"prompt":"x"}',
        b'{"prompt": NaN}',
        b'{"prompt": []}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [-1]}',
        b'{"prompt": 5}',
        b'{"prompt": [[1],[2],"x"]}',
        b'{"prompt": [18446744073709551616]}',
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b'{"prompt": "x", "model": "' + b"m" * 5000 + b'"}',
        b'{"prompt": "x", "model": 5}',
        b'{"prompt": "x", "cache_salt": "' + b"s" * 5000 + b'"}',
    )

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions?x=1", "/v1/completions/"])
    async def test_completions(self, stack: FaultCluster, path: str) -> None:
        async with httpx.AsyncClient(trust_env=False, base_url=stack.client.url) as client:
            for body in self.BAD:
                response = await client.post(path, content=body)
                assert response.status_code == 400, (body[:60], response.text)
                assert response.json()["error"]["type"] == "invalid_request_error"
        assert arrivals(stack.engines) == []
        metrics = await stack.picker.idle()
        assert metrics["picker_extproc_internal_errors_total"] == 0

    async def test_a_body_over_the_limit_is_413(self, stack: FaultCluster) -> None:
        answer = await upload_without_end(stack.envoy.port, 5 << 20)
        assert answer.status == 413
        assert json.loads(answer.body)["error"]["code"] == "body_too_large"
        assert (await stack.picker.idle())["picker_bodies_held_bytes"] == 0

    async def test_a_refusal_over_a_limit_says_which_and_is_counted_under_its_name(
        self, stack: FaultCluster
    ) -> None:
        message = {"role": "user", "content": "x"}
        bodies = {
            "max_json_depth": b'{"prompt": "x", "deep": ' + b"[" * 200 + b"]" * 200 + b"}",
            "max_json_values": b'{"prompt": "x", "many": [' + b"[]," * 300_000 + b"1]}",
            "max_prompts": json.dumps({"prompt": ["x"] * 3000}).encode(),
            "max_messages": json.dumps({"messages": [message] * 9000}).encode(),
            "max_model_length": json.dumps({"prompt": "x", "model": "m" * 300}).encode(),
        }
        counted = "picker_extproc_refused_total"
        before = await stack.picker.by_reason(counted)
        for limit, body in bodies.items():
            path = "/v1/chat/completions" if limit == "max_messages" else "/v1/completions"
            response = await post(stack, body, "identity", path)
            assert response.status_code == 400
            assert response.headers["x-picker-dropped-reason"] == limit
            assert response.json()["error"]["type"] == "invalid_request_error"
        after = await stack.picker.by_reason(counted)
        assert {limit: after[limit] - before.get(limit, 0) for limit in bodies} == dict.fromkeys(bodies, 1)

    async def test_large_headers_are_431(self, tmp_path: Path) -> None:
        async with cluster(tmp_path, engines=1, settings={"extproc": {"max_header_bytes": 4096}}) as stack:
            assert await raw(stack, [("x", "y" * 5000)], BODY, "/v1/completions") == 431
            assert await raw(stack, [("x", "y" * 3000)], BODY, "/v1/completions") == 200
            assert (await stack.picker.by_reason("picker_extproc_refused_total"))["headers_too_large"] == 1


@asynccontextmanager
async def slow_uploads(stack: FaultCluster, count: int) -> AsyncIterator[None]:
    """Clients that begin an upload and then only hold the line."""
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", stack.envoy.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n" + b"x" * 50_000
        )
        writers.append(writer)
    yield
    for writer in writers:
        writer.close()


async def test_memory_for_bodies_is_bounded_over_all_clients(tmp_path: Path) -> None:
    """Uploads that never end take the budget and no more; who comes then is told to come back, and can."""
    settings = {"extproc": {"total_body_limit": 1_000_000}}
    async with cluster(tmp_path, engines=1, settings=settings) as stack:
        async with slow_uploads(stack, 40):
            async with asyncio.timeout(60):
                while (await stack.picker.metrics())["picker_bodies_held_bytes"] < 940_000:
                    await asyncio.sleep(0.05)
            assert (await stack.picker.metrics())["picker_bodies_peak_bytes"] <= 1_000_000
            answers = await asyncio.gather(
                *(post(stack, BODY[:-1] + b" " * 90_000 + b"}", "identity") for _ in "abc")
            )
            assert {(each.status_code, each.json()["error"]["code"]) for each in answers} == {
                (503, "body_memory")
            }
            assert all(each.headers["retry-after"] for each in answers)
        await stack.picker.idle()
        assert (await post(stack, BODY, "identity")).status_code == 200
