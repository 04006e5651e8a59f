"""`picker simulate`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from picker.policy import PolicyError, load_policy
from picker.simulation.engines import PROFILES, QWEN3_32B_2XH100
from picker.simulation.experiments.contenders import CONTENDERS, CORE
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.experiments.report import report
from picker.simulation.experiments.runs import Case, Cluster, Result, grouped, run_all
from picker.simulation.experiments.summary import as_data, class_names, class_table, policy_table
from picker.simulation.workloads import Workload

# Shares are counted in tokens: a weight's quantum, and when a pod is busy unless the user says so.
_QUANTUM = 1024
_THRESHOLD = 16_384


def simulate(
    workload: Annotated[
        str,
        typer.Argument(
            help="A trace file, a recording of `picker record`, or `shared-prefix`, which takes options:"
            " `shared-prefix:rate=20,duration=60,groups=150,prompts_per_group=5,system_tokens=6000,"
            "question_tokens=1200,output_tokens=1000`."
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Who routes; give it again to compare. One of {', '.join(CONTENDERS)}.", metavar="NAME"
        ),
    ] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(help="Policy file for `picker` and `picker-fcfs`.", exists=True, dir_okay=False),
    ] = None,
    classes: Annotated[
        str,
        typer.Option(
            help="Instead of a policy file: `premium=8,standard=4,batch=1`, names and weights. Requests that name no"
            " class are shared out by tenant, or by prefix.",
        ),
    ] = "",
    threshold: Annotated[
        int, typer.Option(help="With --classes: booked prefill tokens above which a pod is busy.", min=0)
    ] = _THRESHOLD,
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="Give each prefix to a tenant, drawn by the rates in this file (ServeGen's JSON, or a CSV with a"
            " column `client`).",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    flood: Annotated[
        str, typer.Option(help="`batch=10`: that class asks ten times as often.", metavar="CLASS=TIMES")
    ] = "",
    pods: Annotated[int, typer.Option(help="How many pods.", min=1, max=1024)] = 8,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of the workload's size that a pod can cache; the engine's memory if not given.",
            min=2,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help=f"Engine and hardware: {', '.join(PROFILES)}.")
    ] = QWEN3_32B_2XH100.name,
    load: Annotated[float, typer.Option(help="Rate of the arrivals, as a multiple.", min=0.001)] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="Only what arrives before, after the load is applied.", min=0.0)
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Runs of each policy, each with arrivals of its own.", min=1, max=1000)
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes at once. 0: one for each core.", min=0)] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--report", help="Write an HTML report with plots to this file.", dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, each run in full.")] = False,
) -> None:
    """Try a policy on a workload before a customer does: engines, caches and queues in virtual time.

    `picker` is the same queue, KV index and selection that `picker serve` runs; the others are its peers' policies,
    and `picker-fcfs` is Picker without classes. Pods are models of an engine with continuous batching, chunked
    prefill and a prefix cache, fitted to published figures; `picker study ladder` shows how well. An hour of traffic
    on eight pods takes some ten seconds.

        picker simulate shared-prefix:rate=20,duration=38 --policy picker --policy llmd-blend --seeds 5

        picker simulate conversation_trace.jsonl --blocks 4000 --load 2 --policy picker --policy round-robin

        picker simulate arrivals.jsonl --policy-file policy.yaml --policy picker --policy picker-fcfs --report out.html

        picker simulate conversation_trace.jsonl --classes premium=8,standard=4,batch=1 --flood batch=10
    """
    names = list(dict.fromkeys(policy or [CORE]))
    for name in names:
        if name not in CONTENDERS:
            raise _wrong(f"there is no {name!r}; there are {', '.join(CONTENDERS)}", "--policy")
    if engine not in PROFILES:
        raise _wrong(f"there is no {engine!r}; there are {', '.join(PROFILES)}", "--engine")
    weights = _pairs(classes, "--classes")
    text = _policy_text(policy_file, weights, threshold)
    recipe = Recipe(workload, tenants, tuple(weights), load, seconds, _flood(flood))
    try:
        first = recipe.make(0)
    except (OSError, ValueError) as error:
        raise _wrong(str(error), "WORKLOAD") from None
    cluster = Cluster(pods, blocks, PROFILES[engine])
    _check_fits(first, cluster)
    cases = [Case(name, recipe, cluster, seed, text) for name in names for seed in range(seeds)]
    with progress(len(cases) * len(first.arrivals), quiet=as_json) as tick:
        results = run_all(cases, jobs=jobs or os.cpu_count() or 1, tick=tick)
    groups = grouped(results, lambda case: case.contender)
    facts = _facts(first, recipe, cluster, seeds)
    if output is not None:
        output.write_text(report(f"Simulation of {first.name}", facts, groups), encoding="utf-8")
    _show(facts, groups, as_json=as_json)


def _show(facts: list[str], groups: dict[str, list[Result]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"facts": facts, "policies": as_data(groups)}))
        return
    console = terminal()
    for fact in facts:
        console.print(f"  {fact}", highlight=False, style="dim")
    console.print()
    console.print(policy_table(groups).rich())
    if len(class_names(groups)) > 1:
        console.print()
        console.print(class_table(groups).rich())


def terminal() -> Console:
    """Standard output; where it is no terminal nothing is cut off."""
    console = Console()
    return console if console.is_terminal else Console(width=220)


@contextmanager
def progress(arrivals: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while something is simulated; call what it gives with arrivals as they are done."""
    with Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet,
    ) as bar:
        task = bar.add_task("", total=arrivals)
        yield lambda done: bar.advance(task, done)


def _facts(workload: Workload, recipe: Recipe, cluster: Cluster, seeds: int) -> list[str]:
    arrivals = workload.arrivals
    shape = cluster.make(workload.block_size)[0].model.shape
    joined = [
        "tenants" if recipe.tenants else "",
        "classes" if recipe.classes else "",
        "a flood" if recipe.flood else "",
    ]
    added = " and ".join(filter(None, joined))
    return [
        f"{workload.name}: {len(arrivals):,} requests in {arrivals[-1].at:,.0f} s, "
        f"{workload.prompt_tokens / len(arrivals):,.0f} prompt tokens each; "
        f"a cache without end would hold {workload.infinite_cache_hit_share:.1%} of them",
        f"{cluster.pods} pods ({cluster.profile.name}), each with {shape.num_blocks - 1:,} blocks of "
        f"{shape.block_size} tokens; load x{recipe.scale:g}; {seeds} {'seed' if seeds == 1 else 'seeds'}",
        *([f"{added} joined to the workload by this command, not recorded in it"] if added else []),
    ]


def _policy_text(file: Path | None, weights: dict[str, int], threshold: int) -> str:
    if file is not None and weights:
        raise _wrong("give it or --policy-file", "--classes")
    if weights:
        text, option = class_policy(weights, threshold), "--classes"
    elif file is None:
        return ""
    else:
        text, option = file.read_text(encoding="utf-8", errors="replace"), "--policy-file"
    try:
        load_policy(text, str(file or "classes"))
    except PolicyError as error:
        raise _wrong(str(error), option) from None
    return text


def class_policy(weights: dict[str, int], threshold: int) -> str:
    """A policy file of classes with these weights, each named by the requests; who names none gets the last one."""
    entries = [
        f"  - {{name: {name}, policy_family: {name}, cache_bucket: any, quantum: {_QUANTUM * weight},"
        f" prefill_busy_threshold: {threshold}}}\n"
        for name, weight in weights.items()
    ]
    return (
        f"default_policy_family: {[*weights][-1]}\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: any}]\n"
        f"policy_classes:\n{''.join(entries)}"
    )


def _check_fits(workload: Workload, cluster: Cluster) -> None:
    capacity = cluster.make(workload.block_size)[0].model.shape.capacity_tokens
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in workload.arrivals)
    if longest > capacity:
        raise _wrong(
            f"the longest request has {longest:,} tokens, and a pod's cache holds {capacity:,}", "--blocks"
        )


def _flood(text: str) -> tuple[str, int] | None:
    pairs = _pairs(text, "--flood")
    if len(pairs) > 1:
        raise _wrong("one class only", "--flood")
    return next(iter(pairs.items()), None)


def _pairs(text: str, option: str) -> dict[str, int]:
    """`a=1,b=2`, whole numbers above 0."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise _wrong(f"must look like name=1, not {part!r}", option)
        found[name] = int(number)
    return found


def _wrong(message: str, option: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)
