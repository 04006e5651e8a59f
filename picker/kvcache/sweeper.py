"""Sweeping on the event loop what has become untrue, a little at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

# Blocks between two looks at the clock.
_CHUNK = 256


class Sweeper:
    """Once started, runs `sweeps` until nothing is left, at most `slice_seconds` in each turn of the loop.

    Each of them forgets up to about so many blocks as it is told, and returns whether any are left.
    """

    def __init__(self, *sweeps: Callable[[int], bool], slice_seconds: float = 0.002) -> None:
        self._sweeps = sweeps
        self._slice = slice_seconds
        self._scheduled = False

    def start(self) -> None:
        """There is, or may be, something to sweep. Cheap to repeat."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        end = perf_counter() + self._slice
        for sweep in self._sweeps:
            while sweep(_CHUNK):
                if perf_counter() >= end:
                    self.start()
                    return
