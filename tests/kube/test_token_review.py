"""Readers of the admin port by their Kubernetes tokens, on a real API server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from picker.admin.access import Access
from picker.admin.token_review import TokenReview
from picker.pool.kube.api import KubeApi
from tests.kube.chart import CHART
from tests.kube.control_plane import Account, ControlPlane, Refused

pytestmark = pytest.mark.kube


def account(cluster: ControlPlane, namespace: str, name: str, *flags: str) -> Account:
    token = cluster.kubectl("create", "token", name, "--namespace", namespace, *flags).strip()
    return Account(name, token)


async def test_only_accounts_on_the_list_may_read(
    cluster: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The chart gives Picker's account what asking takes, and Picker the list; it may do so only when asked to."""
    reader_name = f"system:serviceaccount:{namespace}:reader"
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"admin": {"tokenReview": [reader_name]}}))
    cluster.helm("install", "demo", str(CHART), "--namespace", namespace, "--values", str(values))
    config = cluster.get("configmap", "demo-picker-settings", "--namespace", namespace)["data"]
    (settings,) = (yaml.safe_load(text) for text in config.values())
    assert settings["admin"]["token_review"] == {"names": [reader_name]}

    for name in ("reader", "stranger"):
        cluster.kubectl("create", "serviceaccount", name, "--namespace", namespace)
    reader, stranger = (account(cluster, namespace, name) for name in ("reader", "stranger"))
    kubeconfig = tmp_path / "picker.kubeconfig"
    kubeconfig.write_text(cluster.kubeconfig_for(account(cluster, namespace, "demo-picker"), namespace))

    review = TokenReview(lambda: KubeApi.connect(kubeconfig), [reader_name], clock=time.monotonic)
    access = Access("0.0.0.0", None, review)
    assert await access.refusal(f"Bearer {reader.token}") is None
    assert await access.refusal(f"Bearer {stranger.token}") == "a valid bearer token is needed"
    assert await access.refusal(f"Bearer {reader.token[:-4]}AAAA") is not None
    assert await access.refusal(None) is not None
    assert review.stats.answers == {"admitted": 1, "refused": 2, "failed": 0}
    await access.close()

    for_picker = account(cluster, namespace, "reader", "--audience=picker")
    strict = TokenReview(lambda: KubeApi.connect(kubeconfig), [reader_name], ["picker"], clock=time.monotonic)
    assert await strict.admits(for_picker.token)
    assert not await strict.admits(reader.token)
    await strict.close()

    cluster.helm("upgrade", "demo", str(CHART), "--namespace", namespace, "--reset-values")
    with pytest.raises(Refused):
        cluster.kubectl(
            *("auth", "can-i", "create", "tokenreviews.authentication.k8s.io", "--all-namespaces", "--quiet"),
            f"--as=system:serviceaccount:{namespace}:demo-picker",
        )
