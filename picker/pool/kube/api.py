"""The API server over HTTP: one request, or one watch as lines, with errors that say what can be done about them.

`kubernetes.aio` finds the server and the credentials, and holds the connections. Its generated calls and its
Watch class are not used: Watch keeps an expired version, dies on a Status without `object`, and never notices a
connection that has gone silent. Importing that package takes seconds; nothing that a static pool needs does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from picker.pool.kube.errors import ApiError, SilentError, UnusableCredentials

_log = logging.getLogger(__name__)

Query = Sequence[tuple[str, str]]


class KubeApi:
    """One API server. `reload` reads the credentials anew into the configuration, for when they are refused."""

    def __init__(self, configuration: Any, reload: Callable[[], Awaitable[None]]) -> None:
        self._reload = reload
        self._client = ApiClient(configuration)

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, context: str | None = None) -> KubeApi:
        """By `kubeconfig`, or by the pod's own service account when that is None. Raises UnusableCredentials."""
        configuration = Configuration()
        # From 3.13 on, Python refuses certificates that lack what RFC 5280 wants beside the signature, as those of some
        # clusters do. They are verified all the same, and so is the server's name.
        configuration.disable_strict_ssl_verification = True

        async def reload() -> None:
            if kubeconfig is None:
                config.load_incluster_config(configuration)
            else:
                await config.load_kube_config(str(kubeconfig), context, configuration)

        try:
            await reload()
        # The client fails in as many ways as a file can be wrong.
        except Exception as error:
            if kubeconfig is None:
                raise UnusableCredentials(
                    f"not in a pod of a cluster, and no kubeconfig is named: {error}"
                ) from None
            raise UnusableCredentials(f"the kubeconfig {kubeconfig} cannot be used: {error}") from None
        return cls(configuration, reload)

    async def close(self) -> None:
        await self._client.close()

    async def refresh(self) -> None:
        """Read the credentials anew, after a 401. If they cannot be read, the old ones stay."""
        try:
            await self._reload()
        # A token file may be half written, and an exec plug-in fails in ways of its own.
        except Exception as error:
            _log.warning("the API server's credentials cannot be read: %s", error)

    async def request(
        self,
        method: str,
        path: str,
        query: Query = (),
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The JSON object that the server answers with. Raises ApiError."""
        limits = aiohttp.ClientTimeout(total=timeout)
        more = {"Content-Type": content_type, **(headers or {})}
        async with self._send(method, path, query, body, more, limits, timeout) as response:
            answer = _decode(await response.read())
        if answer is None:
            raise ApiError(None, "the answer is no JSON object")
        return answer

    async def lines(self, path: str, query: Query, silence: float) -> AsyncGenerator[bytes, None]:
        """A watch, line by line until the server ends it; close it (`aclosing`) to stop earlier. Raises
        ApiError, and SilentError once nothing has come for `silence` seconds."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(silence, 10.0), sock_read=silence)
        async with self._send("GET", path, query, None, {}, limits, silence) as response:
            async for line in response.content:
                yield line

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        query: Query,
        body: object,
        headers: Mapping[str, str],
        limits: aiohttp.ClientTimeout,
        patience: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            serialized = await self._client.param_serialize(
                method,
                path,
                query_params=list(query),
                header_params={"Accept": "application/json", **headers},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*serialized, _request_timeout=limits)
            response: aiohttp.ClientResponse = answer.response
            try:
                if response.status >= 300:
                    raise await _refusal(response)
                yield response
            finally:
                # Closed, not given back: the rest of a watch never ends.
                response.close()
        except TimeoutError:
            raise SilentError(patience) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(None, f"{type(error).__name__}: {error}") from None


async def _refusal(response: aiohttp.ClientResponse) -> ApiError:
    status = _decode(await response.content.read(64 * 1024)) or {}
    message = status.get("message") or response.reason or "refused"
    return ApiError(response.status, str(message), _seconds(response.headers.get("Retry-After")))


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _decode(body: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None
