"""What a pool is made of: endpoints, what their sources say of them, and what their engines report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from picker.policy.constraints import Taint


class EngineKind(StrEnum):
    """The serving engine behind an endpoint; decides metric names and event layouts."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One endpoint as its source (static file or Kubernetes) describes it.

    `uid` is the identity: a replaced pod has a new uid even at the same address. With data parallelism each
    (pod, rank) is an endpoint of its own and `uid` names both. Addresses are bare (no brackets), ports are
    1..65535. `metrics_url` None: not scraped. `kv_events` None: the engine may be asked where it publishes its KV
    events, or, with `ask_kv_events` False, is known to publish none: predictions only.
    """

    uid: str
    name: str
    address: str
    port: int
    rank: int = 0
    # Several ranks behind one port: the engine must be told which one is meant.
    shares_port: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    ready: bool = True
    cordoned: bool = False
    engine: EngineKind = EngineKind.VLLM
    metrics_url: str | None = None
    kv_events: str | None = None
    ask_kv_events: bool = True
    kv_replay: str | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    models: frozenset[str] = frozenset()
    # `ip:port`, IPv6 in brackets: the form of the destination header.
    authority: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        host = f"[{self.address}]" if ":" in self.address else self.address
        object.__setattr__(self, "authority", f"{host}:{self.port}")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One scrape of an engine's metrics. None means not reported or not a number, never zero.

    `at` is on the clock of the caller (seconds); `kv_usage` is a fraction 0..1 of blocks held by requests. The last
    four count from the engine's start: tokens looked up in its cache and found there, and the seconds between two
    tokens of an answer, with how many of such gaps there were.
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    adapters: frozenset[str] = frozenset()
    max_adapters: int | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    inter_token_seconds: float | None = None
    inter_tokens: float | None = None


class Endpoint:
    """One live endpoint. Its slot is its bit in every endpoint mask until the endpoint leaves the pool.

    `spec` and `report` are replaced whole by the pool; everything else that changes lives in the ledger.
    """

    __slots__ = ("bit", "block_size_seen", "fenced", "overloaded", "report", "slot", "spec", "stale")

    def __init__(self, slot: int, spec: EndpointSpec) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.spec = spec
        self.report: EngineReport | None = None
        # Taken out by the operator until that is lifted.
        self.fenced = False
        # By its own report so many requests wait inside it that it is passed over while others are not.
        self.overloaded = False
        # Its metrics have not been heard for a while: perhaps it is gone. Passed over while others are heard.
        self.stale = False
        # Learned from KV events: the truth, where there is one.
        self.block_size_seen: int | None = None

    @property
    def block_size(self) -> int | None:
        """Tokens in a KV block: from events, else from the scrape, else as configured."""
        reported = self.report.block_size if self.report else None
        return self.block_size_seen or reported or self.spec.block_size

    @property
    def loads_adapters(self) -> bool:
        """Does its engine serve LoRA adapters at all, by its own report?"""
        return self.report is not None and self.report.max_adapters is not None

    def __repr__(self) -> str:
        return f"Endpoint({self.spec.name} at {self.spec.authority}, slot {self.slot})"
