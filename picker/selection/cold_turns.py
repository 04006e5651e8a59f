"""Whose turn it is to take a prompt that no endpoint has cached.

Such a prompt is the start of what will be asked again, and its followers go where it goes. The load of the moment says
little of where they will fit: caches fill up over minutes. Given to endpoints in turn, new prefixes spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.pool.endpoint import Endpoint


class ColdTurns:
    """Remembers, by slot, when each endpoint last took a cold prompt, and whose slot it was then."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, int]] = {}
        self._count = 0

    def standing(self, endpoints: Sequence[Endpoint]) -> dict[int, float]:
        """By slot, from 0 for who has rested longest to 1 for who had the last one. Who never had one rests at 0."""
        had = {endpoint.slot: self._when(endpoint) for endpoint in endpoints}
        in_turn = sorted(had, key=had.__getitem__)
        last = max(1, len(in_turn) - 1)
        return {slot: place / last if had[slot] else 0.0 for place, slot in enumerate(in_turn)}

    def took(self, endpoint: Endpoint) -> None:
        self._count += 1
        self._last[endpoint.slot] = (endpoint.spec.uid, self._count)

    def _when(self, endpoint: Endpoint) -> int:
        """The number of its last cold prompt, 0 for none: a slot's new endpoint has had none."""
        uid, number = self._last.get(endpoint.slot, ("", 0))
        return number if uid == endpoint.spec.uid else 0
