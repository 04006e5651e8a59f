"""Picker's choice of a pod against its peers', on real traffic: the conversation trace on eight pods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from picker.simulation.experiments.charts import lines
from picker.simulation.experiments.contenders import CORE
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.experiments.runs import Case, Cluster, Result, grouped, run_all
from picker.simulation.experiments.summary import FIGURES
from picker.simulation.experiments.tables import Table
from picker.simulation.reference_policies import CHOOSERS
from picker.simulation.studies.findings import Claim, Findings, Tick

BLOCKS = (4000, 1000)
# Multiples of the recorded rate; at the last one all pods together cannot keep up.
LOADS = (0.5, 1.0, 2.0, 2.5, 3.0)
POLICIES = (CORE, *CHOOSERS)

# A policy that sends all to a few pods ends hours after the others; its times say that and no more.
_HOPELESS_SECONDS = 1000.0
_CEILING_PART = 0.75

Cell = tuple[int, float, str]


def cases(trace: Path, seeds: int, seconds: float | None = None) -> list[Case]:
    """Every policy at every load with every cache, one seed after the other: its trace is read once.

    `seconds`: only so much of the trace, for a quick look.
    """
    return [
        Case(name, Recipe(str(trace), scale=load, seconds=seconds), Cluster(8, blocks), seed)
        for seed in range(seeds)
        for blocks in BLOCKS
        for load in LOADS
        for name in POLICIES
    ]


def study(trace: Path, seeds: int, jobs: int, tick: Tick, seconds: float | None = None) -> Findings:
    groups = grouped(run_all(cases(trace, seeds, seconds), jobs=jobs, tick=tick), _cell)
    workload = Recipe(str(trace), seconds=seconds).make(0)
    ceiling = workload.infinite_cache_hit_share
    tables = [
        table(title, blocks, key, groups)
        for blocks in BLOCKS
        for title, key in (
            (f"Mean TTFT in seconds, {blocks:,} blocks a pod", "ttft_mean"),
            (f"p99 TTFT in seconds, {blocks:,} blocks a pod", "ttft_p99"),
            (f"Prompt tokens cached, {blocks:,} blocks a pod", "hit_share"),
        )
    ]
    return Findings(
        title="Which pod: Picker and its peers on the conversation trace",
        facts=[
            f"Mooncake's conversation trace, {len(workload.arrivals):,} requests in "
            f"{workload.arrivals[-1].at:,.0f} s at load 1; 8 pods (Qwen3-32B on 2 H100, blocks of 512 tokens); "
            f"seeds: {seeds}; they move each arrival inside its recorded bin of 3 s and break ties; "
            "± is half of a 95 % confidence interval.",
            f"A cache without end would hold {ceiling:.1%} of the prompt tokens.",
        ],
        claims=[*claims(groups), _near_ceiling(groups, ceiling)],
        tables=tables,
        notes=[
            "The peers' policies are written from their documentation and see what their originals see; they have no"
            " queue of their own, and Picker's default policy has none either: this compares the choice alone.",
            "At load 3 the pods cannot keep up, so that waits are as long as the trace; longest-prefix sends nearly all"
            " to one pod, because most prompts share their first block.",
            "p99 of a quarter of an hour at load 1 is its 27th longest wait, mostly the prefill of one very long"
            " prompt: with one seed a difference of a few per cent there says nothing.",
            "The engine model was fitted to another workload (see the ladder): trust orders and ratios, not seconds.",
        ],
        charts=[
            chart
            for blocks in BLOCKS
            for chart in (
                (f"Mean TTFT, {blocks:,} blocks", _lines(groups, blocks, "ttft_mean", "seconds")),
                (f"p99 TTFT, {blocks:,} blocks", _lines(groups, blocks, "ttft_p99", "seconds")),
                (f"Cached, {blocks:,} blocks", _lines(groups, blocks, "hit_share", "part")),
            )
        ],
        data={
            "cells": [
                {"blocks": blocks, "load": load, "policy": name}
                | {key: FIGURES[key].estimate(results).mean for key in ("ttft_mean", "ttft_p99", "hit_share")}
                for (blocks, load, name), results in groups.items()
            ]
        },
    )


def table(title: str, blocks: int, key: str, groups: dict[Cell, list[Result]]) -> Table:
    """A row for each policy, a column for each load; the best of each column is marked."""
    figure = FIGURES[key]
    found = Table(title, ["policy", *(f"load {load:g}" for load in LOADS)])
    means = {name: [figure.estimate(groups[blocks, load, name]) for load in LOADS] for name in POLICIES}
    for name, estimates in means.items():
        found.rows.append(
            [
                name,
                *(
                    f"over {_HOPELESS_SECONDS:,.0f}"
                    if key != "hit_share" and each.mean > _HOPELESS_SECONDS
                    else each.text(figure.form)
                    for each in estimates
                ),
            ]
        )
    for column in range(len(LOADS)):
        values = [estimates[column].mean for estimates in means.values()]
        found.mark_lowest(column + 1, values if key != "hit_share" else [-value for value in values])
    return found


def claims(groups: dict[Cell, list[Result]]) -> list[Claim]:
    """Ours is the best at every load: one claim for each cache and figure, with the closest rival of all loads."""
    found = []
    for blocks in BLOCKS:
        for key, words in (("ttft_mean", "mean"), ("ttft_p99", "p99")):
            ratios = {load: _against_best(groups, blocks, load, key) for load in LOADS}
            worst = max(LOADS, key=lambda load: ratios[load][0])
            ratio, rival = ratios[worst]
            found.append(
                Claim(
                    f"with {blocks:,} blocks a pod Picker has the lowest {words} TTFT at every load",
                    f"closest at load {worst:g}: {ratio:.3f} of {rival}'s",
                    ratio < 1.0,
                )
            )
    return found


def _against_best(groups: dict[Cell, list[Result]], blocks: int, load: float, key: str) -> tuple[float, str]:
    """Our figure over that of the best peer, and who that is."""
    figure = FIGURES[key]
    peers = {name: figure.estimate(groups[blocks, load, name]).mean for name in POLICIES if name != CORE}
    rival = min(peers, key=lambda name: peers[name])
    return figure.estimate(groups[blocks, load, CORE]).mean / peers[rival], rival


def _near_ceiling(groups: dict[Cell, list[Result]], ceiling: float) -> Claim:
    hit = FIGURES["hit_share"].estimate(groups[4000, 1.0, CORE]).mean
    return Claim(
        f"with 4,000 blocks a pod at load 1, cached: at least {_CEILING_PART:.0%} of what a cache without end holds",
        f"{hit:.1%}, {hit / ceiling:.0%} of it",
        hit >= _CEILING_PART * ceiling,
    )


def _lines(groups: dict[Cell, list[Result]], blocks: int, key: str, unit: str) -> str:
    """Without those whose times would flatten all others."""
    figure = FIGURES[key]
    series: dict[str, Sequence[tuple[float, float]]] = {}
    for name in POLICIES:
        points = [(load, figure.estimate(groups[blocks, load, name]).mean) for load in LOADS[:-1]]
        if key == "hit_share" or max(value for _, value in points) < 60.0:
            series[name] = points
    return lines(series, "load", unit)


def _cell(case: Case) -> Cell:
    return case.cluster.blocks or 0, case.recipe.scale, case.contender
