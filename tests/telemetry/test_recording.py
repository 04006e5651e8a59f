"""The recording: what it keeps, what it hides, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picker.policy import Policy
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.simulation.workloads import read_recording
from picker.telemetry.recording import Recording

MANY = 10**9


def work(tokens: list[int], *, arrival: float = 0.0, tenant: str = "") -> Work:
    demand = Demand(len(tokens), PromptKeys.of_tokens([tokens]))
    policy_class = Policy.default().profile("m").resolve(None, len(tokens))
    return Work("r", arrival, demand, policy_class, tenant=tenant, expected_output_tokens=9)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_times_lengths_and_likeness_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    recording = Recording(path, MANY, lambda: 0.0)
    recording.take(work([1] * 128, arrival=1.0, tenant="a"), "dispatched", 5, 16)
    recording.take(work([1] * 64 + [2] * 70, arrival=3.5, tenant="a"), "dispatched", None, 16)
    recording.close()
    first, second = read_recording(path).arrivals
    assert second.at - first.at == pytest.approx(2.5, abs=0.002)
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (128, 5, 9)
    assert (len(first.blocks), len(second.blocks)) == (2, 2)
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert first.tenant == second.tenant != "a"
    assert recording.stats.written == 2
    assert recording.stats.bytes == path.stat().st_size


def test_hashes_mean_nothing_outside_of_one_run(tmp_path: Path) -> None:
    """Nobody can look up a prompt that they suspect."""
    path = tmp_path / "arrivals.jsonl"
    for _ in range(2):
        recording = Recording(path, MANY, lambda: 0.0)
        recording.take(work([1] * 64, tenant="a"), "dispatched", 1, 16)
        recording.close()
    first, second = lines(path)
    keys = PromptKeys.of_tokens([[1] * 64]).blocks(16)[0]
    assert first["hash_ids"] != second["hash_ids"]
    assert first["tenant"] != second["tenant"]
    assert keys[-1] not in first["hash_ids"]  # type: ignore[operator]


def test_the_file_ends_at_its_limit_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    recording = Recording(path, 1000, lambda: 0.0)
    for _ in range(100):
        recording.take(work([1] * 64), "dispatched", 1, 16)
    recording.close()
    assert path.stat().st_size <= 1000
    assert len(lines(path)) == recording.stats.written > 0
    assert recording.stats.written + recording.stats.lost == 100


def test_another_file_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"other.jsonl:1: not a line of a recording"):
        read_recording(path)
