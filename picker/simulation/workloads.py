"""Workloads for the simulator: public traces read into arrivals, and generated ones.

None of the traces is part of this project; `picker/simulation/README.md` says where each comes from.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """One request to come, equal only to itself. `at` is seconds from the start; lengths are in tokens.

    `blocks` are the keys of the prompt's full blocks, chained: equal keys mean equal prompts up to there.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    tenant: str = ""
    policy_class: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time, and the tokens in each of their blocks."""

    name: str
    block_size: int
    arrivals: Sequence[Arrival] = field(repr=False)

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def infinite_cache_hit_share(self) -> float:
        """The part of all prompt tokens that a cache without end would hold: the bound of every policy."""
        seen: set[int] = set()
        hits = 0
        for arrival in self.arrivals:
            usable = (arrival.prompt_tokens - 1) // self.block_size
            matched = itertools.takewhile(seen.__contains__, itertools.islice(arrival.blocks, usable))
            hits += sum(1 for _ in matched) * self.block_size
            seen.update(arrival.blocks)
        return hits / self.prompt_tokens if self.arrivals else 0.0

    def head(self, seconds: float) -> Workload:
        """What arrives before `seconds`."""
        return replace(self, arrivals=[arrival for arrival in self.arrivals if arrival.at < seconds])

    def faster(self, factor: float) -> Workload:
        """The same arrivals at `factor` times the rate."""
        return replace(self, arrivals=[replace(arrival, at=arrival.at / factor) for arrival in self.arrivals])


def read_mooncake(path: Path, *, seed: int = 0, bin_seconds: float = 3.0) -> Workload:
    """Mooncake's conversation trace: JSON lines with `hash_ids`, one for each 512 tokens, chained.

    Its timestamps sit in bins of about 3 s; each arrival is moved to a random place in its bin.
    """
    source = random.Random(seed)
    block_size = 512
    arrivals = []
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            full = record["input_length"] // block_size
            arrivals.append(
                Arrival(
                    at=record["timestamp"] / 1000 + source.uniform(0.0, bin_seconds),
                    prompt_tokens=record["input_length"],
                    output_tokens=max(1, record["output_length"]),
                    blocks=record["hash_ids"][:full],
                )
            )
    return _sorted("mooncake-conversation", block_size, arrivals)


def read_recording(path: Path) -> Workload:
    """What a Picker with `telemetry.record_file` has seen, served or refused. Raises ValueError for other files."""
    arrivals = []
    block_size = 0
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                block_size = block_size or record["block_size"]
                arrivals.append(
                    Arrival(
                        at=record["timestamp"] / 1000,
                        prompt_tokens=max(1, record["input_length"]),
                        output_tokens=max(1, record["output_length"]),
                        blocks=record["hash_ids"],
                        tenant=record["tenant"],
                        policy_class=record["policy_class"],
                    )
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: not a line of a recording: {error!r}") from None
    start = min((arrival.at for arrival in arrivals), default=0.0)
    return _sorted(
        path.stem, block_size or 1, [replace(arrival, at=arrival.at - start) for arrival in arrivals]
    )


def read_azure(path: Path) -> Workload:
    """Azure's LLM inference trace: a CSV of times and lengths. It has no prefixes and no tenants."""
    arrivals = []
    start: datetime | None = None
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            # Seven decimals: one more than datetime takes.
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            arrivals.append(
                Arrival(
                    (when - start).total_seconds(),
                    max(1, int(row["ContextTokens"])),
                    max(1, int(row["GeneratedTokens"])),
                )
            )
    return _sorted("azure-conversation", 64, arrivals)


def read_vtc(path: Path) -> Workload:
    """The 27 clients of the VTC paper's arena trace: a CSV with a client column, which becomes the tenant."""
    with path.open(newline="") as file:
        arrivals = [
            Arrival(
                float(row["arrival_s"]),
                max(1, int(row["prompt_len"])),
                max(1, int(row["output_len"])),
                tenant=f"client-{row['client']}",
            )
            for row in csv.DictReader(file)
        ]
    return _sorted("vtc-arena", 64, arrivals)


def read_lmcache(path: Path) -> Workload:
    """LMCache's agent sessions: gzipped JSON lines, `hash_ids` of about 16 tokens each, growing prefixes."""
    block_size = 16
    arrivals = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            record = json.loads(line)
            # Lengths are estimates: the prompt has at least the tokens of its blocks.
            length = max(1, record["input_length_est"], len(record["hash_ids"]) * block_size)
            arrivals.append(
                Arrival(
                    at=record["offset_ms"] / 1000,
                    prompt_tokens=length,
                    output_tokens=max(1, record["output_length_est"]),
                    blocks=record["hash_ids"],
                    tenant=record["session"],
                )
            )
    return _sorted("lmcache-agents", block_size, arrivals)


def read_servegen(path: Path, *, start: float, seconds: float, scale: float = 1.0, seed: int = 0) -> Workload:
    """ServeGen's clients: per client, rates and burstiness in windows of 600 s, and quantiles of lengths.

    `start` (seconds into the day) and `seconds` choose the part to generate, `scale` multiplies all rates.
    Arrivals are drawn with gamma-distributed gaps of the recorded rate and coefficient of variation.
    """
    source = random.Random(seed)
    arrivals: list[Arrival] = []
    for client in json.loads(path.read_text()):
        arrivals += _servegen_client(client, start, seconds, scale, source)
    return _sorted("servegen", 64, arrivals)


def _servegen_client(
    client: Mapping[str, Any], start: float, seconds: float, scale: float, source: random.Random
) -> Iterator[Arrival]:
    window = 600.0
    for begins in range(int(start // window) * int(window), math.ceil(start + seconds), int(window)):
        rate, variation, *_ = client["windows_600s"].get(str(begins), (0.0, 1.0))
        lengths = _lengths_at(client["lengths_6h_quantiles_0_2pct_steps"], begins)
        if rate <= 0 or lengths is None:
            continue
        shape = 1.0 / max(variation, 0.05) ** 2
        at = begins + source.gammavariate(shape, 1.0 / (shape * rate * scale))
        while at < begins + window:
            if start <= at < start + seconds:
                yield Arrival(
                    at - start,
                    max(1, round(_quantile(lengths[0], source.random()))),
                    max(1, round(_quantile(lengths[1], source.random()))),
                    tenant=f"client-{client['client']}",
                )
            at += source.gammavariate(shape, 1.0 / (shape * rate * scale))


def _lengths_at(
    periods: Mapping[str, Mapping[str, Sequence[float]]], at: float
) -> tuple[Sequence[float], Sequence[float]] | None:
    """The quantiles of input and output of the last period that has begun by `at`, else of the first."""
    begun = [start for start in periods if float(start) <= at] or list(periods)[:1]
    if not begun:
        return None
    lengths = periods[max(begun, key=float)]
    return lengths["in_q"], lengths["out_q"]


def _quantile(points: Sequence[float], fraction: float) -> float:
    """Linear between evenly spaced quantiles."""
    place = fraction * (len(points) - 1)
    low = min(int(place), len(points) - 2)
    return points[low] + (points[low + 1] - points[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """inference-perf's `shared_prefix` data: groups with a system prompt each, and questions to it.

    The prompts are shuffled once and then sent round and round. By default the workload of llm-d's published
    ladder: 150 groups of 5 questions, 6,000 + 1,200 tokens in, 1,000 out.
    """

    groups: int = 150
    prompts_per_group: int = 5
    system_tokens: int = 6000
    question_tokens: int = 1200
    output_tokens: int = 1000
    block_size: int = 64
    seed: int = 0

    def prompts(self) -> list[Sequence[int]]:
        """The block keys of each distinct prompt, in the order in which they are sent."""
        system = self.system_tokens // self.block_size
        total = (self.system_tokens + self.question_tokens) // self.block_size
        keys = itertools.count(1)
        prompts: list[Sequence[int]] = []
        for _ in range(self.groups):
            shared = list(itertools.islice(keys, system))
            prompts.extend(
                [*shared, *itertools.islice(keys, total - system)] for _ in range(self.prompts_per_group)
            )
        random.Random(self.seed).shuffle(prompts)
        return prompts

    def stage(self, rate: float, seconds: float, *, first: int = 0) -> Workload:
        """`rate` requests a second for `seconds`, Poisson; `first` is the place in the round of prompts."""
        prompts = self.prompts()
        source = random.Random(f"{self.seed}/{rate}/{first}")
        # As many requests as the stage has on average: throughput is then comparable between seeds.
        times = sorted(source.uniform(0.0, seconds) for _ in range(round(rate * seconds)))
        length = self.system_tokens + self.question_tokens
        arrivals = [
            Arrival(at, length, self.output_tokens, prompts[(first + index) % len(prompts)])
            for index, at in enumerate(times)
        ]
        return Workload(f"shared-prefix-{rate:g}", self.block_size, arrivals)


def _sorted(name: str, block_size: int, arrivals: list[Arrival]) -> Workload:
    return Workload(name, block_size, sorted(arrivals, key=lambda arrival: arrival.at))
