"""What the plugin needs of a cluster: Picker's pod, its admin port through the API server's proxy, pods, ConfigMaps."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from picker.admin.access import TOKEN_HEADER
from picker.pool.kube.api import KubeApi
from picker.pool.kube.errors import ApiError, UnusableCredentials
from picker.pool.kube.leader_mark import LEADER_LABEL

Annotations = Mapping[str, str | None]

_ATTEMPTS = 5
_MERGE_PATCH = "application/merge-patch+json"
PICKER_LABEL = "app.kubernetes.io/component=endpoint-picker"


class NotThere(Exception):
    """What was asked for does not exist; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which cluster, namespace and picker; None takes what kubectl would take.

    release: the Helm release, where a namespace has several. address: `host:port` of an admin port that can be
    reached without the API server, through `kubectl port-forward` for instance.
    """

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    release: str | None = None
    address: str | None = None
    admin_port: int = 9090
    token_file: Path | None = None
    token_secret: str | None = None


class Cluster:
    """Raises ApiError for what the API server refuses, NotThere for what is missing."""

    def __init__(self, api: KubeApi, namespace: str, where: Where) -> None:
        self.namespace = namespace
        self._api = api
        self._where = where

    # Picker

    async def picker_pod(self) -> dict[str, Any]:
        """The pod that serves: of several, the one that leads."""
        labels = PICKER_LABEL
        if self._where.release:
            labels += f",app.kubernetes.io/instance={self._where.release}"
        answer = await self._api.request("GET", self._path("pods"), [("labelSelector", labels)])
        pods: list[dict[str, Any]] = answer.get("items") or []
        releases = {pod["metadata"]["labels"].get("app.kubernetes.io/instance") for pod in pods}
        if len(releases) > 1:
            names = ", ".join(sorted(map(str, releases)))
            raise NotThere(f"namespace {self.namespace} has the releases {names}: choose one with --release")
        serving = [pod for pod in pods if LEADER_LABEL in pod["metadata"]["labels"] and _is_ready(pod)]
        if not serving:
            what = f"no picker that is ready and has the label {LEADER_LABEL}" if pods else "no picker"
            raise NotThere(f"{what} in namespace {self.namespace} (pods with {labels})")
        return serving[0]

    async def admin(self, path: str) -> Any:
        """An answer of the admin port, as data. None when it says that there is no such thing."""
        token = await self._token()
        if self._where.address:
            return await _get(f"http://{self._where.address}{path}", token)
        name = (await self.picker_pod())["metadata"]["name"]
        through = f"{self._path('pods')}/{name}:{self._where.admin_port}/proxy{path}"
        # The API server keeps the header Authorization for itself.
        headers = {TOKEN_HEADER: token} if token else {}
        try:
            return await self._api.request("GET", through, headers=headers)
        except ApiError as error:
            return _missing(error.status, str(error))

    async def _token(self) -> str | None:
        where = self._where
        if where.token_file is not None:
            return where.token_file.read_text().strip()
        if where.token_secret is not None:
            name, _, key = where.token_secret.partition("/")
            secret = await self._api.request("GET", self._path("secrets", name))
            data = secret.get("data") or {}
            if (key or "token") not in data:
                raise NotThere(f"secret {name} has no key {key or 'token'}")
            return base64.b64decode(data[key or "token"]).decode().strip()
        return None

    # Objects

    async def annotate(self, pod: str, change: Callable[[Annotations], Annotations]) -> dict[str, Any]:
        """The pod with some annotations set or, by None, removed; `change` sees those that it has."""
        path = self._path("pods", pod)
        for attempt in range(_ATTEMPTS):
            metadata = (await self._api.request("GET", path))["metadata"]
            changed = change(metadata.get("annotations") or {})
            # With the version that was read, so that a change in between is noticed.
            patch = {"metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": changed}}
            try:
                return await self._patch(path, patch)
            except ApiError as error:
                if error.status != 409 or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def policy_config_map(self) -> str:
        """The ConfigMap that Picker's pod has mounted as its policy."""
        for volume in (await self.picker_pod())["spec"].get("volumes", ()):
            if volume["name"] == "policy" and "configMap" in volume:
                return str(volume["configMap"]["name"])
        raise NotThere("the picker has no policy mounted: set `policy` in the chart's values first")

    async def policy_text(self, config_map: str) -> str:
        found = await self._api.request("GET", self._path("configmaps", config_map))
        try:
            return str(found["data"]["policy.yaml"])
        except (KeyError, TypeError):
            raise NotThere(f"ConfigMap {config_map} has no key policy.yaml") from None

    async def write_policy(self, config_map: str, text: str) -> None:
        await self._patch(self._path("configmaps", config_map), {"data": {"policy.yaml": text}})

    async def _patch(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        return await self._api.request("PATCH", path, body=patch, content_type=_MERGE_PATCH)

    def _path(self, kind: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")


@asynccontextmanager
async def connected(where: Where) -> AsyncIterator[Cluster]:
    """By the kubeconfig and the context that kubectl would use."""
    from kubernetes.aio import config
    from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION

    # May be several files, joined by colons as for kubectl.
    kubeconfig = where.kubeconfig or Path(KUBE_CONFIG_DEFAULT_LOCATION)
    try:
        contexts, active = config.list_kube_config_contexts(str(kubeconfig))
    # The client fails in as many ways as a file can be wrong.
    except Exception as error:
        raise NotThere(f"the kubeconfig {kubeconfig} cannot be used: {error}") from None
    try:
        api = await KubeApi.connect(kubeconfig, where.context)
    except UnusableCredentials as error:
        raise NotThere(str(error)) from None
    chosen = next((each for each in contexts if each["name"] == where.context), active)
    namespace = where.namespace or chosen["context"].get("namespace") or "default"
    try:
        yield Cluster(api, namespace, where)
    finally:
        await api.close()


async def _get(url: str, token: str | None) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=headers) as got,
        ):
            text = await got.text()
            return json.loads(text) if got.status < 300 else _missing(got.status, text.strip())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ApiError(None, f"{url}: {error or type(error).__name__}") from None


def _missing(status: int | None, message: str) -> None:
    if status == 401:
        raise NotThere(
            f"{message}\nThe admin port wants a token: name the Secret that the chart's admin.tokenSecret names, "
            "with --token-secret NAME"
        )
    if status != 404:
        raise ApiError(status, message)


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    deleted = "deletionTimestamp" in pod["metadata"]
    return not deleted and any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
