"""Tenants, classes and floods put onto a workload that has none. Whoever shows a figure of one has to say so."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from picker.simulation.workloads import Arrival, Workload

# Keys of copies lie beyond any that a trace or a generator uses.
_COPY = 1 << 56


def tenant_rates(path: Path) -> dict[str, float]:
    """How often each client asks, relative to the others: from ServeGen's clients (JSON: the mean of their windows)
    or from a CSV with a column `client`. Raises ValueError for other files.
    """
    try:
        if path.suffix == ".json":
            return {
                f"client-{client['client']}": sum(rate for rate, *_ in client["windows_600s"].values())
                for client in json.loads(path.read_text())
            }
        with path.open(newline="") as file:
            counted = Counter(f"client-{row['client']}" for row in csv.DictReader(file))
        return {name: float(count) for name, count in counted.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: neither ServeGen's clients nor a CSV with clients: {error!r}") from None


def with_tenants(workload: Workload, rates: Mapping[str, float], *, seed: int = 0) -> Workload:
    """Give each prefix tree of a workload to one tenant, drawn by the rates."""
    source = Random(seed)
    names, weights = list(rates), list(rates.values())
    owners: dict[int, str] = {}
    arrivals = []
    for arrival in workload.arrivals:
        root = _root(arrival)
        tenant = owners.get(root) if root is not None else None
        if tenant is None:
            tenant = source.choices(names, weights)[0]
            if root is not None:
                owners[root] = tenant
        arrivals.append(replace(arrival, tenant=tenant))
    return replace(workload, name=f"{workload.name}+tenants", arrivals=arrivals)


def in_classes(workload: Workload, names: list[str]) -> Workload:
    """Give each tenant to one class, so that the classes ask for about the same number of tokens.

    Where nobody has a tenant each prefix tree counts as one, and a request without blocks as well. The largest are
    given away first, each to the class that has the least by then.
    """
    owners = [_owner(arrival, number) for number, arrival in enumerate(workload.arrivals)]
    asked: defaultdict[str | int, int] = defaultdict(int)
    for owner, arrival in zip(owners, workload.arrivals, strict=True):
        asked[owner] += arrival.prompt_tokens
    given = dict.fromkeys(names, 0)
    class_of: dict[str | int, str] = {}
    for owner, tokens in sorted(asked.items(), key=lambda item: -item[1]):
        class_of[owner] = least = min(names, key=lambda name: given[name])
        given[least] += tokens
    arrivals = [
        replace(arrival, policy_class=class_of[owner])
        for owner, arrival in zip(owners, workload.arrivals, strict=True)
    ]
    return replace(workload, arrivals=arrivals)


def flooded(workload: Workload, name: str, factor: int, *, seed: int = 0, spread: float = 60.0) -> Workload:
    """One class asks `factor` times as often: each of its requests has copies within `spread` seconds of it.

    The copies of one number are a population of their own: alike among themselves as the originals are (but for the
    first block, which nearly all share), and unlike them.
    """
    source = Random(f"{seed}/flood")
    arrivals = list(workload.arrivals)
    for copy in range(1, factor):
        for arrival in workload.arrivals:
            if arrival.policy_class == name:
                shared, own = arrival.blocks[:1], arrival.blocks[1:]
                arrivals.append(
                    replace(
                        arrival,
                        at=max(0.0, arrival.at + source.uniform(-spread, spread)),
                        blocks=[*shared, *(key + copy * _COPY for key in own)],
                        tenant=f"{arrival.tenant}/{copy}",
                    )
                )
    arrivals.sort(key=lambda arrival: arrival.at)
    return replace(workload, name=f"{workload.name}+flood", arrivals=arrivals)


def only(workload: Workload, names: list[str]) -> Workload:
    """The requests of these classes."""
    kept = [arrival for arrival in workload.arrivals if arrival.policy_class in names]
    return replace(workload, arrivals=kept)


def _owner(arrival: Arrival, number: int) -> str | int:
    if arrival.tenant:
        return arrival.tenant
    root = _root(arrival)
    return f"request {number}" if root is None else root


def _root(arrival: Arrival) -> int | None:
    """What a prefix tree shares: its second block (in the conversation trace nearly all share the first)."""
    return arrival.blocks[min(1, len(arrival.blocks) - 1)] if arrival.blocks else None
