"""What all faces together have counted, for metrics."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from picker.faces.messages import Counts
from picker.telemetry.catalogue import ROOM_METRICS, Kind

# The rooms that live in a face.
ROOMS = ("extproc", "bodies", "access_log", "tokens", "rewriting", "face")


class ProcessStats:
    """cpu_seconds: processor time of this process."""

    @property
    def cpu_seconds(self) -> float:
        return time.process_time()


_METRICS = [entry for entry in ROOM_METRICS if entry.room in ROOMS]
_GAUGES = {(entry.room, entry.field) for entry in _METRICS if entry.metric.kind is Kind.GAUGE}


def counts_of(rooms: dict[str, Any]) -> Counts:
    """The figures of these rooms that are metrics, from their stats or from functions that give them."""
    found: Counts = {}
    for entry in _METRICS:
        if entry.room in rooms:
            stats = rooms[entry.room]
            value = getattr(stats() if callable(stats) else stats, entry.field)
            plain = {str(key): count for key, count in value.items()} if isinstance(value, dict) else value
            found.setdefault(entry.room, {})[entry.field] = plain
    return found


class Tally:
    """Sums over faces. What a face counted stays in the sums when it is gone, so that they never fall; what it held
    does not.
    """

    def __init__(self) -> None:
        self._gone: Counts = {}
        self.last: dict[int, Counts] = {}

    def count(self, face: int, counts: Counts) -> None:
        """What a face has counted since it started."""
        self.last[face] = counts

    def gone(self, face: int) -> None:
        for room, figures in self.last.pop(face, {}).items():
            for field, value in figures.items():
                if (room, field) not in _GAUGES:
                    kept = self._gone.setdefault(room, {})
                    kept[field] = _sum(kept.get(field), value)

    def room(self, name: str) -> SimpleNamespace:
        """An object with the fields of the room's stats, as far as they are metrics."""
        total: dict[str, Any] = {
            entry.field: {} if entry.metric.labels else 0 for entry in _METRICS if entry.room == name
        }
        for counts in (self._gone, *self.last.values()):
            for field, value in counts.get(name, {}).items():
                total[field] = _sum(total[field], value)
        return SimpleNamespace(**total)


def _sum(one: Any, other: Any) -> Any:
    if one is None:
        return other
    if isinstance(other, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}
    return one + other
