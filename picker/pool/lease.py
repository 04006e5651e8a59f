"""Leader election by a coordination.k8s.io Lease.

The rules are those of client-go: a lease is taken over only when this process has itself watched it go unrenewed
for its whole duration (nobody's clock is compared with another's), and a leader that cannot renew steps down
after `renew_deadline`, before anybody else may step up.

`kubernetes.aio.leaderelection` is not used: one hanging request keeps its leader in office past the lease, it
goes by the wall clock, and it does not give the lease back on shutdown.
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
    """Seconds. A hand-over after a crash takes up to `duration` plus `retry_period`, after a release one retry."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration > self.renew_deadline > self.retry_period > 0:
            raise ValueError("a lease needs duration > renew_deadline > retry_period > 0")


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
        self._renewed_at: float | None = None

    def leads(self, now: float) -> bool:
        return self.time_left(now) > 0.0

    def time_left(self, now: float) -> float:
        """Seconds for which this candidate still leads if it does not renew; 0 if it does not lead."""
        if self._renewed_at is None:
            return 0.0
        return max(0.0, self._renewed_at + self._settings.renew_deadline - now)

    def observe(self, lease: Mapping[str, Any] | None, now: float) -> None:
        """The lease as it is at the server; None when there is none."""
        if lease is None or self._lease is None or _renewal(lease) != _renewal(self._lease):
            self._changed_at = now
        self._lease = lease
        self.holder = str(_spec(lease).get("holderIdentity") or "")
        if self.holder != self.identity:
            self._renewed_at = None

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
        self._renewed_at = sent_at

    def release(self, wall: datetime) -> dict[str, Any]:
        """The lease to write in order to give it back; this candidate no longer leads."""
        self._renewed_at = None
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

    `on_started_leading` and `on_stopped_leading` are called in turn, from the event loop. The second comes at
    the latest when the renew deadline passes, however the API server hangs.
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
                await asyncio.sleep(self._pause())
                # The deadline may have passed in the meantime.
                self._announce()
        finally:
            await self._resign()

    async def _try(self) -> None:
        patience = self._election.time_left(self._clock()) or self.settings.renew_deadline
        try:
            async with asyncio.timeout(patience):
                await self._claim(patience)
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
        leads = self._election.leads(self._clock())
        if leads and not self.stats.leading:
            self.stats.leading = True
            self.stats.started += 1
            _log.info("leading, by lease %s", self._path)
            self._on_started()
        elif not leads and self.stats.leading:
            self.stats.leading = False
            self.stats.stopped += 1
            _log.warning("no longer leading, by lease %s", self._path)
            self._on_stopped()

    def _pause(self) -> float:
        pause = self.settings.retry_period * random.uniform(0.8, 1.0)
        return min(pause, self._election.time_left(self._clock()) or pause)

    async def _resign(self) -> None:
        if not self._election.leads(self._clock()):
            self._announce()
            return
        lease = self._election.release(datetime.now(UTC))
        self._announce()
        try:
            timeout = min(_RESIGN_TIMEOUT, self.settings.renew_deadline)
            await self._api.request("PUT", self._path, body=lease, timeout=timeout)
        except ApiError as error:
            self._failed(f"could not be given back: {error}")


def _spec(lease: Mapping[str, Any] | None) -> Mapping[str, Any]:
    spec = lease.get("spec") if lease is not None else None
    return spec if isinstance(spec, dict) else {}


def _renewal(lease: Mapping[str, Any]) -> tuple[object, object]:
    spec = _spec(lease)
    return spec.get("holderIdentity"), spec.get("renewTime")


def _stamp(wall: datetime) -> str:
    """As Kubernetes' MicroTime."""
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
