"""`picker simulate`: what it takes, what it prints, and that its report needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from picker.cli import app
from picker.policy import Policy
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.telemetry.recording import Recording

SMALL = (
    "shared-prefix:rate=8,duration=8,groups=6,prompts_per_group=3,"
    "system_tokens=1280,question_tokens=320,output_tokens=40"
)
POLICY = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: premium, policy_family: premium, cache_bucket: any, quantum: 3072, prefill_busy_threshold: 4096}
  - {name: standard, policy_family: standard, cache_bucket: any, quantum: 1024, prefill_busy_threshold: 4096}
"""


def simulate(*arguments: str) -> Any:
    """What it prints as JSON."""
    result = CliRunner().invoke(app, ["simulate", *arguments, "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2, result.output
    return result.stderr


def test_policies_stand_side_by_side_with_intervals() -> None:
    found = simulate(SMALL, "--pods", "2", "--seeds", "3", "--policy", "picker", "--policy", "round-robin")
    policies = found["policies"]
    assert set(policies) == {"picker", "round-robin"}
    for each in policies.values():
        assert [run["requests"] for run in each["runs"]] == [64] * 3
        mean = each["figures"]["ttft_mean"]
        assert min(run["ttft"]["mean"] for run in each["runs"]) <= mean["mean"]
        assert mean["half_width"] > 0
    assert (
        policies["picker"]["figures"]["hit_share"]["mean"]
        > policies["round-robin"]["figures"]["hit_share"]["mean"]
    )


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (simulate(SMALL, "--pods", "2") for _ in range(2))
    for each in (first, second):
        del each["policies"]["picker"]["runs"][0]["cpu"]
    assert first == second


@pytest.mark.slow
def test_processes_find_what_one_process_finds() -> None:
    arguments = ["simulate", SMALL, "--pods", "2", "--seeds", "2", "--json", "--jobs"]
    answers = []
    for jobs in ("1", "2"):
        result = CliRunner().invoke(app, [*arguments, jobs])
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout)["policies"]["picker"]["figures"])
    assert answers[0] == answers[1]


def test_more_load_on_fewer_pods_waits_longer() -> None:
    calm = simulate(SMALL, "--pods", "4")["policies"]["picker"]["figures"]
    busy = simulate(SMALL, "--pods", "1", "--load", "20")["policies"]["picker"]["figures"]
    assert busy["ttft_p99"]["mean"] > 2 * calm["ttft_p99"]["mean"]


def test_smaller_caches_hit_less() -> None:
    large = simulate(SMALL, "--pods", "1")["policies"]["picker"]["figures"]
    small = simulate(SMALL, "--pods", "1", "--blocks", "40")["policies"]["picker"]["figures"]
    assert small["hit_share"]["mean"] < large["hit_share"]["mean"]


def test_classes_are_served_by_weight_where_a_flood_would_drown_them() -> None:
    """With weights, premium does not wait for the flood; in order of arrival, it does."""
    found = simulate(
        *(SMALL, "--pods", "1", "--load", "4", "--classes", "premium=8,batch=1", "--flood", "batch=10"),
        *("--threshold", "2048", "--policy", "picker", "--policy", "picker-fcfs"),
    )
    fair, fcfs = (found["policies"][name]["classes"] for name in ("picker", "picker-fcfs"))
    assert fair["batch"]["requests"]["mean"] > 5 * fair["premium"]["requests"]["mean"]
    assert fair["premium"]["ttft_p99"]["mean"] < fcfs["premium"]["ttft_p99"]["mean"] / 2
    assert any("joined" in fact for fact in found["facts"]), "it is said that nobody recorded these classes"


def test_a_policy_file_is_the_core_s(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    found = simulate(SMALL, "--pods", "1", "--policy-file", str(policy))
    assert found["policies"]["picker"]["figures"]["refused"]["mean"] == 0


def test_a_recording_of_a_picker_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    recording = Recording(path, 10**9, lambda: 0.0)
    policy_class = Policy.default().profile("m").resolve(None, 0)
    for number in range(20):
        tokens = [7] * 640 + [number] * 64
        demand = Demand(len(tokens), PromptKeys.of_tokens([tokens]))
        work = Work(str(number), number / 4, demand, policy_class, tenant="someone")
        recording.take(work, "dispatched", 5, 64)
    recording.close()
    found = simulate(str(path), "--pods", "1")
    (run,) = found["policies"]["picker"]["runs"]
    assert run["requests"] == 20
    assert set(run["classes"]) == {"default"}
    assert run["hit_share"] == pytest.approx(19 * 640 / (20 * 704))


def test_the_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    simulate(
        *(SMALL, "--pods", "2", "--seeds", "2", "--policy", "picker", "--policy", "random"),
        *("--classes", "premium=3,batch=1", "--report", str(path)),
    )
    text = path.read_text()
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawings) >= 12
    for title in (
        "Requests with their first token by then",
        "Shares of the work under picker",
        "Prefill tokens by pod",
    ):
        assert title in text


def test_a_terminal_gets_tables() -> None:
    result = CliRunner().invoke(app, ["simulate", SMALL, "--pods", "2", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "TTFT mean s" in result.stdout
    assert "picker" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [SMALL, "--policy", "sheer-luck"],
            "there is no 'sheer-luck'; there are picker, picker-fcfs, round-robin",
        ),
        (["shared-prefix:speed=3"], "shared-prefix takes .*rate.*, not 'speed=3'"),
        (["shared-prefix:rate=fast"], "rate must be a number, not 'fast'"),
        (["shared-prefix:rate=0"], "rate must be above 0"),
        ([SMALL, "--classes", "premium"], "must look like name=1, not 'premium'"),
        ([SMALL, "--flood", "a=2,b=3"], "one class only"),
        ([SMALL, "--classes", "a b=1"], "must match"),
        ([SMALL, "--engine", "abacus"], "there is no 'abacus'"),
        ([SMALL, "--blocks", "20"], "the longest request has 1,640 tokens, and a pod's cache holds 1,280"),
        (["absent.jsonl"], "absent.jsonl"),
        ([SMALL, "--seconds", "0"], "no arrivals are left"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    said = " ".join(refusal(*arguments).replace("│", " ").split())
    assert re.search(message, said), said


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name, text in (
        ("a.jsonl", '{"x": 1}\n'),
        ("b.csv", "x,y\n1,2\n"),
        ("c.jsonl", "\n"),
        ("d.jsonl", "[1]\n"),
    ):
        (tmp_path / name).write_text(text)
        assert "not a recording" in refusal(str(tmp_path / name)), name
