"""How long each stage of a request took."""

from __future__ import annotations

import time

# (stage, seconds), in the order in which they were passed.
Stages = tuple[tuple[str, float], ...]


class StageClock:
    """A stage starts where the one before ended, the first one when this is made."""

    __slots__ = ("_last", "_taken")

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._taken: list[tuple[str, float]] = []

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        self._taken.append((stage, now - self._last))
        self._last = now

    @property
    def taken(self) -> Stages:
        return tuple(self._taken)
