"""Structured logs: one JSON object a line, or text for a terminal. Never prompts, never secrets.

Whatever a client sent (a model's name, an id) is written as data: control characters are escaped in both forms, so
that no value can forge a line or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from picker.telemetry.decisions import DecisionRecord

FIELDS = "picker_fields"

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_COLOURS = {logging.DEBUG: "2", logging.INFO: "0", logging.WARNING: "33", logging.ERROR: "31"}


@dataclass(slots=True)
class LogStats:
    """lost_lines: could not be written (a full disk, a closed pipe)."""

    lost_lines: int = 0


def configure_logging(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> LogStats:
    """Send all logging of this process to `stream` (by default standard error), and nowhere else."""
    stream = stream or sys.stderr
    terminal = stream.isatty()
    handler = _Handler(stream)
    if format == "json" or (format == "auto" and not terminal):
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(ConsoleFormatter(colour=terminal))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    # Others' debug lines are not meant for our operators, and some of them print whole requests.
    root.setLevel(max(_LEVELS[level], logging.INFO))
    logging.getLogger("picker").setLevel(_LEVELS[level])
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    return handler.stats


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=`: values that belong to the line as data and not in its text."""
    return {FIELDS: values}


class _Handler(logging.StreamHandler[TextIO]):
    """A line that cannot be written is counted: logging never takes the service down or repeats itself."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.stats = LogStats()

    def handleError(self, record: logging.LogRecord) -> None:
        self.stats.lost_lines += 1


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class ConsoleFormatter(logging.Formatter):
    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        data = "".join(f" {key}={_plain(value)}" for key, value in getattr(record, FIELDS, {}).items())
        name = record.name.removeprefix("picker.")
        line = f"{clock} {record.levelname.lower():7} {name}: {_plain(record.getMessage())}{data}"
        if record.exc_info:
            line += "\n" + "\n".join(
                f"    {_plain(part)}" for part in self.formatException(record.exc_info).splitlines()
            )
        colour = _COLOURS.get(record.levelno, "0")
        return f"\x1b[{colour}m{line}\x1b[0m" if self._colour and colour != "0" else line


def _timestamp(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


def _plain(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class DecisionLines:
    """Writes decisions: each one at level debug, else up to `per_second` of them at info."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._logger = logging.getLogger("picker.decisions")
        self._per_second = per_second
        self._clock = clock
        self._tokens = min(1.0, per_second)
        self._filled_at = clock()
        self._skipped = 0

    def write(self, record: DecisionRecord) -> None:
        if self._logger.isEnabledFor(logging.DEBUG):
            self._line(logging.DEBUG, record)
        elif self._logger.isEnabledFor(logging.INFO):
            if self._take_token():
                self._line(logging.INFO, record)
                self._skipped = 0
            else:
                self._skipped += 1

    def explain(self, record: DecisionRecord) -> None:
        """Write all of a decision: what was weighed, by which terms, and who was left out for what reason."""
        candidates = [f"{each.name} {each.total:.0f} {dict(each.terms)}" for each in record.candidates]
        rejected = [f"{each.name} {each.reason}" for each in record.rejected]
        more = {"prefill": record.prefill} if record.prefill else {}
        self._line(
            logging.INFO,
            record,
            cached_tokens=record.cached_tokens,
            lane=record.lane,
            deficit_before=record.deficit_before,
            deficit=record.deficit,
            candidates=candidates,
            rejected=rejected,
            **more,
        )

    def _take_token(self) -> bool:
        now = self._clock()
        room = max(1.0, self._per_second)
        self._tokens = min(room, self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _line(self, level: int, record: DecisionRecord, **more: Any) -> None:
        data: dict[str, Any] = {
            "request": record.id,
            "class": record.policy_class,
            "model": record.model[:128],
            "prompt_tokens": record.prompt_tokens,
            "uncached_tokens": record.uncached_tokens,
            "cost": record.cost,
            "wait": round(record.wait, 6),
            "endpoint": record.chosen,
            **more,
        }
        if self._skipped:
            data["not_logged"] = self._skipped
        self._logger.log(level, record.outcome, extra=fields(**data))
