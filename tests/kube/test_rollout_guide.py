"""Every helm and kubectl command of the chart's README, in order, on a real API server.

Only those that need a running pod are left out: nothing runs pods here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.kube.chart import CHART, MANIFESTS
from tests.kube.control_plane import ControlPlane

pytestmark = pytest.mark.kube

NEEDS_A_POD = re.compile(r"rollout status|\blogs\b|port-forward|^curl|^docker")

# What the guide says that this gateway has not.
NOT_FOR = {"envoy-gateway": "httpRoute.weight=5", "istio": "shadow="}

ANOTHER_POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llama, namespace: inference}
spec:
  selector: {matchLabels: {app: llama}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: old-picker, port: {number: 9002}}
"""


def commands(page: str) -> Iterator[str]:
    """The commands of the indented blocks, each on one line. What is fenced is the transcript."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^ {4,}\S.*\n)+", page, flags=re.MULTILINE):
        yield from re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", block).strip().splitlines()


@pytest.mark.parametrize("gateway", NOT_FOR)
def test_the_guide(cluster: ControlPlane, gateway: str) -> None:
    def run(command: str) -> str:
        tools = cluster.directory / "bin"
        tools.mkdir(exist_ok=True)
        for name, path in (("helm", cluster.binaries.helm), ("kubectl", cluster.binaries.kubectl)):
            (tools / name).unlink(missing_ok=True)
            (tools / name).symlink_to(path)
        env = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(cluster.directory),
            "KUBECONFIG": str(cluster.kubeconfig),
            "GATEWAY": gateway,
        }
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=CHART.parents[1],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    listed = [command.strip() for command in commands((CHART / "README.md").read_text())]
    runnable = [
        command
        for command in listed
        if not NEEDS_A_POD.search(command) and NOT_FOR[gateway] not in command and "export" not in command
    ]
    assert len(runnable) >= 12
    # The guide goes on after the way back; the release is removed last.
    runnable.sort(key=lambda command: "uninstall" in command)
    cluster.kubectl("apply", "-f", str(MANIFESTS / "example" / "namespace.yaml"))
    cluster.kubectl("apply", "-f", "-", input=ANOTHER_POOL)
    for command in runnable:
        run(command)
        for part, check in CHECKS.items():
            if part in command:
                check(cluster)


def _one_route_by_header(cluster: ControlPlane) -> None:
    assert _rule(cluster)["matches"][0]["headers"] == [
        {"type": "Exact", "name": "x-picker-canary", "value": "yes"}
    ]


def _two_backends(cluster: ControlPlane) -> None:
    assert [backend["weight"] for backend in _rule(cluster)["backendRefs"]] == [5, 95]


def _everything(cluster: ControlPlane) -> None:
    assert "headers" not in _rule(cluster)["matches"][0]
    assert len(_rule(cluster)["backendRefs"]) == 1


def _in_shadow(cluster: ControlPlane) -> None:
    settings = cluster.get("configmap", "picker-settings", "-n", "inference")["data"]["settings.yaml"]
    assert yaml.safe_load(settings)["extproc"]["shadow"] is True


def _pool_points_here(cluster: ControlPlane) -> None:
    pool = cluster.get("infpool", "llama", "-n", "inference")
    assert pool["spec"]["endpointPickerRef"]["name"] == "picker"


def _as_installed(cluster: ControlPlane) -> None:
    assert cluster.get("infpool", "vllm", "-n", "inference")
    assert cluster.get("configmap", "picker-policy", "-n", "inference")
    assert not cluster.get("httproute", "-n", "inference")["items"]


def _nothing(cluster: ControlPlane) -> None:
    assert not cluster.get("deployment", "-n", "inference")["items"]


# A part of a command -> what must hold after it.
CHECKS = {
    "shadow=true": _in_shadow,
    "x-picker-canary": _one_route_by_header,
    "weight=5": _two_backends,
    "weight=100": _everything,
    "patch inferencepool": _pool_points_here,
    "rollback": _as_installed,
    "uninstall": _nothing,
}


def _rule(cluster: ControlPlane) -> Any:
    [rule] = cluster.get("httproute", "picker", "-n", "inference")["spec"]["rules"]
    return rule
