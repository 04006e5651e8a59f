"""Trace readers, on small files of our own in each format and on the real traces where they are."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from picker.simulation.workloads import (
    Arrival,
    SharedPrefix,
    Workload,
    read_azure,
    read_lmcache,
    read_mooncake,
    read_servegen,
    read_vtc,
)


@pytest.fixture
def traces() -> Path:
    shared = Path(os.environ.get("PICKER_SHARED", Path(__file__).parents[3] / "shared"))
    if not (shared / "traces").is_dir():
        pytest.skip("the public traces are not here; set PICKER_SHARED to a directory that has traces/")
    return shared / "traces"


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = read_mooncake(path, seed=1)
    first, second = workload.arrivals
    assert 0.0 <= first.at < 3.0 <= second.at < 6.0
    assert list(second.blocks) == [0, 1]
    assert (second.prompt_tokens, second.output_tokens, first.output_tokens) == (1100, 7, 1)
    assert read_mooncake(path, seed=1).arrivals[0].at == first.at
    assert workload.infinite_cache_hit_share == pytest.approx(512 / 1612)


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_azure(path).arrivals
    assert first.at == 0.0
    assert second.at == pytest.approx(4.314579, abs=1e-5)
    assert (second.prompt_tokens, second.output_tokens, list(second.blocks)) == (396, 109, [])


def test_lmcache_sessions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    turn = {
        "session": "s",
        "turn": 0,
        "offset_ms": 1500,
        "input_length_est": 20,
        "output_length_est": 3,
        "hash_ids": [4, 5],
    }
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(turn))
    (arrival,) = read_lmcache(path).arrivals
    assert (arrival.at, arrival.prompt_tokens, arrival.tenant) == (1.5, 32, "s")


def test_servegen_rates(tmp_path: Path) -> None:
    path = tmp_path / "clients.json"
    quantiles = {"0": {"in_q": [10, 20, 30], "out_q": [5, 5, 5]}}
    client = {
        "client": 3,
        "windows_600s": {"0": [2.0, 1.0, "Gamma", 1, 1]},
        "lengths_6h_quantiles_0_2pct_steps": quantiles,
    }
    path.write_text(json.dumps([client]))
    workload = read_servegen(path, start=0.0, seconds=1200.0)
    assert 1000 < len(workload.arrivals) < 1400
    assert all(arrival.at < 600 and 10 <= arrival.prompt_tokens <= 30 for arrival in workload.arrivals)
    assert {arrival.tenant for arrival in workload.arrivals} == {"client-3"}
    assert len(read_servegen(path, start=0.0, seconds=600.0, scale=2.0).arrivals) > 2000


def test_shared_prefixes_are_shared_inside_a_group_only() -> None:
    generator = SharedPrefix(
        groups=3, prompts_per_group=2, system_tokens=200, question_tokens=60, block_size=64
    )
    prompts = generator.prompts()
    assert len(prompts) == 6
    assert {len(prompt) for prompt in prompts} == {4}
    by_system: dict[tuple[int, ...], set[int]] = {}
    for prompt in prompts:
        by_system.setdefault(tuple(prompt[:3]), set()).add(prompt[3])
    assert [len(tails) for tails in by_system.values()] == [2, 2, 2]
    stage = generator.stage(10.0, 5.0, first=4)
    assert len(stage.arrivals) == 50
    assert stage.arrivals[0].blocks == prompts[4]
    assert stage.arrivals[2].blocks == prompts[0]


def test_head_and_faster() -> None:
    work = Workload("w", 4, [Arrival(float(i), 4, 1) for i in range(10)])
    assert len(work.head(4.5).arrivals) == 5
    assert work.faster(2.0).arrivals[-1].at == 4.5


def test_the_real_traces_read_as_their_notes_say(traces: Path) -> None:
    mooncake = read_mooncake(traces / "mooncake_conversation_trace.jsonl")
    assert len(mooncake.arrivals) == 12_031
    assert mooncake.infinite_cache_hit_share == pytest.approx(0.374, abs=0.001)
    assert len(read_azure(traces / "AzureLLMInferenceTrace_conv.csv").arrivals) == 19_366
    vtc = read_vtc(traces / "vtc_lmsys_arena_27clients.csv")
    assert len(vtc.arrivals) == 1500
    assert len({arrival.tenant for arrival in vtc.arrivals}) == 27
    agents = read_lmcache(traces / "lmcache_agent" / "miniswe_prefix16est.jsonl.gz")
    assert len(agents.arrivals) == 402
    clients = traces / "servegen" / "servegen_deepseek-r1_clients_compact.json"
    assert len({arrival.tenant for arrival in read_servegen(clients, start=3600, seconds=1200).arrivals}) > 3
