"""The chart and the manifests on a real API server."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.kube.chart import CHART, EXAMPLES, MANIFESTS
from tests.kube.control_plane import ControlPlane, Refused

pytestmark = pytest.mark.kube

EXAMPLE_FLAGS = {path.stem: ["--values", str(path)] for path in EXAMPLES}
MORE_FLAGS = {
    "everything": [
        "--set=networkPolicy.enabled=true,serviceMonitor.enabled=true,podMonitoring.enabled=true",
        "--set=alerts.enabled=true,dashboard.enabled=true,nodeTaints=true,replicas=2,httpRoute.create=true",
        "--set=podDisruptionBudget.enabled=true,tls.mode=files,tls.secretName=cert,admin.tokenSecret=token",
        "--set=tls.clientCaConfigMap=ca,imagePullSecrets={one},priorityClassName=high,extraEnv[0].name=A",
        "--set=inferencePool.targetPorts={8000,8001},networkPolicy.egress[0].ports[0].port=4317",
        f"--values={CHART / 'examples' / 'policy.yaml'}",
    ],
    "standalone-shadow": ["--set=mode=standalone,shadow=true"],
    "envoy-gateway-shadow": ["--set=gateway.provider=envoy-gateway,shadow=true,httpRoute.create=true"],
    "envoy-gateway-tls": [
        "--set=gateway.provider=envoy-gateway,tls.mode=files,tls.secretName=cert,tls.caConfigMap=ca"
    ],
    "canary": ["--set=httpRoute.create=true,httpRoute.weight=5,httpRoute.stableService=old"],
    "canary-by-header": ["--set=httpRoute.create=true,httpRoute.matchHeaders.x-canary=yes"],
    "no-pool": ["--set=inferencePool.create=false,rbac.create=false,serviceAccount.create=false"],
}


def dry_run(cluster: ControlPlane, namespace: str, manifests: str) -> str:
    """Everything as the server would take it: schemas, unknown fields, admission."""
    return cluster.kubectl(
        "apply", "--namespace", namespace, "--dry-run=server", "--validate=strict", "-f", "-", input=manifests
    )


@pytest.mark.parametrize("flags", [pytest.param(f, id=n) for n, f in (EXAMPLE_FLAGS | MORE_FLAGS).items()])
def test_the_server_takes_every_object(cluster: ControlPlane, namespace: str, flags: list[str]) -> None:
    rendered = cluster.helm("template", "demo", str(CHART), "--namespace", namespace, *flags)
    taken = dry_run(cluster, namespace, rendered)
    assert taken.count("created (server dry run)") == rendered.count("\nkind: ")


def test_a_misspelt_field_would_be_noticed(cluster: ControlPlane, namespace: str) -> None:
    rendered = cluster.helm("template", "demo", str(CHART), "--namespace", namespace)
    with pytest.raises(Refused, match=r'unknown field "spec\.endpointPickerReff"'):
        dry_run(cluster, namespace, rendered.replace("endpointPickerRef", "endpointPickerReff"))


@pytest.fixture
def inference_namespace(cluster: ControlPlane) -> str:
    """The namespace that the plain manifests name. It stays: nothing finishes a namespace's end here."""
    manifest = (MANIFESTS / "example" / "namespace.yaml").read_text()
    cluster.kubectl("apply", "-f", "-", input=manifest)
    return "inference"


@pytest.mark.parametrize("directory", ["gateway", "standalone", "example"])
def test_the_server_takes_the_plain_manifests(
    cluster: ControlPlane, inference_namespace: str, directory: str
) -> None:
    path = str(MANIFESTS / directory)
    built = cluster.kubectl("kustomize", path)
    assert len(list(yaml.safe_load_all(built))) >= 3
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-k", path)


# A release from its first day to its last


def test_install_upgrade_and_uninstall(cluster: ControlPlane, namespace: str) -> None:
    at = ("--namespace", namespace)
    notes = cluster.helm("install", "demo", str(CHART), *at, "--set", "nodeTaints=true,replicas=2")
    assert "deployment/demo-picker" in notes

    first = cluster.get("deployment", "demo-picker", *at)
    pool = cluster.get("infpool", "demo", *at)
    service = cluster.get("service", pool["spec"]["endpointPickerRef"]["name"], *at)
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] in [
        port["port"] for port in service["spec"]["ports"]
    ]
    assert _cluster_roles(cluster, namespace)

    cluster.helm("upgrade", "demo", str(CHART), *at, "--set", "replicas=2,settings.log.level=debug")
    second = cluster.get("deployment", "demo-picker", *at)
    assert _template(first)["annotations"] != _template(second)["annotations"]
    assert second["metadata"]["generation"] == first["metadata"]["generation"] + 1
    assert not _cluster_roles(cluster, namespace)

    cluster.helm("rollback", "demo", "1", *at)
    third = cluster.get("deployment", "demo-picker", *at)
    assert _template(third) == _template(first)

    cluster.helm("uninstall", "demo", *at)
    for kind in ("deployment", "service", "configmap", "serviceaccount", "role", "rolebinding", "infpool"):
        assert not _ours(cluster, namespace, kind)
    assert not _cluster_roles(cluster, namespace)


def test_an_upgrade_of_the_policy_alone_leaves_the_pods(cluster: ControlPlane, namespace: str) -> None:
    at = ("--namespace", namespace)
    policy = ("--values", str(CHART / "examples" / "policy.yaml"))
    cluster.helm("install", "demo", str(CHART), *at, *policy)
    before = cluster.get("deployment", "demo-picker", *at)["metadata"]["generation"]
    cluster.helm("upgrade", "demo", str(CHART), *at, *policy, "--set", "policy.policy_classes[0].quantum=1")
    text = cluster.get("configmap", "demo-picker-policy", *at)["data"]["policy.yaml"]
    assert yaml.safe_load(text)["policy_classes"][0]["quantum"] == 1
    assert cluster.get("deployment", "demo-picker", *at)["metadata"]["generation"] == before


def test_two_releases_share_a_namespace(cluster: ControlPlane, namespace: str) -> None:
    for name in ("one", "two"):
        cluster.helm("install", name, str(CHART), "--namespace", namespace)
    deployments = cluster.get("deployment", "--namespace", namespace)["items"]
    selectors = [entry["spec"]["selector"]["matchLabels"] for entry in deployments]
    assert len(selectors) == 2
    assert selectors[0] != selectors[1]


# Permissions


def can(cluster: ControlPlane, namespace: str, verb: str, resource: str, *flags: str) -> bool:
    """Whether Picker's service account may; `resource` as `kind.group` or `kind.group/name`."""
    account = f"system:serviceaccount:{namespace}:demo-picker"
    scope = () if "--all-namespaces" in flags else ("--namespace", namespace)
    try:
        cluster.kubectl("auth", "can-i", verb, resource, f"--as={account}", "--quiet", *scope, *flags)
    except Refused:
        return False
    return True


WATCHED = [
    "pods",
    "inferencepools.inference.networking.k8s.io",
    "inferenceobjectives.llm-d.ai",
    "inferenceobjectives.inference.networking.x-k8s.io",
]


@pytest.fixture(params=[False, True], ids=["alone", "elected"])
def installed(cluster: ControlPlane, namespace: str, request: pytest.FixtureRequest) -> bool:
    flags = ["--set=replicas=2,nodeTaints=true"] if request.param else []
    cluster.helm("install", "demo", str(CHART), "--namespace", namespace, *flags)
    elected: bool = request.param
    return elected


def test_permissions(cluster: ControlPlane, namespace: str, installed: bool) -> None:
    elected = installed
    for resource in WATCHED:
        for verb in ("get", "list", "watch"):
            assert can(cluster, namespace, verb, resource)
        assert not can(cluster, namespace, "list", resource, "--all-namespaces")
        for verb in ("create", "update", "patch", "delete"):
            assert not can(cluster, namespace, verb, resource)
    assert can(cluster, namespace, "patch", "pods", "--subresource=status") is elected
    for forbidden in ("secrets", "configmaps", "services", "deployments.apps", "serviceaccounts"):
        for verb in ("get", "list", "create", "delete"):
            assert not can(cluster, namespace, verb, forbidden)
    assert not can(cluster, namespace, "create", "pods", "--subresource=exec")

    assert can(cluster, namespace, "create", "leases.coordination.k8s.io") is elected
    for verb in ("get", "update", "patch"):
        assert can(cluster, namespace, verb, "leases.coordination.k8s.io/picker-demo") is elected
        assert not can(cluster, namespace, verb, "leases.coordination.k8s.io/another")
    assert not can(cluster, namespace, "delete", "leases.coordination.k8s.io/picker-demo")

    # nodeTaints was set along with the election.
    for verb in ("get", "list", "watch"):
        assert can(cluster, namespace, verb, "nodes", "--all-namespaces") is elected
    assert not can(cluster, namespace, "patch", "nodes", "--all-namespaces")


def _ours(cluster: ControlPlane, namespace: str, kind: str) -> list[str]:
    """Names of the release's objects of a kind."""
    found = cluster.get(kind, "--namespace", namespace, "-l", "app.kubernetes.io/instance=demo")["items"]
    return [entry["metadata"]["name"] for entry in found]


def _cluster_roles(cluster: ControlPlane, namespace: str) -> list[str]:
    # Releases in other namespaces carry the same labels.
    return [name for name in _ours(cluster, namespace, "clusterrole") if name.startswith(namespace)]


def _template(deployment: Any) -> Any:
    template = deployment["spec"]["template"]
    return {"annotations": template["metadata"]["annotations"], "spec": template["spec"]}
