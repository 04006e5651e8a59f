"""Waits for a condition that tasks and sockets bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Return as soon as `condition()` holds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)
