"""Starting faces, where that fails."""

from __future__ import annotations

import sys
import time

import pytest

from picker.extproc.health import HealthState
from picker.faces.crew import Crew
from picker.pool.pool import Pool
from picker.settings import Settings


async def test_a_process_that_cannot_be_started_is_a_failure_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    settings = Settings.model_validate({"extproc": {"host": "127.0.0.1", "port": 0, "workers": 2}})
    health = HealthState(synced=True)
    crew = Crew(settings, None, Pool(), health, lambda request_id, ok: None, time.monotonic)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="a face does not come to serve"):
        await crew.serve()
    assert "face 0 did not start: " in caplog.text
    assert (crew.stats.running, health.ready) == (0, False)
