"""The studies: what they claim is what their runs say, and their page is written by them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picker.cli import app
from picker.simulation.experiments.measures import ClassMeasures, Measures, PodMeasures, Times
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.experiments.report import class_charts
from picker.simulation.experiments.runs import Case, Cluster, Result
from picker.simulation.experiments.summary import class_table
from picker.simulation.experiments.tables import Table
from picker.simulation.studies import classes, comparison
from picker.simulation.studies.findings import Claim, Findings
from picker.simulation.studies.study_command import PAGE, Study, renewed

TIMES = Times(1.0, 1.0, 1.0, 10.0)
MEASURES = Measures(
    *(100.0, 10, 0, TIMES, TIMES, 0.05, 0.3, 900.0, 100.0, 1.0, 0.0),
    classes={name: ClassMeasures(5, 0, TIMES, TIMES, 0.5, 0.0) for name in classes.VICTIMS},
    pods=(PodMeasures(10, 1000, 0.3, 0.5, 0),),
    ttft_curve=(1.0,),
    shares=(),
)


@pytest.fixture
def traces() -> Path:
    shared = Path(os.environ.get("PICKER_SHARED", Path(__file__).parents[3] / "shared"))
    if not (shared / "traces").is_dir():
        pytest.skip("the public traces are not here; set PICKER_SHARED to a directory that has traces/")
    return shared / "traces"


def result(name: str, **changes: Any) -> Result:
    return Result(Case(name, Recipe("x"), Cluster()), replace(MEASURES, **changes), 0.1)


def test_being_best_nearly_everywhere_is_not_being_best() -> None:
    groups = {
        (blocks, load, name): [
            result(name, ttft=replace(TIMES, mean=0.9, p99=9.0) if name == "picker" else TIMES)
        ]
        for blocks in comparison.BLOCKS
        for load in comparison.LOADS
        for name in comparison.POLICIES
    }
    assert all(claim.holds for claim in comparison.claims(groups))
    groups[1000, 2.0, "llmd-blend"] = [result("llmd-blend", ttft=replace(TIMES, mean=0.8))]
    broken = [claim for claim in comparison.claims(groups) if not claim.holds]
    assert [claim.found for claim in broken] == ["closest at load 2: 1.125 of llmd-blend's"]
    drawn = comparison.table("T", 1000, "ttft_mean", groups).markdown()
    assert drawn.count("**0.80**") == 1
    assert drawn.count("**0.90**") == len(comparison.LOADS) - 1


def test_victims_throughput_and_hits_are_held_to_their_bounds() -> None:
    slow = replace(MEASURES.classes["premium"], ttft=replace(TIMES, p99=13.0))
    groups = {
        classes.ALONE: [result("picker")],
        classes.FAIR: [result("picker", classes={**MEASURES.classes, "premium": slow})],
        classes.FCFS: [result("picker-fcfs", prompt_rate=930.0, hit_share=0.31)],
    }
    premium, standard, throughput, hits = classes.claims(groups)
    assert (premium.holds, premium.found) == (False, "13.00 s against 10.00 s, 1.30 times")
    assert standard.holds
    assert (throughput.holds, throughput.found) == (False, "1,000 against 1,030 tokens/s (-2.9%)")
    assert hits.holds


def test_a_class_that_an_arm_does_not_have_is_left_out_there() -> None:
    with_batch = {**MEASURES.classes, "batch": MEASURES.classes["premium"]}
    groups = {"alone": [result("picker")], "flood": [result("picker", classes=with_batch)]}
    rows = [(row[0], row[1]) for row in class_table(groups).rows]
    assert rows == [
        ("batch", "flood"),
        *((name, arm) for name in ("premium", "standard") for arm in ("alone", "flood")),
    ]
    assert len(class_charts(groups)) == 6


def test_findings_are_written_between_their_marks() -> None:
    findings = Findings(
        "T", ["done"], [Claim("c", "1 of 2", False)], [Table("F", ["a", "b"], [["x", "1"]])], ["note"]
    )
    page = "# P\n<!-- study ladder -->\nold\n<!-- end of study ladder -->\nrest\n"
    new = renewed(page, "ladder", "picker study ladder", findings)
    assert new.startswith("# P\n<!-- study ladder -->\n\n## T\n\n    picker study ladder\n\n- done\n")
    assert "- DOES NOT HOLD: c: 1 of 2\n" in new
    assert "old" not in new
    assert new.endswith("<!-- end of study ladder -->\nrest\n")
    assert renewed(new, "ladder", "picker study ladder", findings) == new
    with pytest.raises(ValueError, match="needs the marks"):
        renewed(page, "classes", "", findings)


def test_the_page_has_a_place_for_every_study() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in Study:
        assert text.count(f"<!-- study {name} -->") == text.count(f"<!-- end of study {name} -->") == 1


def test_without_the_traces_it_says_what_it_needs(tmp_path: Path) -> None:
    for arguments, missing in (
        ([], "needs the public traces"),
        (["--traces", str(tmp_path)], comparison_trace()),
    ):
        run = CliRunner().invoke(app, ["study", "comparison", *arguments], env={"COLUMNS": "300"})
        assert run.exit_code == 2
        assert missing in run.stderr


def comparison_trace() -> str:
    return "mooncake_conversation_trace.jsonl"


@pytest.mark.slow
def test_picker_is_the_best_on_a_part_of_the_trace(traces: Path, tmp_path: Path) -> None:
    """Five minutes of it; the page of studies has the whole hour."""
    report = tmp_path / "report.html"
    arguments = ["study", "comparison", "--traces", str(traces), "--seeds", "1", "--seconds", "300"]
    run = CliRunner().invoke(app, [*arguments, "--jobs", "1", "--json", "--report", str(report)])
    cells = {(cell["blocks"], cell["load"], cell["policy"]): cell for cell in json.loads(run.stdout)["cells"]}
    assert len(cells) == len(comparison.BLOCKS) * len(comparison.LOADS) * len(comparison.POLICIES)
    for blocks in comparison.BLOCKS:
        ours = cells[blocks, 2.0, "picker"]
        for name in ("round-robin", "llmd-blend", "llmd-affinity"):
            assert ours["ttft_mean"] < cells[blocks, 2.0, name]["ttft_mean"], name
    assert "<svg" in report.read_text()


@pytest.mark.slow
def test_weights_protect_the_victims_of_a_flood(traces: Path) -> None:
    arguments = ["study", "classes", "--traces", str(traces), "--seeds", "1", "--seconds", "300"]
    run = CliRunner().invoke(app, [*arguments, "--jobs", "1", "--json"])
    found = json.loads(run.stdout)
    premium, standard, throughput, hits = (claim["holds"] for claim in found["claims"])
    assert (premium, standard, throughput, hits) == (True, True, True, True), found["claims"]
