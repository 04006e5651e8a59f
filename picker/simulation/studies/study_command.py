"""`picker study`: the studies that this project's claims rest on, each by one command."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import picker
from picker.simulation.experiments.simulate_command import progress, terminal
from picker.simulation.studies import classes, comparison, ladder
from picker.simulation.studies.findings import Findings, Tick
from picker.simulation.workloads import read_mooncake

TRACE = "mooncake_conversation_trace.jsonl"
RATES = "servegen/servegen_deepseek-r1_clients_compact.json"
PAGE = Path(picker.__file__).parent / "simulation" / "STUDIES.md"
# How much of the trace the flood runs over.
_FLOOD_SECONDS = 900.0


class Study(StrEnum):
    LADDER = "ladder"
    COMPARISON = "comparison"
    CLASSES = "classes"


def study(
    name: Annotated[Study, typer.Argument(help="Which one.")],
    traces: Annotated[
        Path | None,
        typer.Option(
            envvar="PICKER_TRACES",
            help=f"Directory with the public traces: `{TRACE}` (Mooncake) for `comparison` and `classes`, and `{RATES}`"
            " (ServeGen) for `classes`. They are not part of Picker.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each case, for confidence intervals.", min=1)] = 3,
    seconds: Annotated[
        float | None, typer.Option(help="Only so much of the trace, for a quick look.", min=1.0)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes at once. 0: one for each core.", min=0)] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--report", help="Write an HTML report with plots to this file.", dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put the tables into the page of studies of this checkout.")
    ] = False,
) -> None:
    """Repeat a study: what was simulated, what was claimed, and whether it holds.

    `ladder`: is the model to be believed? llm-d's published rate ladder, for round robin and its blend. Needs no trace;
    a minute or two.

    `comparison`: which pod? Picker's choice against its peers' on an hour of real conversations, at several loads and
    sizes of cache. Half an hour on two cores with three seeds.

    `classes`: what are weights worth? Three classes 8:4:1, one flooding at ten times its rate.

        picker study ladder --report ladder.html

        picker study comparison --traces traces --seeds 1 --seconds 600

    Exit code 1 where a claim does not hold.
    """
    workers = jobs or os.cpu_count() or 1
    with progress(_arrivals(name, traces, seeds, seconds), quiet=as_json) as tick:
        findings = _carry_out(name, traces, seeds, seconds, workers, tick)
    if output is not None:
        output.write_text(findings.html(), encoding="utf-8")
    if write:
        command = f"picker study {name}"
        if name is not Study.LADDER:
            command += f" --traces DIRECTORY --seeds {seeds}" + (f" --seconds {seconds:g}" if seconds else "")
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), name, command, findings), encoding="utf-8")
    _show(findings, as_json=as_json)
    if not all(claim.holds for claim in findings.claims):
        raise typer.Exit(1)


def renewed(page: str, name: str, command: str, findings: Findings) -> str:
    """The page with the part of one study replaced. Raises ValueError where its marks are missing."""
    begin, end = f"<!-- study {name} -->", f"<!-- end of study {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page needs the marks {begin} and {end}")
    return f"{before}{begin}\n\n## {findings.title}\n\n    {command}\n\n{findings.markdown()}\n{end}{after}"


def _carry_out(
    name: Study, traces: Path | None, seeds: int, seconds: float | None, jobs: int, tick: Tick
) -> Findings:
    if name is Study.LADDER:
        return ladder.study(tick)
    if name is Study.COMPARISON:
        return comparison.study(_trace(traces, TRACE), seeds, jobs, tick, seconds)
    span = seconds or _FLOOD_SECONDS
    return classes.study(_trace(traces, TRACE), _trace(traces, RATES), seeds, jobs, tick, span)


def _arrivals(name: Study, traces: Path | None, seeds: int, seconds: float | None) -> int:
    """How many requests all runs have together, for the progress bar."""
    if name is Study.LADDER:
        return len(ladder.ARMS) * ladder.arrivals()
    trace = _trace(traces, TRACE)
    if name is Study.COMPARISON:
        by_load = {
            load: len(read_mooncake(trace).faster(load).head(seconds or 1e9).arrivals)
            for load in comparison.LOADS
        }
        return sum(by_load[case.recipe.scale] for case in comparison.cases(trace, seeds, seconds))
    arms = classes.cases(trace, _trace(traces, RATES), seeds, seconds or _FLOOD_SECONDS).values()
    return sum(len(arm[0].recipe.make(0).arrivals) * len(arm) for arm in arms)


def _trace(traces: Path | None, name: str) -> Path:
    if traces is None:
        raise typer.BadParameter("this study needs the public traces", param_hint="--traces")
    path = traces / name
    if not path.is_file():
        raise typer.BadParameter(f"there is no {path}", param_hint="--traces")
    return path


def _show(findings: Findings, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(findings.as_data()))
        return
    console = terminal()
    console.print(f"[b]{findings.title}[/b]")
    for fact in findings.facts:
        console.print(f"  {fact}", style="dim", highlight=False, markup=False)
    for table in findings.tables:
        console.print()
        console.print(table.rich())
    console.print()
    for claim in findings.claims:
        console.print(claim.line(), style="" if claim.holds else "bold red", highlight=False, markup=False)
    for note in findings.notes:
        console.print(f"  note: {note}", style="dim", highlight=False, markup=False)
