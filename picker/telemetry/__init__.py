"""What Picker tells of itself: metrics, decisions, shares over time, logs and traces."""

from picker.telemetry.decisions import DecisionLog, DecisionRecord
from picker.telemetry.logs import configure_logging
from picker.telemetry.observer import Telemetry
from picker.telemetry.sources import ClassStats, EndpointStats, Sources

__all__ = [
    "ClassStats",
    "DecisionLog",
    "DecisionRecord",
    "EndpointStats",
    "Sources",
    "Telemetry",
    "configure_logging",
]
