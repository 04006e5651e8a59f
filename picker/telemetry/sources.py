"""What telemetry reads: the state of classes and endpoints, as plain values, at the moment it is asked for.

The rooms know nothing of metrics. They keep counters as plain numbers; whoever composes them hands over
functions that return these shapes, so that a gauge is never a copy that can drift from the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ClassStats:
    """One policy class. Tokens and costs are tokens of prefill; `oldest_wait` and `blocked` are seconds.

    `fill` is how much of the fullest of the class's queue limits is used (1: new requests are refused); None: it
    has no limit.
    """

    label: str
    quantum: int
    waiting_requests: int = 0
    waiting_tokens: int = 0
    waiting_cached_tokens: int = 0
    deficit: int = 0
    oldest_wait: float = 0.0
    fill: float | None = None
    dispatched_requests: int = 0
    dispatched_cost: int = 0
    cancelled: int = 0
    shared_lane: int = 0
    shared_tenant: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    blocked: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndpointStats:
    """One endpoint. None: not reported. `kv_usage` is 0..1, `report_age` is seconds since the last scrape.

    The last six are sums since it joined; both times to the first token are of the same `timed_requests`.
    """

    uid: str
    name: str
    address: str
    rank: int = 0
    ready: bool = True
    cordoned: bool = False
    taints: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    prefill_tokens: int = 0
    running: int = 0
    foreign: int = 0
    engine_running: int | None = None
    engine_waiting: int | None = None
    kv_usage: float | None = None
    cached_blocks: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    report_age: float | None = None
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    reported_cached_tokens: int = 0
    timed_requests: int = 0
    predicted_ttft: float = 0.0
    observed_ttft: float = 0.0


@dataclass(slots=True)
class Sources:
    """Where the numbers come from.

    `stats` holds the rooms' counter objects, or functions that give them, by the name that the catalogue gives the
    room; a room that is not there has no samples.
    """

    classes: Callable[[], Iterable[ClassStats]] = tuple
    endpoints: Callable[[], Iterable[EndpointStats]] = tuple
    synced: Callable[[], bool] = lambda: False
    stats: dict[str, Any] = field(default_factory=dict)
