"""A workload as a user asks for it: where its arrivals come from, and what is done to them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from picker.simulation.experiments.joining import flooded, in_classes, only, tenant_rates, with_tenants
from picker.simulation.workloads import (
    SharedPrefix,
    Workload,
    read_azure,
    read_lmcache,
    read_mooncake,
    read_recording,
    read_servegen,
    read_vtc,
)

GENERATOR = "shared-prefix"

# ServeGen's clients are a day of rates; its busiest hour begins here.
_SERVEGEN_HOUR = (14 * 3600.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`source` is a file (a trace or a recording) or `shared-prefix[:key=value,...]`.

    In this order: tenants are drawn by the rates of the file `tenants`; the tenants are shared out to `classes`
    where the requests name none; the rate becomes `scale` times as high; what arrives after `seconds` is left
    out; the class `flood[0]` asks `flood[1]` times as often; only the classes `only` are kept.
    """

    source: str
    tenants: Path | None = None
    classes: tuple[str, ...] = ()
    scale: float = 1.0
    seconds: float | None = None
    flood: tuple[str, int] | None = None
    only: tuple[str, ...] = ()

    def make(self, seed: int) -> Workload:
        """The arrivals of one seed. Raises ValueError or OSError that says what is wrong with the source."""
        workload = _read(self.source, seed)
        if self.tenants is not None:
            workload = with_tenants(workload, tenant_rates(self.tenants), seed=seed)
        if self.classes and not all(arrival.policy_class for arrival in workload.arrivals):
            workload = in_classes(workload, list(self.classes))
        if self.scale != 1.0:
            workload = workload.faster(self.scale)
        if self.seconds is not None:
            workload = workload.head(self.seconds)
        if self.flood is not None:
            workload = flooded(workload, *self.flood, seed=seed)
        if self.only:
            workload = only(workload, list(self.only))
        if not workload.arrivals:
            raise ValueError(f"{self.source}: no arrivals are left")
        return workload


@lru_cache(maxsize=2)
def _read(source: str, seed: int) -> Workload:
    name, _, options = source.partition(":")
    if name == GENERATOR:
        return _generate(options, seed)
    path = Path(source)
    return _reader_for(path)(path, seed)


def _generate(options: str, seed: int) -> Workload:
    """From `key=value,...`: the fields of SharedPrefix, and `rate` (20 requests/s) and `duration` (60 s)."""
    known = {entry.name for entry in fields(SharedPrefix)} - {"seed"}
    numbers: dict[str, float] = {"rate": 20.0, "duration": 60.0}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals or key not in known | set(numbers):
            raise ValueError(f"{GENERATOR} takes {', '.join(sorted(known | set(numbers)))}, not {option!r}")
        try:
            numbers[key] = float(value) if key in numbers else int(value)
        except ValueError:
            raise ValueError(f"{GENERATOR}: {key} must be a number, not {value!r}") from None
        if numbers[key] <= 0:
            raise ValueError(f"{GENERATOR}: {key} must be above 0")
    rate, duration = numbers.pop("rate"), numbers.pop("duration")
    shape: Mapping[str, int] = {key: int(value) for key, value in numbers.items()}
    return replace(SharedPrefix(seed=seed), **shape).stage(rate, duration)


def _reader_for(path: Path) -> Callable[[Path, int], Workload]:
    """Which trace a file is, by what it looks like inside."""
    if path.suffix == ".json":
        start, seconds = _SERVEGEN_HOUR
        return lambda path, seed: read_servegen(path, start=start, seconds=seconds, seed=seed)
    try:
        first = _first_line(path)
        if path.suffix == ".csv":
            columns = set(next(csv.reader([first])))
            return _by_fields(columns, {"TIMESTAMP": read_azure, "client": read_vtc})
        keys = set(json.loads(first))
        if "policy_class" in keys:
            return lambda path, seed: read_recording(path)
        if "offset_ms" in keys:
            return lambda path, seed: read_lmcache(path)
        if "hash_ids" in keys:
            return lambda path, seed: read_mooncake(path, seed=seed)
    except (StopIteration, TypeError, UnicodeDecodeError, ValueError):
        pass
    raise ValueError(
        f"{path}: not a recording, nor one of the traces that are known (Mooncake, Azure, VTC, ServeGen, LMCache)"
    )


def _by_fields(
    columns: set[str], readers: Mapping[str, Callable[[Path], Workload]]
) -> Callable[[Path, int], Workload]:
    reader = next(reader for column, reader in readers.items() if column in columns)
    return lambda path, seed: reader(path)


def _first_line(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.readline()
    with path.open(encoding="utf-8") as file:
        return file.readline()
