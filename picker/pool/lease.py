"""Leader election by a coordination.k8s.io Lease.

A lease is taken over as in client-go: only when this process has itself watched it go unrenewed for its whole
duration, so that nobody's clock is compared with another's. Unlike there, a leader that cannot renew stays in office
until it has seen another holder. While the API server is away nobody can take over, and a picker that stops would
leave no one to decide; a leader that alone is cut off from it shares the load with its successor until it is back,
which costs the exactness of shares and no request.

`kubernetes.aio.leaderelection` is not used: one hanging request holds up every renewal, it goes by the wall clock, and
it does not give the lease back on shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from picker.pool.kube.errors import ApiError

if TYPE_CHECKING:
    from picker.pool.kube.api import KubeApi

_log = logging.getLogger(__name__)

# Seconds that a shutdown may spend on giving the lease back; if it fails, the lease runs out by itself.
_RESIGN_TIMEOUT = 2.0


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Seconds. A hand-over after a crash takes up to `duration` plus `retry_period`, after a release one retry.

    `request_timeout` is for each call; a lease must outlast one that fails and the next.
    """

    duration: float = 15.0
    retry_period: float = 2.0
    request_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not self.duration > 2 * self.request_timeout + self.retry_period:
            raise ValueError("a lease needs duration > 2 * request_timeout + retry_period")


class Election:
    """One candidate's view of the lease. No I/O: leases as the API gives them in, leases to write out.

    `now` is on any steady clock, in seconds.
    """

    def __init__(self, name: str, namespace: str, identity: str, settings: LeaseSettings) -> None:
        self.identity = identity
        self.holder = ""
        self._metadata = {"name": name, "namespace": namespace}
        self._settings = settings
        self._lease: Mapping[str, Any] | None = None
        # When the lease was last seen to change.
        self._changed_at = 0.0
        # The server has taken its claim, and no other holder has been seen since.
        self.leads = False

    def observe(self, lease: Mapping[str, Any] | None, now: float) -> None:
        """The lease as it is at the server; None when there is none."""
        if lease is None or self._lease is None or _renewal(lease) != _renewal(self._lease):
            self._changed_at = now
        self._lease = lease
        self.holder = str(_spec(lease).get("holderIdentity") or "")
        if self.holder != self.identity:
            self.leads = False

    def claim(self, now: float, wall: datetime) -> dict[str, Any] | None:
        """The lease to write in order to take or keep it; None while another holds it."""
        spec = _spec(self._lease)
        if self.holder not in ("", self.identity) and now < self._changed_at + self._length(spec):
            return None
        stamp = _stamp(wall)
        keeps = self.holder == self.identity
        transitions = spec.get("leaseTransitions")
        return self._write(
            holderIdentity=self.identity,
            leaseDurationSeconds=max(1, round(self._settings.duration)),
            acquireTime=spec.get("acquireTime") if keeps else stamp,
            renewTime=stamp,
            leaseTransitions=(transitions if type(transitions) is int else 0) + (not keeps),
        )

    def claimed(self, lease: Mapping[str, Any], sent_at: float) -> None:
        """The server took the claim that was sent at `sent_at`."""
        self.observe(lease, sent_at)
        self.leads = True

    def release(self, wall: datetime) -> dict[str, Any]:
        """The lease to write in order to give it back; this candidate no longer leads."""
        self.leads = False
        spec = {
            **_spec(self._lease),
            "holderIdentity": "",
            "leaseDurationSeconds": 1,
            "renewTime": _stamp(wall),
        }
        return self._write(**spec)

    def _write(self, **spec: object) -> dict[str, Any]:
        metadata: Mapping[str, Any] = self._metadata
        if self._lease is not None:
            metadata = self._lease.get("metadata") or self._metadata
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": dict(metadata),
            "spec": spec,
        }

    def _length(self, spec: Mapping[str, Any]) -> float:
        """The holder's own word on how long its lease is."""
        seconds = spec.get("leaseDurationSeconds")
        return float(seconds) if type(seconds) is int and seconds > 0 else self._settings.duration


@dataclass(slots=True)
class LeaseStats:
    """`leading` now; the rest since the start."""

    leading: bool = False
    started: int = 0
    stopped: int = 0
    failures: int = 0


class LeaderElector:
    """Runs for office until cancelled, then gives the lease back.

    `on_started_leading` and `on_stopped_leading` are called in turn, from the event loop.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str,
        identity: str,
        *,
        on_started_leading: Callable[[], object],
        on_stopped_leading: Callable[[], object],
        settings: LeaseSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or LeaseSettings()
        self.stats = LeaseStats()
        self._api = api
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._election = Election(name, namespace, identity, self.settings)
        self._on_started = on_started_leading
        self._on_stopped = on_stopped_leading
        self._clock = clock

    @property
    def leading(self) -> bool:
        return self.stats.leading

    @property
    def holder(self) -> str:
        """Who held the lease when it was last seen; empty for nobody."""
        return self._election.holder

    async def run(self) -> None:
        try:
            while True:
                await self._try()
                self._announce()
                await asyncio.sleep(self.settings.retry_period * random.uniform(0.8, 1.0))
        finally:
            await self._resign()

    async def _try(self) -> None:
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                await self._claim(self.settings.request_timeout)
        except TimeoutError:
            self._failed("no answer in time")
        except ApiError as error:
            if error.status == 401:
                await self._api.refresh()
            # A conflict is another candidate's success, not a fault.
            if error.status != 409:
                self._failed(str(error))

    async def _claim(self, timeout: float) -> None:
        lease: Mapping[str, Any] | None = None
        try:
            lease = await self._api.request("GET", self._path, timeout=timeout)
        except ApiError as error:
            if error.status != 404:
                raise
        now = self._clock()
        self._election.observe(lease, now)
        claim = self._election.claim(now, datetime.now(UTC))
        if claim is not None:
            method, path = ("POST", self._collection) if lease is None else ("PUT", self._path)
            written = await self._api.request(method, path, body=claim, timeout=timeout)
            self._election.claimed(written, now)

    def _failed(self, problem: str) -> None:
        self.stats.failures += 1
        _log.warning("lease %s: %s", self._path, problem)

    def _announce(self) -> None:
        leads = self._election.leads
        if leads and not self.stats.leading:
            self.stats.leading = True
            self.stats.started += 1
            _log.info("leading, by lease %s", self._path)
            self._on_started()
        elif not leads and self.stats.leading:
            self.stats.leading = False
            self.stats.stopped += 1
            _log.warning("no longer leading: lease %s is held by %r", self._path, self.holder)
            self._on_stopped()

    async def _resign(self) -> None:
        if not self._election.leads:
            return
        lease = self._election.release(datetime.now(UTC))
        self._announce()
        try:
            async with asyncio.timeout(_RESIGN_TIMEOUT):
                await self._give_back(lease)
        except TimeoutError:
            self._failed("could not be given back: no answer in time")
        except ApiError as error:
            self._failed(f"could not be given back: {error}")

    async def _give_back(self, lease: dict[str, Any]) -> None:
        """A renewal that was on its way when the end came may have changed the lease since it was last seen."""
        while True:
            try:
                await self._api.request("PUT", self._path, body=lease, timeout=_RESIGN_TIMEOUT)
                return
            except ApiError as error:
                if error.status != 409:
                    raise
            now = await self._api.request("GET", self._path, timeout=_RESIGN_TIMEOUT)
            self._election.observe(now, self._clock())
            if self.holder != self._election.identity:
                return
            lease = self._election.release(datetime.now(UTC))


def _spec(lease: Mapping[str, Any] | None) -> Mapping[str, Any]:
    spec = lease.get("spec") if lease is not None else None
    return spec if isinstance(spec, dict) else {}


def _renewal(lease: Mapping[str, Any]) -> tuple[object, object]:
    spec = _spec(lease)
    return spec.get("holderIdentity"), spec.get("renewTime")


def _stamp(wall: datetime) -> str:
    """As Kubernetes' MicroTime."""
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
