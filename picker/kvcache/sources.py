"""The engines that Picker listens to, kept equal to the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import zmq

from picker.kvcache.discovery import EventAddresses
from picker.kvcache.engine_blocks import BlockLimits, BlockStats, EngineBlocks
from picker.kvcache.index import KvIndex
from picker.kvcache.pump import Pump, Turnstile
from picker.kvcache.stream import EventStream, StreamLimits, StreamStats
from picker.kvcache.subscriber import KvSubscriber, SubscriberLimits

log = logging.getLogger(__name__)

# Engines that keep each block once, in a tree. The others count copies.
_SINGLE_COPY_ENGINES = frozenset({"sglang"})


class Spec(Protocol):
    """What a source of events needs to know of an endpoint; the pool's EndpointSpec has it."""

    @property
    def uid(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def kv_events(self) -> str | None: ...
    @property
    def kv_replay(self) -> str | None: ...


class Endpoint(Protocol):
    @property
    def slot(self) -> int: ...
    @property
    def spec(self) -> Spec: ...


E = TypeVar("E", bound=Endpoint)


@dataclass(frozen=True, slots=True)
class KvEventLimits:
    """Bounds per endpoint, and on the replays that run at the same time over all of them."""

    subscriber: SubscriberLimits = field(default_factory=SubscriberLimits)
    stream: StreamLimits = field(default_factory=StreamLimits)
    blocks: BlockLimits = field(default_factory=BlockLimits)
    concurrent_replays: int = 8


@dataclass(slots=True)
class SourceStats:
    """Monotonic counters."""

    opened: int = 0
    closed: int = 0
    bad_addresses: int = 0


@dataclass(frozen=True, slots=True)
class _Source:
    slot: int
    addresses: EventAddresses
    blocks: EngineBlocks
    subscriber: KvSubscriber


class KvEvents(Generic[E]):
    """A subscriber for each endpoint that publishes KV events, at the address that its spec gives or, where it
    gives none, that the engine has told.

    Lives on one event loop. `on_block_size` is told what size an endpoint's events show its blocks to have.
    The counters of all endpoints are added up, and stay when an endpoint goes.
    """

    def __init__(
        self,
        index: KvIndex,
        *,
        on_block_size: Callable[[E, int], None] | None = None,
        limits: KvEventLimits = KvEventLimits(),
    ) -> None:
        self.stats = SourceStats()
        self.stream_stats = StreamStats()
        self.block_stats = BlockStats()
        self._index = index
        self._on_block_size = on_block_size
        self._limits = limits
        self._pump = Pump()
        self._turns = Turnstile(limits.concurrent_replays)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._endpoints: dict[str, E] = {}
        self._told: dict[str, EventAddresses] = {}
        self._sources: dict[str, _Source] = {}
        self._unusable: dict[str, str] = {}  # uid -> the address that was refused

    def __len__(self) -> int:
        """Subscribers open."""
        return len(self._sources)

    @property
    def connected(self) -> int:
        """Mask of the slots whose engines are connected. What the index says of the others is old or nothing."""
        mask = 0
        for source in self._sources.values():
            if source.subscriber.connected:
                mask |= 1 << source.slot
        return mask

    def is_connected(self, uid: str) -> bool:
        """Do this endpoint's events come?"""
        source = self._sources.get(uid)
        return source is not None and source.subscriber.connected

    def addresses(self) -> list[str]:
        """Where the open subscribers listen, ports that ZMQ chose included."""
        return [source.subscriber.address for source in self._sources.values()]

    def reconcile(self, endpoints: Iterable[E]) -> None:
        """Follow exactly these endpoints. Must be told of a removal before the slot is given to another one."""
        self._endpoints = {endpoint.spec.uid: endpoint for endpoint in endpoints}
        self._told = {uid: told for uid, told in self._told.items() if uid in self._endpoints}
        self._unusable = {uid: events for uid, events in self._unusable.items() if uid in self._endpoints}
        for uid in [uid for uid in self._sources if uid not in self._endpoints]:
            self._close(uid)
        # Slots that are given up must be clear before others take them.
        changed = [uid for uid, endpoint in self._endpoints.items() if self._give_up(uid, endpoint)]
        for uid in changed:
            self._take_up(uid, self._endpoints[uid])

    def told(self, uid: str, addresses: EventAddresses | None) -> None:
        """An engine says where it publishes its events, or that it does not. Its spec goes before what it says."""
        endpoint = self._endpoints.get(uid)
        if endpoint is None:
            return
        if addresses is None:
            self._told.pop(uid, None)
        else:
            self._told[uid] = addresses
        if self._give_up(uid, endpoint):
            self._take_up(uid, endpoint)

    def close(self) -> None:
        """Close every subscriber."""
        for uid in list(self._sources):
            self._close(uid)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _addresses(self, endpoint: E) -> EventAddresses | None:
        spec = endpoint.spec
        if spec.kv_events:
            return EventAddresses(spec.kv_events, spec.kv_replay or None)
        return self._told.get(spec.uid)

    def _give_up(self, uid: str, endpoint: E) -> bool:
        """Close a subscriber that follows the wrong address. False where what is open is as it should be."""
        source = self._sources.get(uid)
        if source is not None:
            if (source.slot, source.addresses) == (endpoint.slot, self._addresses(endpoint)):
                return False
            self._close(uid)
        return True

    def _take_up(self, uid: str, endpoint: E) -> None:
        addresses = self._addresses(endpoint)
        if addresses is not None and self._unusable.get(uid) != addresses.events:
            self._open(uid, endpoint, addresses)

    def _open(self, uid: str, endpoint: E, addresses: EventAddresses) -> None:
        learn = self._on_block_size
        blocks = EngineBlocks(
            endpoint.slot,
            self._index,
            counted=endpoint.spec.engine not in _SINGLE_COPY_ENGINES,
            limits=self._limits.blocks,
            stats=self.block_stats,
            on_block_size=None if learn is None else lambda size: learn(endpoint, size),
        )
        stream = EventStream(
            blocks,
            can_replay=addresses.replay is not None,
            limits=self._limits.stream,
            stats=self.stream_stats,
        )
        if self._context is None:
            self._context = zmq.Context()
        try:
            subscriber = KvSubscriber(
                stream,
                addresses.events,
                addresses.replay,
                context=self._context,
                pump=self._pump,
                replay_turns=self._turns,
                limits=self._limits.subscriber,
            )
        except zmq.ZMQError as error:
            self.stats.bad_addresses += 1
            self._unusable[uid] = addresses.events
            log.error(
                "no KV events from %s: cannot use the address %s: %s",
                endpoint.spec.name,
                addresses.events,
                error,
            )
            return
        self.stats.opened += 1
        self._sources[uid] = _Source(endpoint.slot, addresses, blocks, subscriber)

    def _close(self, uid: str) -> None:
        source = self._sources.pop(uid)
        source.subscriber.close()
        source.blocks.close()
        self.stats.closed += 1
