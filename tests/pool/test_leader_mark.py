"""The mark on the pod of the picker that leads, by which its Service finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from picker.pool.kube.leader_mark import DELETION_COST, LEADER_LABEL
from picker.pool.kube.membership import Membership, PoolMember
from picker.pool.lease import LeaseSettings
from tests.pool.fake_kube import LEASES, PODS, POOLS, FakeKube, Json, connect, pod, pool, refuse
from tests.pool.waiting import until

LEASE = LeaseSettings(duration=1.0, retry_period=0.01, request_timeout=0.4)
OWN = "picker-0"

Start = Callable[[], Awaitable["Picker"]]


class Picker:
    """One pool member in a pod of its own."""

    def __init__(self) -> None:
        self.synced = False
        self.leads = False

    async def start(self, kube: FakeKube, directory: Path) -> None:
        self._api, _ = await connect(kube, directory)
        self.member = PoolMember(
            self._api,
            Membership("pool", "default", pod=OWN, lease=LEASE),
            on_specs=lambda specs: setattr(self, "synced", True),
            on_priorities=lambda priorities: None,
            on_rewrites=lambda rewrites: None,
            on_leading=lambda leads: setattr(self, "leads", leads),
        )
        self._task = asyncio.create_task(self.member.run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def start(kube: FakeKube, tmp_path: Path) -> AsyncIterator[Start]:
    kube.serve(LEASES)
    kube.put(POOLS, pool())
    kube.put(PODS, own_pod())
    pickers: list[Picker] = []

    async def start() -> Picker:
        picker = Picker()
        pickers.append(picker)
        await picker.start(kube, tmp_path)
        return picker

    yield start
    for picker in pickers:
        await picker.stop()


def own_pod(**labels: str) -> Json:
    return pod(OWN, labels={"app": "picker", **labels}, annotations={"mine": "stays"})


def marked(kube: FakeKube) -> bool:
    metadata = kube.get(PODS, OWN)["metadata"]
    assert metadata["labels"]["app"] == "picker"
    assert metadata["annotations"]["mine"] == "stays"
    has = metadata["labels"].get(LEADER_LABEL) == "true"
    assert (metadata["annotations"].get(DELETION_COST) == "1") is has
    return has


async def test_the_leader_is_marked_and_who_loses_the_lease_is_not(kube: FakeKube, start: Start) -> None:
    picker = await start()
    await until(lambda: marked(kube))
    assert picker.leads
    another = {"holderIdentity": "another", "leaseDurationSeconds": 60, "renewTime": "now"}
    kube.put(LEASES, {"metadata": {"name": "picker-pool"}, "spec": another})
    await until(lambda: not marked(kube))
    assert not picker.leads


async def test_the_mark_of_a_predecessor_goes_before_the_pool_is_read(kube: FakeKube, start: Start) -> None:
    """A container that is restarted in its pod must not be ready, and selected, without leading."""
    kube.put(PODS, own_pod(**{LEADER_LABEL: "true"}))
    kube.put(
        LEASES,
        {"metadata": {"name": "picker-pool"}, "spec": {"holderIdentity": "b", "leaseDurationSeconds": 60}},
    )
    path = f"{PODS}/{OWN}/status"
    kube.fail_next("PATCH", path, refuse(503), refuse(500))
    picker = await start()
    await until(lambda: kube.count("PATCH", path) == 2)
    assert (picker.synced, kube.count("LIST", PODS)) == (False, 0)
    await until(lambda: picker.synced)
    assert LEADER_LABEL not in kube.get(PODS, OWN)["metadata"]["labels"]


async def test_a_leader_that_stops_keeps_its_mark_and_gives_up_its_lease(
    kube: FakeKube, start: Start
) -> None:
    """Proxies go on sending to a pod that ends as long as there is no other."""
    picker = await start()
    await until(lambda: marked(kube))
    picker.member.resign()
    await until(lambda: kube.get(LEASES, "picker-pool")["spec"]["holderIdentity"] == "")
    assert not picker.leads
    await picker.stop()
    assert marked(kube)
