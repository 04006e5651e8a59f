"""Several pickers, new policies and new versions, under load; and the chart's own Envoy at its longest wait."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from picker.simulation.envoy import EnvoyProcess
from tests.kube.chart import Renderer
from tests.kube.control_plane import ControlPlane
from tests.kube.live import PATIENCE, Live, Load, PickerProcess, health, living, on_these_ports
from tests.support.ports import free_ports

pytestmark = [pytest.mark.kube, pytest.mark.e2e]

LEASE_SECONDS = 6.0
ELECTION = {
    "leader_election": True,
    "lease": {"duration": LEASE_SECONDS, "retry_period": 0.3, "request_timeout": 1},
}
WITH_ELECTION = "--set=leaderElection.enabled=true,inferencePool.name=vllm"


def policy(*names: str, **options: Any) -> dict[str, Any]:
    classes = [
        {"name": name, "policy_family": name, "cache_bucket": "any", "quantum": 100, **options}
        for name in names
    ]
    return {
        "default_policy_family": names[0],
        "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "any"}],
        "policy_classes": classes,
    }


@pytest.fixture
async def live(cluster: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Live]:
    async with living(cluster, namespace, tmp_path) as live:
        yield live


async def two_pods(live: Live) -> None:
    for name in ("a", "b"):
        await live.engine(name)
    await live.pool()
    for name in ("a", "b"):
        await live.pod(name)


async def cached_blocks(live: Live, picker: PickerProcess) -> list[int]:
    endpoints = (await live.status(picker))["pool"]["endpoints"]
    return sorted(endpoint["cached_blocks"] for endpoint in endpoints)


# High availability


async def test_a_leader_that_is_killed_is_followed_once_its_lease_is_over(live: Live) -> None:
    await two_pods(live)
    await live.access(None, WITH_ELECTION)
    leader = await live.picker(pool={"kubernetes": ELECTION})
    await live.await_ready(leader)
    follower = await live.picker(pool={"kubernetes": ELECTION})
    load = await live.envoy(leader.ports["extproc"], follower.ports["extproc"])
    await load.served_by("a", "b")

    # The follower is alive, not ready, and knows as much as the leader of what the engines have cached.
    assert not await live.ready(follower)
    assert await live.ready(follower, "/healthz")
    for number in range(4):
        assert (await load.ask(f"{number} " + "once upon a time " * 20)).status == 200
    async with asyncio.timeout(PATIENCE):
        while await cached_blocks(live, follower) != await cached_blocks(live, leader):
            await asyncio.sleep(0.05)
    assert sum(await cached_blocks(live, follower)) > 4

    async with load.running(clients=4):
        await asyncio.sleep(0.5)
        await leader.kill()
        await live.await_ready(follower)
        await load.served_by("a", "b")
        resumed = time.monotonic()
        await asyncio.sleep(0.5)
    assert load.statuses(resumed).keys() == {200}
    # Envoy answers for a picker that is gone; nobody was left hanging, as `running` has seen.
    assert max(answer.took for answer in load.answers) < PATIENCE / 2
    assert (await live.metric(follower, "picker_leader")) == 1


async def test_a_leader_that_is_told_to_stop_hands_over_at_once_and_fails_nothing(live: Live) -> None:
    await two_pods(live)
    await live.access(None, WITH_ELECTION)
    election = ELECTION | {"lease": {"duration": 600, "retry_period": 0.3, "request_timeout": 1}}

    async def start(pod: str) -> PickerProcess:
        await live.picker_pod("10.9.0.1", pod, WITH_ELECTION)
        return await live.picker(
            pool={"kubernetes": election | {"pod": pod}}, queue={"drain_notice": 3, "drain_grace": 20}
        )

    leader = await start("picker-0")
    await live.await_ready(leader)
    await live.await_selected("picker-0", flags=[WITH_ELECTION])
    follower = await start("picker-1")
    # As far as its Deployment can see it is as good as the leader, but the Service does not select it.
    await until_standing_by(follower)
    assert await health(follower, "readiness") == "NOT_SERVING"
    assert await live.selected(WITH_ELECTION) == ["picker-0"]
    load = await live.envoy(leader.ports["extproc"], follower.ports["extproc"])
    await load.served_by("a", "b")
    load.answers.clear()
    stopping = asyncio.create_task(leader.stop())
    # A lease of ten minutes was given back, or nobody would be ready for that long.
    await live.await_ready(follower)
    await live.await_selected("picker-0", "picker-1", flags=[WITH_ELECTION])
    assert await stopping == 0
    await load.served_by("a", "b")
    # In the pod that did not go a container is started anew, and finds the mark of the one before it.
    again = await live.picker(pool={"kubernetes": election | {"pod": "picker-0"}})
    await until_standing_by(again)
    assert await live.selected(WITH_ELECTION) == ["picker-1"]


async def until_standing_by(picker: PickerProcess) -> None:
    async with asyncio.timeout(PATIENCE):
        while await health(picker, "standby") != "SERVING":
            await asyncio.sleep(0.05)


async def test_a_rolling_update_under_load_fails_no_request(live: Live) -> None:
    """As a Deployment with maxSurge 1 and maxUnavailable 0 does it: the new one is ready before the old one goes."""
    await two_pods(live)
    await live.access()
    ports = free_ports(3)
    load = await live.envoy(*ports)

    async def start(port: int) -> PickerProcess:
        queue = {"drain_grace": 20, "drain_notice": 2}
        picker = await live.picker(extproc={"port": port}, queue=queue)
        await live.await_ready(picker)
        return picker

    old = await start(ports[0])
    await load.served_by("a", "b")
    load.answers.clear()
    async with load.running(clients=6):
        for port in ports[1:]:
            new = await start(port)
            # As the endpoints of a Service, which gateways follow.
            await live.await_known(2)
            assert await old.stop() == 0
            old = new
        await load.served_by("a", "b")
    assert len(load.answers) > 100
    assert load.statuses() == {200: len(load.answers)}


# Policies


class ConfigVolume:
    """A ConfigMap as a kubelet mounts it: the files behind a link that is swapped as a whole."""

    def __init__(self, live: Live, name: str) -> None:
        self.directory = live.directory / "volume"
        self._live = live
        self._name = name
        self._versions = 0

    async def sync(self) -> None:
        path = f"/api/v1/namespaces/{self._live.namespace}/configmaps/{self._name}"
        data = (await self._live.api.request("GET", path))["data"]
        self._versions += 1
        version = self.directory / f"..{self._versions}"
        version.mkdir(parents=True)
        for name, text in data.items():
            (version / name).write_text(text)
            link = self.directory / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        fresh = self.directory / "..data_tmp"
        fresh.symlink_to(version.name)
        os.replace(fresh, self.directory / "..data")


async def test_a_new_policy_under_load(live: Live) -> None:
    await two_pods(live)
    await live.access()
    path = f"/api/v1/namespaces/{live.namespace}/configmaps"
    volume = ConfigVolume(live, "policy")

    def config_map(text: str) -> dict[str, Any]:
        return {"metadata": {"name": "policy"}, "data": {"policy.yaml": text}}

    await live.api.request("POST", path, body=config_map(yaml.safe_dump(policy("first"))))
    await volume.sync()
    file = str(volume.directory / "policy.yaml")
    picker = await live.picker(policy={"file": file, "reload_interval": 0.2})
    await live.await_ready(picker)
    load = await live.envoy(picker.ports["extproc"])

    async def change(text: str) -> None:
        await live.api.request("PUT", f"{path}/policy", body=config_map(text))
        await volume.sync()

    async def classes() -> list[str]:
        return [each["name"] for each in (await live.status(picker))["queues"]["classes"]]

    async def until_classes(*names: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while await classes() != list(names):
                await asyncio.sleep(0.05)

    async with load.running(clients=6, pause=0.0):
        # One request at a time for each engine, so that requests wait while their classes change.
        await change(yaml.safe_dump(policy("first", "second", max_running_per_worker=1)))
        await until_classes("first", "second")
        await change(yaml.safe_dump(policy("second", "third", max_running_per_worker=1)))
        await until_classes("second", "third")
        await change("policy_classes: 7\n")
        async with asyncio.timeout(PATIENCE):
            while not await live.metric(picker, "picker_policy_refusals_total"):
                await asyncio.sleep(0.05)
        assert await classes() == ["second", "third"]
        await change(yaml.safe_dump(policy("fourth")))
        await until_classes("fourth")
    assert load.statuses() == {200: len(load.answers)}


# The chart's own Envoy

LONGEST_WAIT = 10


async def test_the_charts_envoy_waits_as_long_as_picker_does(live: Live) -> None:
    """C13 (d): a request that is held for nearly the longest wait gets its answer, and one that is held for all of
    it gets Picker's refusal and no timer's."""
    # Slow by waiting, so that a busy machine makes it little slower.
    await live.engine("a", iteration_time=0.1)
    await live.pool()
    await live.pod("a")
    flags = ["mode=standalone", f"settings.queue.max_wait={LONGEST_WAIT}", "timeouts.response=20"]
    render = Renderer(live.cluster.binaries.helm)
    rendered = render(*flags, values={"policy": policy("only", max_running_per_worker=1)})
    await live.access()
    settings = yaml.safe_load(rendered.settings)
    (live.directory / "policy.yaml").write_text(rendered.one("ConfigMap", "-policy")["data"]["policy.yaml"])
    picker = await live.picker(
        queue=settings["queue"],
        extproc={"tls": settings["extproc"]["tls"]},
        policy={"file": str(live.directory / "policy.yaml")},
    )
    await live.await_ready(picker)
    config = on_these_ports(rendered.envoy, picker.ports["extproc"])
    async with EnvoyProcess(json.dumps(config), directory=live.directory) as envoy:
        load = Load(f"http://127.0.0.1:{envoy.port}", live.session)

        async def held_behind(tokens: int) -> tuple[Any, Any]:
            running = asyncio.create_task(load.ask("first", tokens=tokens))
            async with asyncio.timeout(PATIENCE):
                while not (await live.status(picker))["pool"]["endpoints"][0]["running"]:
                    await asyncio.sleep(0.02)
            return await asyncio.gather(running, load.ask("second"))

        first, second = await held_behind(tokens=50)
        assert (first.status, second.status) == (200, 200)
        assert LONGEST_WAIT * 0.4 < second.took < LONGEST_WAIT
        first, second = await held_behind(tokens=150)
        assert (first.status, second.status) == (200, 429), second.body
        assert "waited" in second.body, "these are Picker's words"
        async with asyncio.timeout(PATIENCE):
            while (await live.status(picker))["pool"]["endpoints"][0]["running"]:
                await asyncio.sleep(0.05)
