"""Marks the pod of the picker that leads, so that a Service can select it.

Pickers that follow are as ready as their Deployment can want: so a rolling update waits for each new one and goes no
further past one that fails. Who of them gets the requests is for the mark to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from picker.pool.kube.api import KubeApi
from picker.pool.kube.errors import ApiError

_log = logging.getLogger(__name__)

LEADER_LABEL = "picker.dev/leader"
# A ReplicaSet that shrinks deletes the pods of lower cost first: a rolling update moves the leadership only once.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

_REQUEST_TIMEOUT = 5.0
_FIRST_BACKOFF = 0.2
_MAX_BACKOFF = 5.0
# The mark is written again after so many seconds, in case somebody has changed it.
_AGAIN = 60.0


class LeaderMark:
    """Keeps one pod's mark as it should be, through every fault of the API server.

    It is written through the pod's subresource `status`: who may patch only that cannot change what runs in a pod.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        pod: str,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"
        self._sleep = sleep
        self._leads = False
        self._changed = asyncio.Event()

    def set(self, leads: bool) -> None:
        """What `run` is to write from now on."""
        self._leads = leads
        self._changed.set()

    async def write(self) -> None:
        """Return once the server has taken the mark as it should be now."""
        failures = 0
        while True:
            try:
                await self._api.request(
                    "PATCH",
                    self._path,
                    body=_patch(self._leads),
                    content_type="application/merge-patch+json",
                    timeout=_REQUEST_TIMEOUT,
                )
                return
            except ApiError as error:
                failures += 1
                if failures in (1, 10) or failures % 100 == 0:
                    _log.warning("%s cannot be marked: %s (failure %d in a row)", self._path, error, failures)
                if error.status == 401:
                    await self._api.refresh()
                await self._sleep(min(_FIRST_BACKOFF * 2.0 ** min(failures, 16), _MAX_BACKOFF))

    async def run(self) -> None:
        """Follow `set` until cancelled, which leaves the mark as it is."""
        while True:
            self._changed.clear()
            await self.write()
            try:
                async with asyncio.timeout(_AGAIN):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _patch(leads: bool) -> dict[str, object]:
    """As a merge patch, in which null removes."""
    return {
        "metadata": {
            "labels": {LEADER_LABEL: "true" if leads else None},
            "annotations": {DELETION_COST: "1" if leads else None},
        }
    }
