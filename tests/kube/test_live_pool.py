"""What happens to pods, the pool and the API server, and where requests then go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kube.control_plane import ControlPlane
from tests.kube.live import PATIENCE, POOL, Live, Wire, health, living

pytestmark = [pytest.mark.kube, pytest.mark.e2e]

ELECTION = {"leader_election": True, "lease": {"duration": 3, "retry_period": 0.3, "request_timeout": 1}}


@pytest.fixture
async def live(cluster: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Live]:
    async with living(cluster, namespace, tmp_path) as live:
        yield live


async def test_requests_follow_the_pods(live: Live) -> None:
    for name in ("a", "b"):
        await live.engine(name)
    await live.engine("a-second", port=0)
    other_port = int(live.engines["a-second"].addresses.http.rpartition(":")[2])
    await live.pool()
    await live.access()
    await live.pod("a")
    picker = await live.picker()
    await live.await_ready(picker)
    load = await live.envoy(picker.ports["extproc"])
    await load.served_by("a")

    async with load.running(clients=2):
        await live.pod("b")
        await load.served_by("a", "b")
        for _ in range(3):
            await live.set_ready("a", False)
            await live.set_ready("a", True)
        await live.set_ready("a", False)
        await load.served_by("b")
        await live.set_ready("a", True)
        await load.served_by("a", "b")
        await live.annotate("a", taints="maintenance=yes:NoSchedule")
        await load.served_by("b")
        await live.annotate("a", taints=None)
        await load.served_by("a", "b")
        await live.label("b", app="something-else")
        await load.served_by("a")
        await live.label("b", app="vllm")
        await load.served_by("a", "b")
        await live.delete("b")
        await load.served_by("a")
        # A replacement under the same name is another pod.
        await live.pod("b")
        await load.served_by("a", "b")
    assert load.statuses() == {200: len(load.answers)}

    # The pool's ports change: at this one there is an engine for the third pod only.
    await live.pod("a-second")
    for name in ("a", "b"):
        await live.delete(name)
    await live.pool([other_port])
    await load.served_by("a-second")
    await live.delete("a-second")
    await load.served_by("503")
    assert await live.ready(picker), "an empty pool is in sync"


async def test_the_last_good_state_serves_while_the_api_server_is_away(live: Live) -> None:
    for name in ("a", "b"):
        await live.engine(name)
    await live.pool()
    await live.access(None, "--set=leaderElection.enabled=true,inferencePool.name=vllm")
    await live.pod("a")
    picker = await live.picker(pool={"kubernetes": ELECTION})
    await live.await_ready(picker)
    load = await live.envoy(picker.ports["extproc"])
    await load.served_by("a")

    async with load.running(clients=2):
        live.cluster.kill_api_server()
        # Longer than the lease: nobody else has it, so its holder goes on.
        await asyncio.sleep(5)
        assert await live.ready(picker)
        assert await live.metric(picker, "picker_leader") == 1
        assert await live.metric(picker, "picker_kube_last_sync_age_seconds") > 4
        await asyncio.to_thread(live.cluster.restart_api_server)
        await live.pod("b")
        await load.served_by("a", "b")
        assert await live.ready(picker)
    assert load.statuses() == {200: len(load.answers)}


NAMES = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


async def test_a_wire_that_breaks_or_falls_silent(live: Live) -> None:
    """C50 and C53 on the real server."""
    for name in ("a", "b"):
        await live.engine(name)
    await live.pool()
    await live.pod("a")
    async with Wire(live.cluster.port).relaying() as wire:
        await live.access(wire.port)
        wire.silence(True)
        picker = await live.picker(pool={"kubernetes": {"watch": {"silence": 2.0, "list_timeout": 2.0}}})
        assert [await health(picker, name) for name in ("liveness", *NAMES, "nonsense")] == [
            "SERVING",
            *["NOT_SERVING"] * 3,
            "NOT_FOUND",
        ]
        wire.silence(False)
        await live.await_ready(picker)
        assert [await health(picker, name) for name in NAMES] == ["SERVING"] * 3
        load = await live.envoy(picker.ports["extproc"])

        wire.cut()
        await live.pod("b")
        await load.served_by("a", "b")

        # No FIN, no reset, no byte: the watch must notice by itself.
        wire.silence(True)
        await live.delete("a")
        began = time.monotonic()
        await asyncio.sleep(2.5)
        assert (await load.ask()).status == 200, "the last good state serves"
        assert await live.ready(picker)
        wire.silence(False)
        await load.served_by("b")
        assert time.monotonic() - began < 15


async def test_an_objective_decides_who_goes_first(live: Live) -> None:
    await live.engine("a", iteration_time=0.02)
    await live.pool()
    await live.pod("a")
    await live.access()
    policy = live.directory / "policy.yaml"
    policy.write_text(
        "default_policy_family: all\nuncached_isl_buckets: [{min_tokens: 0, bucket: any}]\npolicy_classes:\n"
        "  - {name: only, policy_family: all, cache_bucket: any, quantum: 100, max_running_per_worker: 1}\n"
    )
    objective = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": "urgent"},
        "spec": {"priority": 10, "poolRef": {"group": "inference.networking.k8s.io", "name": POOL}},
    }
    group = "/apis/inference.networking.x-k8s.io/v1alpha2"
    path = f"{group}/namespaces/{live.namespace}/inferenceobjectives"
    await live.api.request("POST", path, body=objective)
    picker = await live.picker(policy={"file": str(policy), "hints": {"objective": "accept"}})
    await live.await_ready(picker)
    load = await live.envoy(picker.ports["extproc"])

    async def waiting() -> int:
        return sum(each["waiting_requests"] for each in (await live.status(picker))["queues"]["classes"])

    order: list[str] = []

    async def ask(name: str, **options: object) -> None:
        assert (await load.ask(name, **options)).status == 200  # type: ignore[arg-type]
        order.append(name)

    async with asyncio.TaskGroup() as group_of_requests:
        group_of_requests.create_task(ask("first", tokens=100))
        async with asyncio.timeout(PATIENCE):
            while not (await live.status(picker))["pool"]["endpoints"][0]["running"]:
                await asyncio.sleep(0.02)
        group_of_requests.create_task(ask("common"))
        while await waiting() < 1:
            await asyncio.sleep(0.02)
        group_of_requests.create_task(ask("urgent", headers={"x-gateway-inference-objective": "urgent"}))
        while await waiting() < 2:
            await asyncio.sleep(0.02)
    assert order == ["first", "urgent", "common"]
