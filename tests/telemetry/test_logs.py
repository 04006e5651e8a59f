"""Logs: one line each, whatever a client put into its values."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from picker.telemetry import DecisionRecord, configure_logging
from picker.telemetry.logs import DecisionLines, fields


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("picker")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


NASTY = 'x\n{"level":"error"}\r\x1b[2J\u2028\x00"'


def decision(model: str = "m") -> DecisionRecord:
    return DecisionRecord(id="r1", at=0.0, policy_class="premium", outcome="dispatched", model=model, cost=7)


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    logging.getLogger("picker.x").warning("odd %s", NASTY, extra=fields(model=NASTY))
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["model"] == NASTY
    assert line.isascii()
    assert line.isprintable()


def test_console_lines_cannot_be_forged() -> None:
    stream = Terminal()
    configure_logging("info", "console", stream)
    logging.getLogger("picker.x").info("odd %s", NASTY, extra=fields(model=NASTY))
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()


def test_exceptions_stay_inside_their_record() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    try:
        raise RuntimeError(NASTY)
    except RuntimeError:
        logging.getLogger("picker.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError" in json.loads(line)["exception"]


def test_auto_is_console_on_a_terminal_and_json_elsewhere() -> None:
    for stream, is_json in ((io.StringIO(), True), (Terminal(), False)):
        configure_logging("info", "auto", stream)
        logging.getLogger("picker").info("hello")
        assert stream.getvalue().startswith("{") == is_json


def test_debug_is_for_our_own_lines_only() -> None:
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    logging.getLogger("picker.pool").debug("ours")
    logging.getLogger("kubernetes.client").debug("authorization: secret")
    assert "ours" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_a_line_that_cannot_be_written_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    stats = configure_logging("info", "json", Full())
    logging.getLogger("picker").info("lost")
    assert stats.lost_lines == 1
    assert capsys.readouterr().err == ""


def test_decisions_are_sampled_at_info() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    now = [0.0]
    lines = DecisionLines(2.0, lambda: now[0])
    for _ in range(10):
        lines.write(decision())
    assert len(stream.getvalue().splitlines()) == 1
    now[0] = 10.0
    for _ in range(10):
        lines.write(decision())
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(written) == 3, "after a pause at most one second's worth"
    assert written[1]["not_logged"] == 9


def test_all_decisions_at_debug_and_none_at_warning() -> None:
    for level, expected in (("debug", 10), ("warning", 0)):
        stream = io.StringIO()
        configure_logging(level, "json", stream)  # type: ignore[arg-type]
        lines = DecisionLines(0.0, lambda: 0.0)
        for _ in range(10):
            lines.write(decision())
        assert len(stream.getvalue().splitlines()) == expected


def test_a_decision_line_has_what_an_operator_greps_for() -> None:
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    DecisionLines(1.0, lambda: 0.0).write(decision("m" * 10_000))
    line = json.loads(stream.getvalue())
    assert (line["message"], line["request"], line["class"], line["cost"]) == (
        "dispatched",
        "r1",
        "premium",
        7,
    )
    assert len(line["model"]) == 128
