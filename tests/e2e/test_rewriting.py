"""A model's name in the body is exchanged on its way through a real Envoy, and nothing else is."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from picker.simulation.envoy_config import BodyMode, ResponseObservation
from tests.e2e.stack import Stack, gateway
from tests.support.clients import Framing, in_chunks
from tests.support.upstream import upstream

POLICY = """
model_rewrites:
  - match: [chat]
    targets: [{model: "tiny-\\u00e9"}]
  - match: [split]
    targets: [{model: tiny-a, weight: 3}, {model: tiny-b, weight: 1}]
"""
NEW = b'"tiny-\\u00e9"'
BEFORE = b'{ "prompt": "a \\"model\\": \\"x\\" }", "n" : 1.0,\n "x":{"model":"chat"}, "mod\\u0065l"  :  '
AFTER = b' ,"user":"\\u00e9 \xc3\xa9", "seed": 12345678901234567890}\n'


def entry(address: str) -> dict[str, Any]:
    return {"name": "pod", "address": address, "metrics": False, "kv_events": False}


def client(stack: Stack, framing: Framing) -> httpx.AsyncClient:
    is_http2 = framing is Framing.HTTP2
    return httpx.AsyncClient(
        base_url=stack.url, http1=not is_http2, http2=is_http2, verify=False, trust_env=False
    )


async def status(http: httpx.AsyncClient, body: bytes | AsyncIterator[bytes]) -> int:
    return (await http.post("/v1/completions", content=body)).status_code


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_the_body_differs_in_exactly_that_value(tmp_path: Path, mode: BodyMode) -> None:
    async with upstream() as pod:
        options = {"request_body_mode": mode, "buffer_limit": 4 << 20}
        async with gateway(tmp_path, [entry(pod.address)], policy=POLICY, **options) as stack:
            for framing in Framing:
                async with client(stack, framing) as http:
                    for padding in (b"", b" " * 61_900, b" " * 300_000):
                        sent = BEFORE + b'"chat"' + padding + AFTER
                        assert (
                            await status(http, in_chunks(sent) if framing is Framing.CHUNKED else sent) == 200
                        )
                        arrived = pod.requests[-1]
                        assert arrived.body == BEFORE + NEW + padding + AFTER
                        lengths = arrived.values("content-length")
                        assert lengths in ([], [str(len(arrived.body))])
                        assert len(lengths) + len(arrived.values("transfer-encoding")) <= 1
                    untouched = BEFORE + b'"another"' + AFTER
                    assert await status(http, untouched) == 200
                    assert pod.requests[-1].body == untouched
            assert stack.app.faces.sources()["rewriting"].requests == {"tiny-é": 9}


async def test_a_split_by_weight_and_what_cannot_be_rewritten(tmp_path: Path) -> None:
    async with (
        upstream() as pod,
        gateway(
            tmp_path, [entry(pod.address)], policy=POLICY, observation=ResponseObservation.STREAM
        ) as stack,
        client(stack, Framing.CONTENT_LENGTH) as http,
    ):
        for _ in range(80):
            assert await status(http, b'{"model": "split", "prompt": "x"}') == 200
        names = [json.loads(request.body)["model"] for request in pod.requests]
        assert set(names) == {"tiny-a", "tiny-b"}
        assert 40 <= names.count("tiny-a") <= 75, "three of four"

        packed = gzip.compress(b'{"model": "chat", "prompt": "x"}')
        coding = {"content-encoding": "gzip"}
        refused = await http.post("/v1/completions", content=packed, headers=coding)
        assert refused.status_code == 415
        assert refused.json()["error"]["param"] == "content-encoding"
        other = gzip.compress(b'{"model": "another", "prompt": "x"}')
        assert (await http.post("/v1/completions", content=other, headers=coding)).status_code == 200
        arrived = pod.requests[-1]
        assert arrived.values("content-encoding") == ["gzip"]
        assert json.loads(arrived.body)["model"] == "another", "it came packed, as it was sent"


async def test_faces_in_processes_of_their_own_hear_of_the_rules_and_of_new_ones(tmp_path: Path) -> None:
    async with (
        upstream() as pod,
        gateway(
            tmp_path,
            [entry(pod.address)],
            policy=POLICY,
            settings={"extproc": {"workers": 2}, "policy": {"reload_interval": 0.1}},
        ) as stack,
        client(stack, Framing.CONTENT_LENGTH) as http,
    ):
        body = b'{"model": "chat", "prompt": "x"}'
        assert await status(http, body) == 200
        assert pod.requests[-1].body == body.replace(b'"chat"', NEW)
        policy = stack.app.settings.policy.file
        assert policy is not None
        policy.write_text("model_rewrites: [{match: [chat], targets: [{model: newer}]}]\n")
        async with asyncio.timeout(60):
            while b"newer" not in pod.requests[-1].body:
                assert await status(http, body) == 200
                await asyncio.sleep(0.05)
        assert pod.requests[-1].body == body.replace(b'"chat"', b'"newer"')
