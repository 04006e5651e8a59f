"""Runs the watches that make a pool: the InferencePool, its pods, their nodes, the objectives, and the rewrites."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from picker.policy.rewrites import ModelRewrites
from picker.pool.endpoint import EndpointSpec
from picker.pool.kube.api import KubeApi
from picker.pool.kube.pod_table import KubeObject, PodDefaults, PodTable, PoolShape
from picker.pool.kube.rewrites import GROUP as REWRITE_GROUP
from picker.pool.kube.rewrites import RewriteSink
from picker.pool.kube.watch import Change, WatchLoop, WatchSettings, WatchStats

_log = logging.getLogger(__name__)

POOL_GROUP = "inference.networking.k8s.io"
# An objective of the first group hides its namesake of the second, older one.
OBJECTIVE_GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")


@dataclass(slots=True)
class KubeStats:
    """What holds now, and what the watches have counted together."""

    watches: WatchStats = field(default_factory=WatchStats)
    synced: bool = False
    # Seconds since the server last showed that the state is current, of the watch where that is longest ago;
    # None before the first list. Up to three quarters of `WatchSettings.silence` is normal in a quiet cluster.
    last_sync_age: float | None = None
    # Pods' annotations that cannot be read; the defaults hold in their stead.
    bad_annotations: int = 0


class KubernetesSource:
    """Follows one InferencePool and hands on its endpoints.

    `on_specs(specs)` has every endpoint each time that one changes, first when everything needed has been
    listed. `on_priorities(priorities)` has the priority of every InferenceObjective of the pool, by name, and
    `on_rewrites(rewrites)` the rules of its InferenceModelRewrites.
    While the API server is away nothing is called, and what was last said holds. Nodes are watched only on
    request: reading them takes a ClusterRole.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        pool: str,
        on_specs: Callable[[list[EndpointSpec]], object],
        *,
        on_priorities: Callable[[Mapping[str, int]], object] | None = None,
        on_rewrites: Callable[[ModelRewrites], object] | None = None,
        watch_nodes: bool = False,
        defaults: PodDefaults | None = None,
        settings: WatchSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = PodTable(defaults or PodDefaults())
        self._api = api
        self._namespace = namespace
        self._pool = pool
        self._on_specs = on_specs
        self._settings = settings or WatchSettings()
        self._clock = clock
        self._stats = KubeStats()
        self._published = False
        # The pods that serve; and those that an edited selector selects, until they have been listed.
        self._pods: _Selection | None = None
        self._coming: _Selection | None = None
        pools = f"/apis/{POOL_GROUP}/v1/namespaces/{namespace}/inferencepools"
        by_name = (("fieldSelector", f"metadata.name={pool}"),)
        self._pool_loop = self._loop(pools, _PoolSink(self, pool), selector=by_name)
        self._nodes_loop = (
            self._loop("/api/v1/nodes", _NodeSink(self), optional=True) if watch_nodes else None
        )
        self._objectives = _Objectives(pool, on_priorities)
        self._objective_loops = [
            self._loop(
                f"/apis/{group}/v1alpha2/namespaces/{namespace}/inferenceobjectives",
                _ObjectiveSink(self._objectives, group),
                optional=True,
            )
            for group in OBJECTIVE_GROUPS
            if on_priorities is not None
        ]
        self._rewrites_loop = (
            self._loop(
                f"/apis/{REWRITE_GROUP}/v1alpha2/namespaces/{namespace}/inferencemodelrewrites",
                RewriteSink(pool, on_rewrites),
                optional=True,
            )
            if on_rewrites is not None
            else None
        )

    @property
    def synced(self) -> bool:
        """Whether the pool has been complete once; it stays so while the API server is away."""
        return self._published

    @property
    def stats(self) -> KubeStats:
        heard = [loop.heard_at for loop in self._needed() if loop is not None and loop.heard_at is not None]
        self._stats.synced = self.synced
        self._stats.last_sync_age = self._clock() - min(heard) if heard else None
        self._stats.bad_annotations = len(self.table.problems())
        return self._stats

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for loop in (
                self._pool_loop,
                self._nodes_loop,
                *self._objective_loops,
                self._rewrites_loop,
            ):
                if loop is not None:
                    self._tasks.create_task(loop.run())

    def shape_changed(self, shape: PoolShape | None) -> None:
        """The pool was created, edited or deleted.

        The pods of another selector have to be listed first. Until they are, those of the old one are followed and
        serve as before: an edit must not refuse everybody who waits.
        """
        if shape is None:
            self._drop(self._pods)
            self._pods = None
        if shape is None or (self._pods is not None and self._pods.shape.selector == shape.selector):
            self._drop(self._coming)
            self._coming = None
            if self.table.set_pool(shape):
                self.changed()
        elif self._coming is not None and self._coming.shape.selector == shape.selector:
            self._coming.shape = shape
        else:
            self._drop(self._coming)
            self._coming = self._follow(shape)

    def changed(self) -> None:
        """Hand the endpoints on, once there is nothing left to wait for."""
        if self._published or self._complete():
            self._published = True
            self._on_specs(self.table.specs())

    def listed(self, changed: bool) -> None:
        """A list is complete: it matters if it changed something, or if it was the last one missing."""
        if changed or not self._published:
            self.changed()

    def pods_listed(self, selection: _Selection, pods: list[KubeObject]) -> None:
        """All pods of a selection; if it was the coming one, it now takes the place of the old one."""
        changed = False
        if selection is self._coming:
            self._drop(self._pods)
            self._pods, self._coming = selection, None
            changed = self.table.set_pool(selection.shape)
        changed |= self.table.replace_pods(pods)
        self.listed(changed)

    def _needed(self) -> list[WatchLoop | None]:
        """The watches without which there are no endpoints; None: there is no such watch yet."""
        pods = self._pods.loop if self._pods is not None else None
        return [self._pool_loop, pods, *([self._nodes_loop] if self._nodes_loop else [])]

    def _complete(self) -> bool:
        return all(loop is not None and loop.synced for loop in self._needed())

    def _follow(self, shape: PoolShape) -> _Selection:
        labels = ",".join(f"{key}={value}" for key, value in shape.selector.match_labels)
        selection = _Selection(shape)
        selection.loop = self._loop(
            f"/api/v1/namespaces/{self._namespace}/pods",
            _PodSink(self, selection),
            selector=(("labelSelector", labels),),
        )
        selection.task = self._tasks.create_task(selection.loop.run())
        return selection

    def _drop(self, selection: _Selection | None) -> None:
        if selection is not None:
            selection.task.cancel()

    def _loop(
        self,
        path: str,
        sink: _PoolSink | _PodSink | _NodeSink | _ObjectiveSink | RewriteSink,
        *,
        selector: tuple[tuple[str, str], ...] = (),
        optional: bool = False,
    ) -> WatchLoop:
        return WatchLoop(
            self._api,
            path,
            sink,
            selector=selector,
            optional=optional,
            settings=self._settings,
            clock=self._clock,
            stats=self._stats.watches,
        )


class _PoolSink:
    """The one pool among those that the server sends."""

    def __init__(self, source: KubernetesSource, name: str) -> None:
        self._source = source
        self._name = name

    def replace(self, objects: list[KubeObject]) -> None:
        found = [item for item in objects if _name(item) == self._name]
        if found:
            self._take(found[0])
        else:
            _log.warning("there is no InferencePool %s", self._name)
            self._source.shape_changed(None)

    def apply(self, change: Change, item: KubeObject) -> None:
        if _name(item) != self._name:
            return
        if change is Change.DELETED:
            _log.warning("the InferencePool %s was deleted", self._name)
            self._source.shape_changed(None)
        else:
            self._take(item)

    def _take(self, item: KubeObject) -> None:
        try:
            self._source.shape_changed(PoolShape.read(item))
        except ValueError as error:
            _log.error("InferencePool %s is not usable and the last good one stays: %s", self._name, error)


@dataclass(slots=True, eq=False)
class _Selection:
    """The pods that one selector selects, as they are followed."""

    shape: PoolShape
    loop: WatchLoop = field(init=False)
    task: asyncio.Task[None] = field(init=False)


class _PodSink:
    def __init__(self, source: KubernetesSource, selection: _Selection) -> None:
        self._source = source
        self._selection = selection

    def replace(self, objects: list[KubeObject]) -> None:
        self._source.pods_listed(self._selection, objects)

    def apply(self, change: Change, item: KubeObject) -> None:
        table = self._source.table
        if table.delete_pod(item) if change is Change.DELETED else table.put_pod(item):
            self._source.changed()


class _NodeSink:
    def __init__(self, source: KubernetesSource) -> None:
        self._source = source

    def replace(self, objects: list[KubeObject]) -> None:
        self._source.listed(self._source.table.replace_nodes(objects))

    def apply(self, change: Change, item: KubeObject) -> None:
        table = self._source.table
        if table.delete_node(item) if change is Change.DELETED else table.put_node(item):
            self._source.changed()


class _Objectives:
    """The priorities of the pool's objectives, of both API groups."""

    def __init__(self, pool: str, on_priorities: Callable[[Mapping[str, int]], object] | None) -> None:
        self._pool = pool
        self._on_priorities = on_priorities
        self._by_group: dict[str, dict[str, int]] = {group: {} for group in OBJECTIVE_GROUPS}
        self._last: dict[str, int] = {}

    def replace(self, group: str, objects: list[KubeObject]) -> None:
        self._by_group[group] = {_name(item): _priority(item) for item in objects if self._is_ours(item)}
        self._publish()

    def apply(self, group: str, change: Change, item: KubeObject) -> None:
        if change is not Change.DELETED and self._is_ours(item):
            self._by_group[group][_name(item)] = _priority(item)
        else:
            self._by_group[group].pop(_name(item), None)
        self._publish()

    def _is_ours(self, item: KubeObject) -> bool:
        spec = item.get("spec")
        reference = spec.get("poolRef") if isinstance(spec, dict) else None
        return isinstance(reference, dict) and reference.get("name") == self._pool

    def _publish(self) -> None:
        merged: dict[str, int] = {}
        for group in reversed(OBJECTIVE_GROUPS):
            merged |= self._by_group[group]
        if merged != self._last and self._on_priorities is not None:
            self._last = merged
            self._on_priorities(dict(merged))


class _ObjectiveSink:
    def __init__(self, objectives: _Objectives, group: str) -> None:
        self._objectives = objectives
        self._group = group

    def replace(self, objects: list[KubeObject]) -> None:
        self._objectives.replace(self._group, objects)

    def apply(self, change: Change, item: KubeObject) -> None:
        self._objectives.apply(self._group, change, item)


def _name(item: KubeObject) -> str:
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _priority(item: KubeObject) -> int:
    """Unset counts as 0, as the API defines it."""
    spec = item.get("spec")
    priority = spec.get("priority") if isinstance(spec, dict) else None
    return priority if type(priority) is int else 0
