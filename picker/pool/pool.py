"""The live endpoints, reconciled from a source, each with a slot that is its bit in every endpoint mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from heapq import heappop, heappush

from picker.pool.endpoint import Endpoint, EndpointSpec, EngineReport

# Names of LoRA adapters that are remembered.
_MAX_ADAPTERS = 4096


@dataclass(frozen=True, slots=True)
class PoolChange:
    """What one reconciliation did. `changed` endpoints kept their identity and slot but have a new spec; `shifted` ones
    have the old one, and may take other requests than before, by what was heard of them; `adapted` ones, which are told
    of alone, other LoRA adapters.
    """

    added: tuple[Endpoint, ...] = ()
    removed: tuple[Endpoint, ...] = ()
    changed: tuple[Endpoint, ...] = ()
    shifted: tuple[Endpoint, ...] = ()
    adapted: tuple[Endpoint, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.respecified or self.shifted or self.adapted)

    @property
    def respecified(self) -> bool:
        """Are there other endpoints, or other specs?"""
        return bool(self.added or self.removed or self.changed)


@dataclass(slots=True)
class PoolStats:
    """Counters since the start."""

    changes: int = 0
    over_limit: int = 0
    # Times that an endpoint became overloaded.
    overloads: int = 0


@dataclass(slots=True)
class Pool:
    """Endpoints by identity.

    `synced` is False until a source has spoken once: an empty pool is an answer, silence is not.
    Listeners hear of a removal before its slot can be given away, so that whatever they keep by slot is
    cleared first.
    """

    max_endpoints: int = 4096
    # Requests that wait inside an engine from which on it is passed over; None: however many.
    overload_waiting: int | None = None
    # vLLM's default, for endpoints that have not told theirs yet.
    default_block_size: int = 16
    synced: bool = False
    # They grow with what decides who may be chosen: all of that but the adapters in use, and those.
    version: int = 0
    adapters_version: int = 0
    stats: PoolStats = field(default_factory=PoolStats)
    _by_uid: dict[str, Endpoint] = field(default_factory=dict)
    _by_slot: list[Endpoint | None] = field(default_factory=list)
    _free_slots: list[int] = field(default_factory=list)
    _listeners: list[Callable[[PoolChange], None]] = field(default_factory=list)
    _block_sizes: dict[int, int] | None = None
    # Every LoRA adapter that an engine has named, the one named longest ago first.
    _adapters: dict[str, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._by_uid)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._by_uid.values())

    def get(self, uid: str) -> Endpoint | None:
        return self._by_uid.get(uid)

    def by_slot(self, slot: int) -> Endpoint | None:
        return self._by_slot[slot] if slot < len(self._by_slot) else None

    def in_mask(self, mask: int) -> list[Endpoint]:
        """The endpoints whose bits are set, by rising slot."""
        return [endpoint for endpoint in self._by_slot if endpoint is not None and endpoint.bit & mask]

    def subscribe(self, listener: Callable[[PoolChange], None]) -> None:
        self._listeners.append(listener)

    def replace(self, specs: Iterable[EndpointSpec]) -> PoolChange:
        """Make the pool equal to `specs`; the identity is the uid. Specs over the limit are left out."""
        wanted = {spec.uid: spec for spec in specs}
        if len(wanted) > self.max_endpoints:
            self.stats.over_limit += len(wanted) - self.max_endpoints
            wanted = dict(list(wanted.items())[: self.max_endpoints])
        removed = [endpoint for uid, endpoint in self._by_uid.items() if uid not in wanted]
        for endpoint in removed:
            del self._by_uid[endpoint.spec.uid]
            self._by_slot[endpoint.slot] = None
        added, changed = [], []
        for uid, spec in wanted.items():
            endpoint_now = self._by_uid.get(uid)
            if endpoint_now is None:
                added.append(self._add(spec))
            elif endpoint_now.spec != spec:
                endpoint_now.spec = spec
                changed.append(endpoint_now)
        change = PoolChange(tuple(added), tuple(removed), tuple(changed))
        first_sync, self.synced = not self.synced, True
        if change or first_sync:
            self._announce(change)
        for endpoint in removed:
            heappush(self._free_slots, endpoint.slot)
        return change

    def report(self, uid: str, report: EngineReport) -> Endpoint | None:
        """Take a scrape in. None when the endpoint has left meanwhile."""
        endpoint = self._by_uid.get(uid)
        if endpoint is None:
            return None
        before, endpoint.report = endpoint.report, report
        self._block_sizes = None
        overloaded, endpoint.overloaded = endpoint.overloaded, self._is_overloaded(endpoint, report)
        self.stats.overloads += endpoint.overloaded and not overloaded
        servable = (report.adapters, report.max_adapters)
        served = (before.adapters, before.max_adapters) if before else (frozenset(), None)
        if servable != served:
            self._remember(report.adapters)
            self._announce(PoolChange(adapted=(endpoint,)))
        if overloaded != endpoint.overloaded:
            self._announce(PoolChange(shifted=(endpoint,)))
        return endpoint

    def fence(self, uid: str, fenced: bool) -> None:
        """Take an endpoint out of every choice, or back in, whatever its source says of it."""
        endpoint = self._by_uid.get(uid)
        if endpoint is not None and endpoint.fenced != fenced:
            endpoint.fenced = fenced
            self._announce(PoolChange(shifted=(endpoint,)))

    @property
    def overloaded_mask(self) -> int:
        return sum(endpoint.bit for endpoint in self if endpoint.overloaded)

    def _is_overloaded(self, endpoint: Endpoint, report: EngineReport) -> bool:
        """From `overload_waiting` requests that wait inside it, until no more than half as many do. One that does not
        say how many wait is not.
        """
        limit, waiting = self.overload_waiting, report.waiting
        if limit is None or waiting is None:
            return False
        return waiting >= limit or (endpoint.overloaded and waiting > limit // 2)

    @property
    def stale_mask(self) -> int:
        return sum(endpoint.bit for endpoint in self if endpoint.stale)

    def mark_stale(self, uids: Collection[str]) -> None:
        """Say which endpoints are not heard any more; all others are."""
        changed = [endpoint for endpoint in self if endpoint.stale != (endpoint.spec.uid in uids)]
        for endpoint in changed:
            endpoint.stale = not endpoint.stale
            # Nobody knows any more.
            endpoint.overloaded = False
        if changed:
            self._announce(PoolChange(shifted=tuple(changed)))

    def adapters(self) -> KeysView[str]:
        """The models that engines have named as LoRA adapters of theirs. They name those that they run requests of;
        one that has none now has its blocks there all the same.
        """
        return self._adapters.keys()

    def _remember(self, adapters: frozenset[str]) -> None:
        for name in adapters:
            self._adapters.pop(name, None)
            self._adapters[name] = None
        while len(self._adapters) > _MAX_ADAPTERS:
            del self._adapters[next(iter(self._adapters))]

    def learn_block_size(self, endpoint: Endpoint, block_size: int) -> None:
        """KV events tell the size of the blocks that the engine really uses."""
        if endpoint.block_size_seen != block_size:
            endpoint.block_size_seen = block_size
            self._block_sizes = None

    def block_sizes(self) -> dict[int, int]:
        """The endpoints' masks by block size in tokens (mostly one entry)."""
        if self._block_sizes is None:
            masks: dict[int, int] = {}
            for endpoint in self:
                size = endpoint.block_size or self.default_block_size
                masks[size] = masks.get(size, 0) | endpoint.bit
            self._block_sizes = masks
        return self._block_sizes

    def _add(self, spec: EndpointSpec) -> Endpoint:
        if self._free_slots:
            slot = heappop(self._free_slots)
        else:
            slot = len(self._by_slot)
            self._by_slot.append(None)
        endpoint = Endpoint(slot, spec)
        self._by_slot[slot] = endpoint
        self._by_uid[spec.uid] = endpoint
        return endpoint

    def _announce(self, change: PoolChange) -> None:
        if change.adapted:
            self.adapters_version += 1
        else:
            self.version += 1
        self._block_sizes = None
        if self._adapters and not any(endpoint.loads_adapters for endpoint in self):
            # A model of such a name is a model now.
            self._adapters.clear()
        self.stats.changes += 1
        for listener in self._listeners:
            listener(change)
