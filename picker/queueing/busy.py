"""Which endpoints are busy for a class: the gate between waiting and going."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from picker.policy.model import PolicyClass
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Load


@dataclass(slots=True, eq=False)
class BusyGate:
    """The busy endpoints by one set of thresholds, as a mask kept up to date one endpoint at a time.

    `full` are those at their running limit: a busy endpoint may still be the best choice for a request that
    can go, a full one may not. Without any threshold nobody is ever busy.

    Endpoints that became free are remembered, so that a class can ask later which did since it last looked;
    thus a completion costs nothing for the classes that nobody looks at.
    """

    thresholds: PolicyClass
    busy: int = 0
    full: int = 0
    # How many have become free since the start: now, for `freed_since`.
    mark: int = 0
    _freed: list[int] = field(default_factory=list)

    _REMEMBERED: ClassVar[int] = 1024

    def update(self, endpoint: Endpoint, load: Load) -> None:
        """Look at one endpoint whose load, report or spec has changed."""
        bit = endpoint.bit
        limit = self.thresholds.max_running_per_worker
        full = limit is not None and load.running + load.foreign >= limit
        busy = full or self._is_busy(endpoint, load)
        self.full = self.full | bit if full else self.full & ~bit
        if busy:
            self.busy |= bit
        elif self.busy & bit:
            self.busy &= ~bit
            self.mark += 1
            self._freed.append(bit)
            if len(self._freed) > self._REMEMBERED:
                self._freed.clear()

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left; its slot will be another's."""
        self.busy &= ~endpoint.bit
        self.full &= ~endpoint.bit

    def freed_since(self, mark: int) -> int:
        """The endpoints that became free since a mark, as a mask; all (-1) when that was too long ago."""
        freed = self.mark - mark
        if freed > len(self._freed):
            return -1
        mask = 0
        for bit in self._freed[-freed:] if freed else ():
            mask |= bit
        return mask

    def _is_busy(self, endpoint: Endpoint, load: Load) -> bool:
        prefill_limit = self.thresholds.prefill_limit(endpoint.spec.max_num_batched_tokens)
        if prefill_limit is not None and load.prefill_tokens > prefill_limit:
            return True
        usage_limit = self.thresholds.kv_usage_busy_threshold
        usage = endpoint.report.kv_usage if endpoint.report else None
        return usage_limit is not None and usage is not None and usage > usage_limit


@dataclass(slots=True)
class BusyGates:
    """One gate for each distinct set of thresholds, shared by the classes that have it."""

    all: list[BusyGate] = field(default_factory=list)
    _by_thresholds: dict[tuple[float | None, ...], BusyGate] = field(default_factory=dict)

    def of(self, policy_class: PolicyClass) -> BusyGate:
        key = (
            policy_class.prefill_busy_threshold,
            policy_class.prefill_busy_threshold_frac,
            policy_class.max_running_per_worker,
            policy_class.kv_usage_busy_threshold,
        )
        gate = self._by_thresholds.get(key)
        if gate is None:
            gate = self._by_thresholds[key] = BusyGate(policy_class)
            self.all.append(gate)
        return gate

    def saturated(self, everybody: int) -> bool:
        """Is every endpoint busy for every class?"""
        busy = everybody
        for gate in self.all:
            busy &= gate.busy
        return busy == everybody
