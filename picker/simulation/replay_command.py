"""`picker replay`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from picker.simulation.traffic import Record, Request, Result, TrafficClient, percentile
from picker.simulation.workloads import Arrival, Workload, read_recording


def replay_command(
    recording: Annotated[
        Path,
        typer.Argument(
            help="File of `picker record`, or written under telemetry.record_file.",
            exists=True,
            dir_okay=False,
        ),
    ],
    url: Annotated[str, typer.Option(help="The gateway.")],
    model: Annotated[str, typer.Option(help="The model to ask for.")],
    speed: Annotated[float, typer.Option(help="How many times as fast as recorded.", min=0.001)] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="Only what arrives before, in recorded time.", min=0.0)
    ] = None,
    vocabulary: Annotated[
        int, typer.Option(help="Prompts are made of token ids from 2 up to below this.", min=4)
    ] = 1000,
    class_header: Annotated[
        str, typer.Option(help="Header that says the policy class.")
    ] = "x-picker-policy-class",
    tenant_header: Annotated[str, typer.Option(help="Header that says the tenant.")] = "x-picker-tenant",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send the requests of a recording to a live gateway, each at its time.

    Prompts are token ids made up anew: as long as the recorded ones, and equal where those were equal, so that caches
    work as they did. An open loop: a request goes out when it is due, however many are still open, and its time
    to the first token counts from then. Exit code 1 when none was answered.

        picker replay arrivals.jsonl --url http://localhost:8080 --model tiny --speed 2
    """
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{url!r} does not begin with http:// or https://", param_hint="--url")
    try:
        workload = read_recording(recording)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="recording") from None
    if seconds is not None:
        workload = workload.head(seconds)
    headers = Headers(class_header.lower(), tenant_header.lower())
    result = asyncio.run(_replay(workload.faster(speed), url, model, vocabulary, headers))
    if as_json:
        typer.echo(json.dumps(summary(result)))
    else:
        Console().print(_table(summary(result)))
    if not any(record.ok for record in result.records):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Headers:
    """Names of the headers by which a request says its class and its tenant."""

    policy_class: str
    tenant: str


def requests_of(workload: Workload, vocabulary: int, headers: Headers) -> Iterator[tuple[float, Request]]:
    """When and what to send. Blocks of one hash are the same tokens; what no hash covers is the request's own."""
    own = random.Random(0)
    for arrival in workload.arrivals:
        prompt = [token for key in arrival.blocks for token in _tokens(key, workload.block_size, vocabulary)][
            : arrival.prompt_tokens
        ]
        prompt += own.choices(range(2, vocabulary), k=arrival.prompt_tokens - len(prompt))
        yield (
            arrival.at,
            Request(arrival.policy_class, prompt, arrival.output_tokens, True, _headers_of(arrival, headers)),
        )


def summary(result: Result) -> dict[str, Any]:
    """By class: requests, how they ended, and times to the first token in seconds."""
    classes = sorted({record.traffic_class for record in result.records})
    return {
        "seconds": result.ended - result.started,
        "hit_share": result.hit_share,
        "classes": {name: _of_class(result.of(name)) for name in classes},
    }


async def _replay(workload: Workload, url: str, model: str, vocabulary: int, headers: Headers) -> Result:
    async with TrafficClient(url.rstrip("/"), model) as client:
        return await client.open_loop(requests_of(workload, vocabulary, headers))


def _tokens(key: int, count: int, vocabulary: int) -> list[int]:
    return random.Random(key).choices(range(2, vocabulary), k=count)


def _headers_of(arrival: Arrival, headers: Headers) -> dict[str, str]:
    given = {headers.policy_class: arrival.policy_class, headers.tenant: arrival.tenant}
    return {name: value for name, value in given.items() if value}


def _of_class(records: list[Record]) -> dict[str, Any]:
    times = [record.ttft for record in records if record.ok and record.ttft is not None]
    return {
        "requests": len(records),
        "answered": sum(record.ok for record in records),
        "statuses": Result(records).statuses,
        "ttft_p50": percentile(times, 0.5),
        "ttft_p99": percentile(times, 0.99),
    }


def _table(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"{found['seconds']:.1f} s, {found['hit_share']:.0%} of the prompt tokens cached",
        title_justify="left",
        box=None,
        header_style="dim",
    )
    table.add_column("class", no_wrap=True)
    for name in ("requests", "answered", "TTFT p50", "TTFT p99"):
        table.add_column(name, justify="right")
    table.add_column("how they ended")
    for name, each in found["classes"].items():
        table.add_row(
            name,
            f"{each['requests']:,}",
            f"{each['answered']:,}",
            *(f"{each[key]:.3f} s" if each[key] is not None else "-" for key in ("ttft_p50", "ttft_p99")),
            ", ".join(f"{status}: {count:,}" for status, count in sorted(each["statuses"].items())),
        )
    return table
