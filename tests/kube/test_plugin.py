"""`kubectl picker`: found by the real kubectl, through the real API server's proxy, to a real picker."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from picker.kubectl.main import hoisted
from tests.kube.chart import CHART
from tests.kube.control_plane import ControlPlane
from tests.kube.live import Live, Load, living, own_address

TOKEN = "the admin's word"


def test_options_may_stand_anywhere() -> None:
    assert hoisted(["drain", "pod", "-n", "x", "--context=c", "--undo", "--", "-n"]) == [
        *("-n", "x", "--context=c"),
        *("drain", "pod", "--undo", "--", "-n"),
    ]


@pytest.fixture
async def live(cluster: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Live]:
    async with living(cluster, namespace, tmp_path) as live:
        yield live


class Plugin:
    """Runs `kubectl picker ...` as an administrator of the namespace would."""

    def __init__(self, live: Live, *options: str) -> None:
        self._live = live
        self._options = options

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        binaries = self._live.cluster.binaries
        plugins = Path(sys.executable).parent
        child = await asyncio.create_subprocess_exec(
            *(str(binaries.kubectl), "picker", *arguments, "-n", self._live.namespace, *self._options),
            env={
                "PATH": os.pathsep.join([str(plugins), str(binaries.kubectl.parent), os.environ["PATH"]]),
                "KUBECONFIG": str(self._live.cluster.kubeconfig),
                "HOME": str(self._live.directory),
                "COLUMNS": "200",
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(child.communicate(), 60)
        assert child.returncode is not None
        return child.returncode, out.decode(), err.decode()

    async def __call__(self, *arguments: str) -> str:
        code, out, err = await self.run(*arguments)
        assert code == 0, err + out
        return out


@pytest.mark.kube
@pytest.mark.e2e
async def test_the_plugin(live: Live) -> None:
    address = own_address()
    await live.engine("a", iteration_time=0.02)
    await live.engine("b")
    await live.pool()
    for name in ("a", "b"):
        await live.pod(name)
    await live.access()
    (live.directory / "token").write_text(TOKEN)
    picker = await live.picker(
        admin={"host": "0.0.0.0", "token_file": str(live.directory / "token")},
        policy={"hints": {"pin": "accept"}},
    )
    await live.await_ready(picker)
    await live.picker_pod(address)
    secret = {
        "metadata": {"name": "admin"},
        "data": {"token": base64.b64encode(TOKEN.encode()).decode()},
    }
    await live.api.request("POST", f"/api/v1/namespaces/{live.namespace}/secrets", body=secret)
    load = await live.envoy(picker.ports["extproc"])
    await load.served_by("a", "b")

    port = ("--admin-port", str(picker.ports["admin"]))
    code, _, err = await Plugin(live, *port).run("status")
    assert (code, "--token-secret" in err) == (1, True), err
    plugin = Plugin(live, *port, "--token-secret", "admin")
    await _looking(live, plugin, load)
    direct = Plugin(
        live, "--address", f"127.0.0.1:{picker.ports['admin']}", "--token-file", str(live.directory / "token")
    )
    assert {each["name"] for each in json.loads(await direct("endpoints", "--json"))["endpoints"]} == {
        "a",
        "b",
    }
    await _pods(plugin, load)
    await _policies(live, plugin)


async def _looking(live: Live, plugin: Plugin, load: Load) -> None:
    shown = await plugin("status")
    assert "Classes" in shown
    assert "Pool: 2 endpoints" in shown
    assert "Pool" not in await plugin("queues")
    assert "Classes" not in await plugin("endpoints")
    [queue] = json.loads(await plugin("queues", "--json"))["classes"]
    assert queue["dispatched_requests"] >= 12

    answer = await load.ask("Which one", headers={"x-picker-endpoint": "b"})
    assert (answer.status, answer.pod) == (200, "b")
    request_id = live.engines["b"].served[-1].headers["x-picker-request-id"]
    explained = await plugin("explain", request_id)
    assert explained.startswith(f"{request_id} went to "), explained
    assert "not a: not_pinned" in explained
    code, _, err = await plugin.run("explain", "nonsense")
    assert (code, err) == (1, "picker: no decision nonsense, or it is too long ago\n")


async def _pods(plugin: Plugin, load: Load) -> None:
    assert await plugin("taint", "a", "maintenance=yes:NoSchedule") == "pod/a: maintenance=yes:NoSchedule\n"
    await load.served_by("b")
    assert await plugin("taint", "a", "maintenance-") == "pod/a: no taints\n"
    await load.served_by("a", "b")
    assert (await plugin.run("taint", "a", "nonsense"))[0] == 2
    code, _, err = await plugin.run("taint", "nobody", "x:NoSchedule")
    assert (code, 'pods "nobody" not found' in err) == (1, True)

    # Longer than any of this takes: it ends by its client's leaving.
    running = asyncio.create_task(load.ask("long", headers={"x-picker-endpoint": "a"}, tokens=10_000))
    while '"running": 1' not in await plugin("endpoints", "--json"):
        assert not running.done()
    code, _, err = await plugin.run("drain", "a", "--timeout", "0")
    assert (code, "1 requests still run there" in err) == (1, True), err
    await load.served_by("b")
    draining = asyncio.create_task(plugin("drain", "a"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 5)
    assert not running.done()
    running.cancel()
    assert await draining == "pod/a drained\n"
    assert await plugin("drain", "a", "--undo") == "pod/a takes requests again\n"
    await load.served_by("a", "b")


async def _policies(live: Live, plugin: Plugin) -> None:
    example = yaml.safe_load((CHART / "examples" / "policy.yaml").read_text())["policy"]
    file, bad = live.directory / "mine.yaml", live.directory / "bad.yaml"
    file.write_text(yaml.safe_dump(example))
    bad.write_text("policy_classes: 7\n")
    maps = f"/api/v1/namespaces/{live.namespace}/configmaps"
    held = {"metadata": {"name": "picker-policy"}, "data": {"policy.yaml": file.read_text()}}
    await live.api.request("POST", maps, body=held)

    assert await plugin("policy", "check", str(file)) == "ok: 4 classes\n"
    assert (await plugin.run("policy", "check", str(bad)))[0] == 2
    assert await plugin("policy", "diff", str(file)) == "no change\n"
    example["policy_classes"][0]["quantum"] = 1234
    file.write_text(yaml.safe_dump(example))
    code, out, _ = await plugin.run("policy", "diff", str(file))
    assert (code, out) == (1, "~ interactive-short: quantum 4096 -> 1234\n")
    assert (await plugin.run("policy", "apply", str(bad)))[0] == 2
    assert (await plugin("policy", "apply", str(file))).startswith("configmap/picker-policy applied")
    assert await plugin("policy", "diff", str(file)) == "no change\n"
