"""`picker taint` against an API server that holds one pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from picker.cli import app
from picker.cli.taint import annotated, edited


def after(taints: str, *edits: str) -> str:
    return ",".join(map(str, edited(annotated(taints), edits)))


@pytest.mark.parametrize(
    ("before", "edits", "expected"),
    [
        ("", ["a:NoSchedule"], "a:NoSchedule"),
        ("a=1:NoSchedule", ["a=2:NoSchedule"], "a=2:NoSchedule"),
        ("a:NoSchedule", ["a:NoExecute"], "a:NoExecute,a:NoSchedule"),
        ("a:NoSchedule, a:NoExecute", ["a:NoExecute-"], "a:NoSchedule"),
        ("a=1:NoSchedule,b:NoSchedule", ["a-"], "b:NoSchedule"),
        ("a:NoSchedule", ["a-", "b:NoSchedule"], "b:NoSchedule"),
        ("a:NoSchedule", ["missing-"], "a:NoSchedule"),
        ("nonsense,a:NoSchedule", ["b:NoSchedule"], "a:NoSchedule,b:NoSchedule"),
    ],
)
def test_edits(before: str, edits: list[str], expected: str) -> None:
    assert after(before, *edits) == expected


class Server:
    """GET and PATCH of pod default/p, with conflicts on request."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"name": "p", "resourceVersion": "1"}
        self.conflicts = 0

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get("/api/v1/namespaces/default/pods/p", self.get),
                web.patch("/api/v1/namespaces/default/pods/p", self.patch),
            ]
        )
        return application

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response({"metadata": self.metadata})

    async def patch(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        change = (await request.json())["metadata"]
        if self.conflicts or change["resourceVersion"] != self.metadata["resourceVersion"]:
            self.conflicts -= 1
            return web.json_response({"message": "the object has been modified"}, status=409)
        annotations = dict(self.metadata.get("annotations", {})) | change["annotations"]
        self.metadata["annotations"] = {key: value for key, value in annotations.items() if value is not None}
        return web.json_response({"metadata": self.metadata})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Server, Path]]:
    server = Server()
    runner = web.AppRunner(server.application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [
                    {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
                ],
                "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    yield server, kubeconfig
    await runner.cleanup()


async def run(kubeconfig: Path, *arguments: str) -> Result:
    command = ["taint", *arguments, "--kubeconfig", str(kubeconfig)]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_tainting_and_untainting(server: tuple[Server, Path]) -> None:
    api, kubeconfig = server
    api.metadata["annotations"] = {"other": "stays"}
    result = await run(kubeconfig, "p", "gpu=old:NoSchedule")
    assert (result.exit_code, result.output) == (0, "default/p: gpu=old:NoSchedule\n")
    assert api.metadata["annotations"] == {"other": "stays", "picker.dev/taints": "gpu=old:NoSchedule"}
    result = await run(kubeconfig, "p", "gpu-")
    assert (result.exit_code, result.output) == (0, "default/p: no taints\n")
    assert api.metadata["annotations"] == {"other": "stays"}


async def test_a_change_in_between_is_not_lost(server: tuple[Server, Path]) -> None:
    api, kubeconfig = server
    api.conflicts = 2
    assert (await run(kubeconfig, "p", "a:NoSchedule")).exit_code == 0
    api.conflicts = 1000
    result = await run(kubeconfig, "p", "b:NoSchedule")
    assert result.exit_code == 1
    assert "has been modified" in result.stderr


async def test_failures_are_told_in_a_line(server: tuple[Server, Path]) -> None:
    _, kubeconfig = server
    result = await run(kubeconfig, "missing", "a:NoSchedule")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    for wrong in ("a:Never", "a", "a=1-"):
        result = await run(kubeconfig, "p", wrong)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1), wrong
