"""A newcomer's install, command by command, as the chart's README shows it.

`python -m tests.kube.transcript` writes it anew; a test keeps it true. Nothing runs pods on the test control plane, so
Picker, its Envoy and the engines run beside it: with the settings, the Envoy configuration and the account that the
chart has made, and with a Pod object each.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from picker.simulation.envoy import EnvoyProcess
from tests.kube.binaries import find_binaries
from tests.kube.chart import CHART
from tests.kube.control_plane import ControlPlane
from tests.kube.live import RELEASE, Live, PickerProcess, living, on_these_ports, own_address

README = CHART / "README.md"
BEGIN, END = "<!-- transcript: begin -->", "<!-- transcript: end -->"
NAMESPACE = "models"

INSTALL = """helm install picker charts/picker --namespace models \\
    --values charts/picker/examples/standalone.yaml \\
    --values charts/picker/examples/policy.yaml \\
    --set admin.tokenSecret=picker-admin"""
ASK = """curl -s -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:8080/v1/completions \\
    -H 'content-type: application/json' \\
    -d '{"model": "tiny", "max_tokens": 4,
         "prompt": "Once upon a time, in a house by the sea, there lived an old man who counted every wave."}'"""

# What differs from run to run -> what stands for it.
VOLATILE = (
    (r"LAST DEPLOYED: .*", "LAST DEPLOYED: Mon Jan  5 09:00:00 2026"),
    (r"\b[0-9a-f]{12}-(\d+)\b", r"8c1f0e7a55d2-\1"),
    (r"waited \d+\.\d+ s", "waited 0.000 s"),
    # As wide as what it replaces, so that tables stay straight.
    (r"127\.0\.77\.(\d):\d{5}", r"10.0.0.1\1:8000  "),
)


class Recorder:
    """Runs commands as a reader would, and keeps what they and their outputs are."""

    def __init__(self, live: Live) -> None:
        self.lines: list[str] = []
        # What the reader types -> what it must be here, where no port is fixed.
        self.here: dict[str, str] = {}
        tools = live.directory / "bin"
        tools.mkdir()
        binaries = live.cluster.binaries
        for name, path in (("helm", binaries.helm), ("kubectl", binaries.kubectl)):
            (tools / name).symlink_to(path)
        self._env = {
            "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "KUBECONFIG": str(live.cluster.kubeconfig),
            "HOME": str(live.directory),
            "COLUMNS": "160",
        }

    async def run(self, command: str) -> None:
        self.lines.append(f"$ {command}")
        if match := re.fullmatch(r"export (\w+)=(\S+)", command):
            self._env[match[1]] = match[2]
            return
        for shown, actual in self.here.items():
            command = command.replace(shown, actual)
        child = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", command),
            env=self._env,
            cwd=CHART.parents[1],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(child.communicate(), 120)
        text = output.decode()
        assert child.returncode == 0, f"{command}\n{text}"
        for pattern, stand_in in VOLATILE:
            text = re.sub(pattern, stand_in, text)
        self.lines += [line.rstrip() for line in text.strip("\n").splitlines()]


async def record(cluster: ControlPlane, directory: Path) -> str:
    async with living(cluster, NAMESPACE, directory) as live:
        recorder = Recorder(live)
        run = recorder.run
        await run("kubectl get crd inferencepools.inference.networking.k8s.io -o name")
        await run("kubectl create namespace models")
        await asyncio.to_thread(cluster.kubectl, "create", "serviceaccount", "default", "-n", NAMESPACE)
        await run(
            "kubectl -n models create secret generic picker-admin "
            '--from-literal=token="$(head -c 24 /dev/urandom | base64)"'
        )
        await run(INSTALL)
        await run(
            "kubectl -n models get inferencepool,deployment,service,configmap,role,serviceaccount -o name"
        )
        await run("kubectl auth can-i list pods -n models --as=system:serviceaccount:models:picker")
        for name in ("vllm-0", "vllm-1"):
            await live.engine(name)
        await live.pool()
        for name in ("vllm-0", "vllm-1"):
            await live.pod(name)
        picker = await _start(live, recorder)
        await run("kubectl -n models get pods -o custom-columns=NAME:.metadata.name,PHASE:.status.phase")
        await run("export PICKER_TOKEN_SECRET=picker-admin")
        await _settled(live, picker)
        await run("kubectl picker endpoints -n models")
        for _ in range(2):
            await run(ASK)
            await _settled(live, picker)
        await run("kubectl picker queues -n models")
        [request_id] = {
            served.headers["x-picker-request-id"]
            for engine in live.engines.values()
            for served in engine.served
            if served.arrival == 1
        }
        shown = re.sub(*VOLATILE[1], request_id)
        recorder.here[shown] = request_id
        before = len(recorder.lines)
        await run(f"kubectl picker explain {shown} -n models")
        recorder.lines[before:] = _as_if_the_first_had_won(recorder.lines[before:])
        await run("kubectl picker drain vllm-0 -n models")
        await run("kubectl picker drain vllm-0 --undo -n models")
        await run("helm uninstall picker --namespace models")
        return "\n".join(recorder.lines)


def _as_if_the_first_had_won(lines: Sequence[str]) -> list[str]:
    """Of two equal endpoints one is drawn by lot, here as anywhere."""
    if not any("went to 10.0.0.12" in line for line in lines):
        return list(lines)
    other = {"vllm-0": "vllm-1", "vllm-1": "vllm-0", "10.0.0.11": "10.0.0.12", "10.0.0.12": "10.0.0.11"}
    return [re.sub("|".join(map(re.escape, other)), lambda found: other[found[0]], line) for line in lines]


async def _settled(live: Live, picker: PickerProcess) -> None:
    """Until every engine was scraped, every request is known to be over, and shares have been taken of them."""
    token = (live.directory / "token").read_text().strip()

    def is_settled(status: Any) -> bool:
        first, *_ = status["queues"]["classes"]
        idle = all(each["running"] == 0 and each["kv_usage"] == 0 for each in status["pool"]["endpoints"])
        return idle and (not first["dispatched_requests"] or first["recent_share"] == 1)

    async with asyncio.timeout(30):
        while not is_settled(await live.status(picker, token)):
            await asyncio.sleep(0.05)


async def _start(live: Live, recorder: Recorder) -> PickerProcess:
    """What the kubelet would do with the Deployment, but for the numbers of the ports."""
    await live.sign_in()

    def config_map(name: str) -> Any:
        return live.cluster.get("configmap", f"{RELEASE}-{name}", "-n", NAMESPACE)["data"]

    settings = yaml.safe_load(config_map("settings")["settings.yaml"])
    policy, token = live.directory / "policy.yaml", live.directory / "token"
    policy.write_text(config_map("policy")["policy.yaml"])
    secret = live.cluster.get("secret", "picker-admin", "-n", NAMESPACE)
    token.write_bytes(base64.b64decode(secret["data"]["token"]))
    settings["policy"]["file"], settings["admin"]["token_file"] = str(policy), str(token)
    settings["extproc"] |= {"port": 0, "health_port": 0}
    settings["admin"] |= {"port": 0, "grpc_port": 0}
    picker = await live.picker(**settings)
    await live.await_ready(picker)
    await live.picker_pod(own_address())
    config = on_these_ports(yaml.safe_load(config_map("envoy")["envoy.yaml"]), picker.ports["extproc"])
    envoy = await live.exits.enter_async_context(EnvoyProcess(json.dumps(config), directory=live.directory))
    recorder.here |= {
        "127.0.0.1:8080": f"127.0.0.1:{envoy.port}",
        "kubectl picker": f"kubectl picker --admin-port {picker.ports['admin']}",
    }
    return picker


def renewed(page: str, transcript: str) -> str:
    """The README with this transcript."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n```console\n{transcript}\n```\n{END}{after}"


def main() -> None:
    binaries = find_binaries()
    assert binaries is not None, "run tests/kube/assets/build first"
    with tempfile.TemporaryDirectory() as name:
        cluster = ControlPlane(binaries, Path(name))
        try:
            cluster.start()
            (work := Path(name) / "work").mkdir()
            transcript = asyncio.run(record(cluster, work))
        finally:
            cluster.stop()
    README.write_text(renewed(README.read_text(), transcript))


if __name__ == "__main__":
    main()
