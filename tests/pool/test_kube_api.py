"""The API server over TLS, as clusters have it."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.pool.kube.api import ApiError, KubeApi
from tests.kube.certificates import Authority


@pytest.fixture(autouse=True)
def strict_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python is from 3.13 on, which is in the image."""
    plain = ssl.create_default_context

    def strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = plain(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TestServer]:
    """Its certificate says no more than it must: no key identifiers, as in some clusters."""
    issued = Authority(tmp_path).issue("apiserver", ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    app = web.Application()
    app.router.add_get("/version", _version)
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    yield server
    await server.close()


async def _version(_: web.Request) -> web.Response:
    return web.json_response({"major": "1"})


async def version(server: TestServer, directory: Path, authority: Path) -> dict[str, Any]:
    """What a client says that believes in an authority."""
    cluster = {"server": str(server.make_url("")).rstrip("/"), "certificate-authority": str(authority)}
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "c", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )
    api = await KubeApi.connect(kubeconfig)
    try:
        return await api.request("GET", "/version")
    finally:
        await api.close()


async def test_a_plain_certificate_of_the_clusters_authority_will_do(
    server: TestServer, tmp_path: Path
) -> None:
    assert await version(server, tmp_path, tmp_path / "ca.crt") == {"major": "1"}


async def test_one_of_another_authority_will_not(server: TestServer, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    with pytest.raises(ApiError, match="certificate verify failed"):
        await version(server, tmp_path, other.certificate)
