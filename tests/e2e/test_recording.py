"""A recording made by one run and replayed against another: the same load, and nothing of the prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picker.cli import app as commands
from picker.simulation.mock_engine import MockEngineSettings
from picker.simulation.workloads import read_recording
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: standard, policy_family: standard, cache_bucket: all, quantum: 100}
  - {name: premium, policy_family: premium, cache_bucket: all, quantum: 300}
"""
PREFIX = [7] * 128


async def test_a_recording_is_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "arrivals.jsonl"
    engines = [MockEngineSettings(name="pod-0", prefill_rate=1e6)]
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    async with running_stack(
        recorded, engines, policy=POLICY, settings={"telemetry": {"record_file": recording}}
    ) as stack:
        heard = tmp_path / "heard.jsonl"
        live = asyncio.create_task(_record(stack, heard, requests=4))
        async with asyncio.timeout(60):
            while not stack.app.telemetry.recording.wanted:
                await asyncio.sleep(0.01)
        for tail, name in enumerate(("premium", "standard", "premium")):
            headers = {"x-picker-policy-class": name, "x-picker-tenant": "alice@example.com"}
            answer = await stack.complete([*PREFIX, *[20 + tail] * 70], max_tokens=3, headers=headers)
            assert answer["status"] == 200, answer
        refused = await stack.complete([9], headers={"x-picker-allowed-endpoints": "10.255.0.1:1"})
        assert refused["status"] == 503
        await stack.settled()
        await live
    assert _likeness(heard) == _likeness(recording), "picker record hears what the file gets"
    workload = read_recording(recording)
    assert "alice" not in recording.read_text()
    assert workload.block_size == 64
    assert [each.policy_class for each in workload.arrivals] == ["premium", "standard", "premium", "standard"]
    assert [each.prompt_tokens for each in workload.arrivals] == [198, 198, 198, 1]
    assert [each.output_tokens for each in workload.arrivals] == [3, 3, 3, 1]
    assert [len(each.blocks) for each in workload.arrivals] == [3, 3, 3, 0]
    assert len({tuple(each.blocks[:2]) for each in workload.arrivals[:3]}) == 1, "the shared prefix"
    assert len({each.blocks[2] for each in workload.arrivals[:3]}) == 3, "what they do not share"
    assert [each["outcome"] for each in map(json.loads, recording.read_text().splitlines())].count(
        "no_endpoint"
    ) == 1

    replayed = tmp_path / "replayed"
    replayed.mkdir()
    async with running_stack(replayed, engines, policy=POLICY) as stack:
        arguments = ["replay", str(recording), "--url", stack.url, "--model", "tiny", "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, commands, [*arguments, "--vocabulary", "500"])
        assert result.exit_code == 0, result.output
        served = [each.prompt_tokens for each in stack.engines[0].served]
    found = json.loads(result.output)
    assert sorted(served) == [1, 198, 198, 198]
    assert {name: each["answered"] for name, each in found["classes"].items()} == {
        "premium": 2,
        "standard": 2,
    }
    assert found["classes"]["premium"]["ttft_p99"] > 0


async def _record(stack: Stack, out: Path, *, requests: int) -> None:
    admin = f"http://127.0.0.1:{stack.addresses.admin}"
    arguments = [
        "record",
        "--admin",
        admin,
        "--out",
        str(out),
        "--requests",
        str(requests),
        "--seconds",
        "60",
    ]
    result = await asyncio.to_thread(CliRunner().invoke, commands, arguments)
    assert result.exit_code == 0, result.output


def _likeness(path: Path) -> list[tuple[int, int, int, str]]:
    """What a recording keeps, without the hashes and the clock: those are its own."""
    return [
        (each.prompt_tokens, each.output_tokens, len(each.blocks), each.policy_class)
        for each in read_recording(path).arrivals
    ]
