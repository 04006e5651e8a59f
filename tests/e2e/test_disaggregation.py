"""Prefill and decode on two endpoints, through a real Envoy: what the decoding engine is told."""

from __future__ import annotations

from pathlib import Path

from picker.selection.disaggregation import PREFILLER_HEADER
from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import running_stack

POLICY = "disaggregation: {min_uncached_tokens: 200}\n"
ENGINES = [
    MockEngineSettings(name="prefill", prefill_rate=1e6),
    MockEngineSettings(name="decode", prefill_rate=1e6),
]
ROLES = [{"labels": {"llm-d.ai/role": name}} for name in ("prefill", "decode")]


async def test_a_long_prompt_names_who_prefills_and_a_short_one_does_not(tmp_path: Path) -> None:
    async with running_stack(tmp_path, ENGINES, endpoint_extras=ROLES, policy=POLICY) as stack:
        prefill, decode = stack.engines
        spoofed = {PREFILLER_HEADER: "203.0.113.9:1"}
        for prompt in ([3] * 500, [4] * 100):
            answer = await stack.complete(prompt, headers=spoofed)
            assert answer["status"] == 200
            assert answer["headers"]["x-inference-pod"] == "decode"
        long, short = decode.served
        assert long.headers.getall(PREFILLER_HEADER) == [prefill.addresses.http]
        assert PREFILLER_HEADER not in short.headers, "nobody but Picker says who prefills"
        assert not prefill.served
        await stack.settled()
        assert stack.app.queue.disaggregation.stats.requests == {"apart": 1, "short": 1}
        loads = [stack.app.ledger.load(endpoint.slot) for endpoint in stack.app.pool]
        assert [(load.prefill_tokens, load.running) for load in loads] == [(0, 0)] * 2


async def test_without_anybody_to_prefill_it_is_decoded_alone_and_counted(tmp_path: Path) -> None:
    async with running_stack(tmp_path, ENGINES[1:], endpoint_extras=ROLES[1:], policy=POLICY) as stack:
        assert (await stack.complete([3] * 500))["status"] == 200
        (served,) = stack.engines[0].served
        assert PREFILLER_HEADER not in served.headers
        assert stack.app.queue.disaggregation.stats.requests == {"no_prefill_endpoint": 1}
