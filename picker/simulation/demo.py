"""`picker demo`: weighted shares under contention, before your eyes, on this machine alone."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.live import Live
from rich.text import Text

from picker.simulation.demo_view import ClassFigures, Monitor
from picker.simulation.envoy import EnvoyUnavailable
from picker.simulation.local_cluster import LocalCluster, PickerFailed
from picker.simulation.mock_engine import MockEngineSettings
from picker.simulation.traffic import TrafficClass, TrafficClient, requests

_PODS = 4
_OPEN_PER_CLASS = 64
_REFRESH_SECONDS = 0.25
# The demo's tokenizer has 1,024 tokens.
_VOCABULARY = 1000
_MODEL = "tiny"
_WEIGHTS = {"premium": 4096, "standard": 1024}
_POLICY = """\
# Two families, one class each: premium is owed four times what standard gets, in uncached prompt tokens.
default_policy_family: standard
uncached_isl_buckets:
  - {min_tokens: 0, bucket: any}
policy_classes:
""" + "".join(
    f"  - {{name: {name}, policy_family: {name}, cache_bucket: any, quantum: {quantum},"
    " prefill_busy_threshold: 1024, max_running_per_worker: 8}\n"
    for name, quantum in _WEIGHTS.items()
)
_CLASSES = [
    TrafficClass(
        name,
        groups=8,
        prefix_tokens=768,
        tail_tokens=256,
        max_tokens=8,
        headers={"x-picker-policy-class": name},
    )
    for name in _WEIGHTS
]


def demo_command(
    duration: Annotated[float, typer.Option(help="Seconds of traffic.", min=1.0)] = 20.0,
    requests: Annotated[
        int | None, typer.Option(help="Stop after this many requests instead of by the clock.", min=1)
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Other prompts for another number.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Save the last view under load as an SVG picture.", dir_okay=False)
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Directory to leave Picker's settings, pool, policy and log in.", file_okay=False),
    ] = None,
) -> None:
    """Run the whole of it here, without a GPU or a cluster: four mock engines, Picker and a real Envoy.

    Two classes of traffic, premium and standard with quanta 4096 and 1024, each keep more requests open than the
    engines can take. Watch premium get 80 % of the uncached tokens while shared prefixes stay on the pods
    that hold them. While it runs, the printed curl line sends a request of your own.
    """
    console = Console(stderr=json_output, highlight=False)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    try:
        monitor, seconds = asyncio.run(
            _run(console, duration, requests, seed, keep, picture, live=not json_output)
        )
    except (EnvoyUnavailable, PickerFailed) as error:
        Console(stderr=True, highlight=False).print("[red]The demo could not start.[/]", Text(str(error)))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if json_output:
        print(json.dumps(monitor.as_json(seconds), indent=2))
    else:
        _summarize(console, monitor, seconds)
    if monitor.statuses and not monitor.answered:
        raise typer.Exit(1)


async def _run(
    console: Console,
    duration: float,
    total: int | None,
    seed: int,
    keep: Path | None,
    picture: Path | None,
    *,
    live: bool,
) -> tuple[Monitor, float]:
    engines = [
        MockEngineSettings(
            name=f"pod-{number}",
            model=_MODEL,
            prefill_rate=6000.0,
            iteration_time=0.01,
            num_blocks=4096,
            remember=0,
        )
        for number in range(_PODS)
    ]
    settings = {"policy": {"hints": {"policy_class": "accept"}}}
    async with contextlib.AsyncExitStack() as stack:
        with console.status("Starting four mock engines, Picker and Envoy"):
            cluster = await stack.enter_async_context(
                LocalCluster(engines, _POLICY, settings=settings, directory=keep)
            )
        monitor = Monitor(cluster.engines, {each.name: ClassFigures(each.name) for each in _CLASSES})
        title = _title(cluster)
        if live and not console.is_terminal:
            console.print(title, soft_wrap=True)
        view = Live(console=console, auto_refresh=False) if live and console.is_terminal else None
        seconds = await _send_and_watch(cluster, monitor, view, title, duration, total, seed, picture)
        return monitor, seconds


async def _send_and_watch(
    cluster: LocalCluster,
    monitor: Monitor,
    view: Live | None,
    title: Text,
    duration: float,
    total: int | None,
    seed: int,
    picture: Path | None,
) -> float:
    """Send the traffic, follow it to its end or to Ctrl-C, and return how long that took."""
    started = time.monotonic()
    async with TrafficClient(cluster.url, _MODEL) as client, aiohttp.ClientSession() as admin:
        sources = [(requests(each, _VOCABULARY, seed), _OPEN_PER_CLASS) for each in _CLASSES]
        traffic = asyncio.create_task(
            client.closed_loop(
                sources, monitor.take_record, duration=None if total else duration, total=total
            )
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, traffic.cancel)
        if view is not None:
            view.start()
        try:
            while not traffic.done():
                monitor.take_status(await _status(admin, cluster.admin_url))
                elapsed = time.monotonic() - started
                done = monitor.answered / total if total else elapsed / duration
                if picture is not None and done < 1.0:
                    _draw(picture, monitor, done)
                if view is not None:
                    view.update(monitor.render(title, done), refresh=True)
                await asyncio.wait({traffic}, timeout=_REFRESH_SECONDS)
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
            if view is not None:
                view.stop()
        if not traffic.cancelled():
            traffic.result()
    return time.monotonic() - started


async def _status(admin: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with admin.get(f"{url}/status") as response:
        response.raise_for_status()
        status: dict[str, Any] = await response.json()
        return status


def _draw(path: Path, monitor: Monitor, done: float) -> None:
    canvas = Console(record=True, width=82, file=io.StringIO(), force_terminal=True)
    canvas.print(monitor.render(Text("Picker between a real Envoy and four mock engines", "bold"), done))
    # Without the fonts that it would load from elsewhere.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    canvas.save_svg(str(path), title="picker demo", code_format=form)


def _title(cluster: LocalCluster) -> Text:
    body = json.dumps({"model": _MODEL, "prompt": "A short walk", "max_tokens": 8})
    words = [
        *("curl", f"{cluster.url}/v1/completions"),
        *("-H", "x-picker-policy-class: premium"),
        *("-d", body),
    ]
    return Text.assemble(
        ("Picker", "bold"),
        f" between Envoy at {cluster.url} and {_PODS} mock engines; dashboard at {cluster.admin_url}/\n",
        ("Try, while it runs: ", "dim"),
        _shell(words),
    )


def _shell(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _summarize(console: Console, monitor: Monitor, seconds: float) -> None:
    if not console.is_terminal:
        console.print(monitor.class_table())
        console.print(monitor.pod_table())
    console.print(
        f"{monitor.answered} requests answered in {seconds:.1f} s; "
        f"{monitor.hit_share:.0%} of the prompt tokens came from the pods' caches."
    )
    for figures in monitor.classes.values():
        if figures.share is None:
            console.print(f"{figures.name}: the classes never waited at the same time, so no share to show.")
        else:
            console.print(
                f"{figures.name}: owed {figures.weight_share:.1%} of the uncached tokens, got {figures.share:.1%}."
            )
    failures = {status: number for status, number in monitor.statuses.items() if status != "200"}
    if failures:
        print(f"Not answered with 200: {failures}", file=sys.stderr)
