"""Whose turn it is to take a cold prompt: one that no endpoint has cached or, in an idle pool, none more than a little.

Such a prompt is the start of what will be asked again, and its followers go where it goes. The load of the moment says
little of where they will fit: caches fill up over minutes. Given to endpoints in turn, new prefixes spread evenly.
In an idle pool a system prompt that many share would send them all to the one endpoint that has it, and fill its cache
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from picker.pool.endpoint import Endpoint
from picker.pool.pool import PoolChange


class ColdTurns:
    """Remembers the order in which the endpoints last took a cold prompt."""

    def __init__(self) -> None:
        # Slots, the one that has rested longest first; who never had one is not in it.
        self._order: dict[int, None] = {}

    def standing(self, slots: Sequence[int]) -> list[float]:
        """From 0 up to 1 for who of them had the last one, in the order of `slots`. Who never had one stands at 0."""
        members = set(slots)
        had = [slot for slot in self._order if slot in members]
        places = dict(zip(had, count(len(slots) - len(had)), strict=False))
        last = max(1, len(slots) - 1)
        return [places.get(slot, 0) / last for slot in slots]

    def took(self, endpoint: Endpoint) -> None:
        self._order.pop(endpoint.slot, None)
        self._order[endpoint.slot] = None

    def pool_changed(self, change: PoolChange) -> None:
        """A slot's next endpoint has had none."""
        for endpoint in change.removed:
            self._order.pop(endpoint.slot, None)
