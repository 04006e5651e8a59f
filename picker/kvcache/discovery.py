"""Asking an engine where it publishes its KV events (vLLM from 0.31 on: `GET /kv_event_sources`)."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

_MAX_ANSWER = 1 << 20


class DiscoveryError(Exception):
    """The engine did not tell, or what it told makes no sense."""


@dataclass(frozen=True, slots=True)
class EventAddresses:
    """ZMQ addresses of one data parallel rank."""

    events: str
    replay: str | None


async def discover_sources(
    session: aiohttp.ClientSession, base_url: str, *, timeout: float = 2.0
) -> dict[int, EventAddresses]:
    """Rank -> addresses, at the host of `base_url`.

    Raises DiscoveryError where the engine cannot be asked or has no such route.
    """
    host = urlsplit(base_url).hostname or ""
    try:
        async with session.get(
            f"{base_url.rstrip('/')}/kv_event_sources", timeout=aiohttp.ClientTimeout(total=timeout)
        ) as response:
            if response.status != 200:
                raise DiscoveryError(
                    f"{base_url} answered {response.status} when asked for its event sources"
                )
            body = b""
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > _MAX_ANSWER:
                    raise DiscoveryError(f"{base_url} has more to say of its event sources than makes sense")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DiscoveryError(f"{base_url} cannot be asked for its event sources: {error!r}") from error
    return parse_sources(body, host)


def parse_sources(body: bytes, host: str) -> dict[int, EventAddresses]:
    """`{"0": {"endpoint": ..., "replay_endpoint": ...}, ...}` -> addresses. Raises DiscoveryError."""
    try:
        sources = msgspec.json.decode(body, type=dict[str, _Source])
        return {
            int(rank): EventAddresses(
                _reachable(source.endpoint, host),
                _reachable(source.replay_endpoint, host) if source.replay_endpoint else None,
            )
            for rank, source in sources.items()
        }
    except (msgspec.MsgspecError, ValueError) as error:
        raise DiscoveryError(f"no event sources in the answer: {error}") from error


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


def _reachable(address: str, host: str) -> str:
    """The port, at the engine's own host: no engine makes Picker connect to another. Raises ValueError for an address
    that is not TCP.
    """
    scheme, separator, rest = address.partition("://")
    _, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdigit():
        raise ValueError(f"{address!r} is not a TCP address with a port")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
