"""Everything that one picker does at the API server: it follows its InferencePool and, if asked, runs for the Lease."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from picker.policy.rewrites import ModelRewrites
from picker.pool.endpoint import EndpointSpec
from picker.pool.kube.api import KubeApi
from picker.pool.kube.leader_mark import LeaderMark
from picker.pool.kube.pod_table import PodDefaults
from picker.pool.kube.source import KubernetesSource
from picker.pool.kube.watch import WatchSettings
from picker.pool.lease import LeaderElector, LeaseSettings


@dataclass(frozen=True, slots=True)
class Membership:
    """Which pool, and how it is followed. `lease` None: no election. `namespace` None: the pod's own.

    `pod` is that of this picker, to be marked while it leads; None: nothing is marked.
    """

    pool: str
    namespace: str | None = None
    pod: str | None = None
    node_taints: bool = False
    defaults: PodDefaults = field(default_factory=PodDefaults)
    watch: WatchSettings = field(default_factory=WatchSettings)
    lease: LeaseSettings | None = None


class PoolMember:
    """One picker of a pool. `run` until cancelled; `resign` when it should serve no more but go on knowing.

    A follower follows the pool just as the leader does, so that its KV index is warm when it takes over.
    """

    def __init__(
        self,
        api: KubeApi,
        membership: Membership,
        *,
        on_specs: Callable[[list[EndpointSpec]], object],
        on_priorities: Callable[[Mapping[str, int]], object],
        on_rewrites: Callable[[ModelRewrites], object],
        on_leading: Callable[[bool], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        namespace = membership.namespace or own_namespace()
        self._api = api
        self.source = KubernetesSource(
            api,
            namespace,
            membership.pool,
            on_specs,
            on_priorities=on_priorities,
            on_rewrites=on_rewrites,
            watch_nodes=membership.node_taints,
            defaults=membership.defaults,
            settings=membership.watch,
            clock=clock,
        )
        self.elector: LeaderElector | None = None
        self._mark: LeaderMark | None = None
        self._on_leading = on_leading
        if membership.lease is not None:
            if membership.pod is not None:
                self._mark = LeaderMark(api, namespace, membership.pod)
            self.elector = LeaderElector(
                api,
                namespace,
                f"picker-{membership.pool}",
                # A pod is named by its host name; a restarted container is another candidate.
                f"{socket.gethostname()}_{uuid4().hex[:8]}",
                on_started_leading=lambda: self._leads(True),
                on_stopped_leading=lambda: self._leads(False),
                settings=membership.lease,
                clock=clock,
            )
        self._candidacy: asyncio.Task[None] | None = None
        self._marking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            if self._mark is not None:
                # Before anything that makes it ready: a restarted container finds the mark of its predecessor.
                await self._mark.write()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.source.run())
                if self._mark is not None:
                    self._marking = group.create_task(self._mark.run())
                if self.elector is not None:
                    self._candidacy = group.create_task(self.elector.run())
        finally:
            await self._api.close()

    def resign(self) -> None:
        """Give the lease back now, if this picker has it, and do not run for it again.

        The mark stays: proxies that still send to a pod that ends have nobody else until another is marked.
        """
        for task in (self._marking, self._candidacy):
            if task is not None:
                task.cancel()

    def _leads(self, leads: bool) -> None:
        if self._mark is not None:
            self._mark.set(leads)
        self._on_leading(leads)


def own_namespace() -> str:
    """The namespace of the pod that this process runs in, else `default`."""
    mounted = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return mounted.read_text().strip() if mounted.exists() else "default"
