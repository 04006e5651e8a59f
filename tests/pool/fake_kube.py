"""A small API server: lists, watches, leases, and every fault that a test scripts into it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.pool.kube.api import KubeApi

NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NODES = "/api/v1/nodes"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"

Json = dict[str, Any]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


REWRITES = f"/apis/llm-d.ai/v1alpha2/namespaces/{NAMESPACE}/inferencemodelrewrites"


def objectives(group: str) -> str:
    return f"/apis/{group}/v1alpha2/namespaces/{NAMESPACE}/inferenceobjectives"


def pool(name: str = "pool", ports: tuple[int, ...] = (8000,), **labels: str) -> Json:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "x"}},
            "targetPorts": [{"number": port} for port in ports],
        },
    }


def pod(
    name: str,
    ip: str | None = "10.0.0.1",
    *,
    uid: str | None = None,
    ready: bool = True,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    deleting: bool = False,
    node: str | None = None,
    created: str = "2026-01-01T00:00:00Z",
    tolerations: list[Json] | None = None,
) -> Json:
    metadata: Json = {
        "name": name,
        "uid": uid or f"uid-{name}",
        "creationTimestamp": created,
        "labels": labels if labels is not None else {"app": "x"},
        "annotations": annotations or {},
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    status: Json = {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    if ip is not None:
        status["podIP"] = ip
    spec: Json = {"tolerations": tolerations or []}
    if node is not None:
        spec["nodeName"] = node
    return {"metadata": metadata, "spec": spec, "status": status}


@dataclass
class Asked:
    """One request that the server has seen."""

    verb: str
    path: str
    query: dict[str, str]
    token: str | None


@dataclass
class _Event:
    version: int
    path: str
    kind: str
    before: Json | None
    item: Json


@dataclass(eq=False)
class _Watcher:
    path: str
    query: dict[str, str]
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class FakeKube:
    """Objects by path and name. A path that was never `serve`d answers 404, as a missing CRD does."""

    def __init__(self) -> None:
        self.version = 100
        self.token: str | None = None
        self.asked: list[Asked] = []
        # While True, watches accept and then say nothing, as a half-open connection does.
        self.silent = False
        self._stopping = False
        self._served: set[str] = set()
        self._objects: dict[str, dict[str, Json]] = defaultdict(dict)
        self._history: list[_Event] = []
        self._watchers: set[_Watcher] = set()
        self._faults: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self.server = TestServer(app)

    def serve(self, *paths: str) -> None:
        self._served.update(paths)

    def count(self, verb: str, path: str) -> int:
        return sum(one.verb == verb and one.path == path for one in self.asked)

    def last(self, verb: str, path: str) -> Asked:
        return next(one for one in reversed(self.asked) if one.verb == verb and one.path == path)

    def watchers(self, path: str) -> int:
        return sum(watcher.path == path for watcher in self._watchers)

    def get(self, path: str, name: str) -> Json:
        return self._objects[path][name]

    def put(self, path: str, item: Json) -> None:
        """Create or modify an object, and tell the watchers."""
        self.serve(path)
        before = self._objects[path].get(item["metadata"]["name"])
        self._store(path, "ADDED" if before is None else "MODIFIED", before, item)

    def delete(self, path: str, item: Json) -> None:
        """Remove an object; of a namesake with another uid, tell only the watchers."""
        present = self._objects[path].get(item["metadata"]["name"])
        if present is not None and present["metadata"].get("uid") == item["metadata"].get("uid"):
            del self._objects[path][item["metadata"]["name"]]
        self._store(path, "DELETED", item, item)

    def fail_next(self, verb: str, path: str, *faults: Fault) -> None:
        """Each of the next requests of `verb` (LIST, WATCH, GET, PUT, POST, PATCH) gets its fault instead."""
        self._faults[verb, path].extend(faults)

    def mend(self, verb: str, path: str) -> None:
        """Forget the faults that are still to come."""
        self._faults[verb, path].clear()

    def say(self, path: str, line: Json | bytes) -> None:
        """Put a line of the test's own into the path's watches."""
        raw = line if isinstance(line, bytes) else json.dumps(line).encode()
        for watcher in self._watchers:
            if watcher.path == path:
                watcher.lines.put_nowait(raw + b"\n")

    def bookmark(self, path: str, version: int) -> None:
        self.version = max(self.version, version)
        item = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
        self.say(path, {"type": "BOOKMARK", "object": item})

    def cut(self, path: str) -> None:
        """End the path's watches, as a server does at their time limit."""
        for watcher in self._watchers:
            if watcher.path == path:
                watcher.lines.put_nowait(None)

    async def stop(self) -> None:
        """Go away: the watches end and every connection after that is refused."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.lines.put_nowait(None)
        await self.server.close()

    def _store(self, path: str, kind: str, before: Json | None, item: Json) -> None:
        self.version += 1
        item = copy.deepcopy(item)
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind != "DELETED":
            self._objects[path][item["metadata"]["name"]] = item
        event = _Event(self.version, path, kind, before, item)
        self._history.append(event)
        for watcher in self._watchers:
            _deliver(watcher, event)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        verb = request.method
        if verb == "GET" and not self._is_object(request.path):
            verb = "WATCH" if query.get("watch") == "true" else "LIST"
        token = request.headers.get("Authorization")
        self.asked.append(Asked(verb, request.path, query, token))
        faults = self._faults[verb, request.path]
        if faults:
            return await faults.pop(0)(request)
        if self.token is not None and token != f"Bearer {self.token}":
            return status(401, "Unauthorized")
        if verb == "LIST":
            return self._list(request.path, query)
        if verb == "WATCH":
            return await self._watch(request, query)
        return await self._object(request, verb)

    def _is_object(self, path: str) -> bool:
        return path.rpartition("/")[0] in self._served

    def _list(self, path: str, query: dict[str, str]) -> web.Response:
        if path not in self._served:
            return status(404, "NotFound")
        items = [item for item in self._objects[path].values() if _matches(item, query)]
        start, size = int(query.get("continue", "0")), int(query.get("limit", "500"))
        metadata = {"resourceVersion": str(self.version)}
        if start + size < len(items):
            metadata["continue"] = str(start + size)
        return web.json_response({"kind": "List", "metadata": metadata, "items": items[start : start + size]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        if request.path not in self._served:
            return status(404, "NotFound")
        watcher = _Watcher(request.path, query)
        for event in self._history:
            if event.version > int(query["resourceVersion"]):
                _deliver(watcher, event)
        self._watchers.add(watcher)
        if self._stopping:
            watcher.lines.put_nowait(None)
        try:
            return await stream(request, watcher.lines, lambda: self.silent)
        finally:
            self._watchers.discard(watcher)

    async def _object(self, request: web.Request, verb: str) -> web.Response:
        collection, _, name = request.path.rpartition("/")
        if verb == "POST":
            collection = request.path
            name = (await request.json())["metadata"]["name"]
        present = self._objects[collection].get(name)
        if verb == "GET":
            return web.json_response(present) if present else status(404, "NotFound")
        if verb == "PATCH" and name == "status":
            collection, _, name = collection.rpartition("/")
            present = self._objects[collection].get(name)
            if present is None:
                return status(404, "NotFound")
        body: Json = await request.json()
        if verb == "PATCH":
            body = _merged(present, body)
        if verb == "POST" and present is not None:
            return status(409, "AlreadyExists")
        if verb == "PUT" and (
            present is None
            or body["metadata"].get("resourceVersion") != present["metadata"]["resourceVersion"]
        ):
            return status(409, "Conflict")
        self._store(collection, "MODIFIED", present, body)
        return web.json_response(self._objects[collection][name])


def _merged(before: Any, patch: Any) -> Any:
    """A JSON merge patch: null removes."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        merged.pop(key, None) if value is None else merged.update({key: _merged(merged.get(key), value)})
    return merged


def status(code: int, reason: str, **headers: str) -> web.Response:
    """A refusal, with a Status object as its body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response(status_object(code, reason), status=code, headers=named)


def status_object(code: int, reason: str) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": reason}


def refuse(code: int, reason: str = "scripted", **headers: str) -> Fault:
    async def answer(_: web.Request) -> web.Response:
        return status(code, reason, **headers)

    return answer


def say_and_end(*lines: Json | bytes) -> Fault:
    """A watch that says these lines and ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for line in lines:
            queue.put_nowait((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n")
        queue.put_nowait(None)
        return await stream(request, queue, lambda: False)

    return answer


def hold(release: asyncio.Event) -> Fault:
    """An answer that does not come until `release`."""

    async def answer(_: web.Request) -> web.Response:
        await release.wait()
        return status(503, "held")

    return answer


async def drop(request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def stream(
    request: web.Request, lines: asyncio.Queue[bytes | None], silent: Callable[[], bool]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while (line := await lines.get()) is not None:
        if not silent():
            await response.write(line)
    return response


def _deliver(watcher: _Watcher, event: _Event) -> None:
    """The event as a watch with the watcher's selector sees it."""
    if watcher.path != event.path:
        return
    was = event.before is not None and _matches(event.before, watcher.query)
    now = event.kind != "DELETED" and _matches(event.item, watcher.query)
    if event.kind == "DELETED":
        kind = "DELETED" if was else None
    else:
        kind = {(True, True): "MODIFIED", (False, True): "ADDED", (True, False): "DELETED"}.get((was, now))
    if kind is not None:
        watcher.lines.put_nowait(json.dumps({"type": kind, "object": event.item}).encode() + b"\n")


def _matches(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
    named = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and named in ("", item["metadata"]["name"])


async def connect(fake: FakeKube, directory: Path, token: str = "first") -> tuple[KubeApi, Path]:
    """A client of the running `fake`, and the file that holds its token."""
    token_file = directory / "token"
    token_file.write_text(token)
    kubeconfig = directory / "kubeconfig"
    entry = {"server": str(fake.server.make_url("")).rstrip("/")}
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": entry}],
                "users": [{"name": "fake", "user": {"tokenFile": str(token_file)}}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            }
        )
    )
    return await KubeApi.connect(kubeconfig), token_file
