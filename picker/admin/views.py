"""What the API says, as plain data under the names of `protos/picker/v1/introspection.proto`.

The JSON of the admin server and the messages of the gRPC service are both made from these, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any

from msgspec.structs import asdict

from picker.telemetry import DecisionRecord, EndpointStats, Telemetry

View = dict[str, Any]

RECENT_SECONDS = 60.0


class Views:
    """Reads through telemetry. `clock` is the one that its shares are sampled by."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        self._telemetry = telemetry
        self._clock = clock

    def pool(self) -> View:
        sources = self._telemetry.sources
        return {
            "synced": sources.synced(),
            "endpoints": [_endpoint(stats) for stats in sources.endpoints()],
        }

    def queues(self) -> View:
        classes = list(self._telemetry.sources.classes())
        quanta = sum(stats.quantum for stats in classes) or 1
        recent = self._telemetry.shares.over(RECENT_SECONDS, self._clock())
        views = []
        for stats in classes:
            share = recent.get(stats.label)
            views.append(
                {
                    "name": stats.label,
                    "quantum": stats.quantum,
                    "weight_share": stats.quantum / quanta,
                    "waiting_requests": stats.waiting_requests,
                    "waiting_tokens": stats.waiting_tokens,
                    "waiting_cached_tokens": stats.waiting_cached_tokens,
                    "deficit": stats.deficit,
                    "oldest_wait": stats.oldest_wait,
                    "dispatched_requests": stats.dispatched_requests,
                    "dispatched_cost": stats.dispatched_cost,
                    "cancelled": stats.cancelled,
                    "dropped": dict(stats.dropped),
                    "recent_share": share.share if share else None,
                    "recent_entitlement": share.entitlement if share else None,
                }
            )
        return {"classes": views}

    def decisions(self, limit: int = 50, policy_class: str = "") -> View:
        """The last ones, newest first."""
        records = islice(self._telemetry.decisions.of_class(policy_class), max(limit, 0))
        return {"decisions": [decision_view(record) for record in records]}

    def decision(self, id: str) -> View | None:
        record = self._telemetry.decisions.get(id)
        return decision_view(record) if record else None

    def history(self, points: int = 150, step: int = 2) -> list[View]:
        """Shares over time, oldest first; `at` is seconds before now."""
        now = self._clock()
        return [
            {
                "age": now - at,
                "shares": {label: [share.share, share.entitlement] for label, share in shares.items()},
            }
            for at, shares in self._telemetry.shares.series(points, step)
        ]


def decision_view(record: DecisionRecord) -> View:
    view = asdict(record)
    view["candidates"] = [asdict(candidate) for candidate in record.candidates]
    view["rejected"] = [asdict(rejection) for rejection in record.rejected]
    return view


def _endpoint(stats: EndpointStats) -> View:
    view = _plain(stats)
    view["taints"] = list(stats.taints)
    view["labels"] = dict(stats.labels)
    return view


def _plain(value: Any) -> View:
    return {field.name: getattr(value, field.name) for field in fields(value)}
