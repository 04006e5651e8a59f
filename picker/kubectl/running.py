"""From a command to the cluster and back, with one line for what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from picker.cli.options import fail
from picker.kubectl.cluster import Cluster, NotThere, Where, connected
from picker.pool.kube.errors import ApiError

T = TypeVar("T")


def in_cluster(where: Where, work: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
    """Run `work`. What the cluster refuses ends the command with exit code 1."""

    async def run() -> T:
        async with connected(where) as cluster:
            return await work(cluster)

    try:
        return asyncio.run(run())
    except (ApiError, NotThere, OSError) as error:
        raise fail(str(error)) from None
