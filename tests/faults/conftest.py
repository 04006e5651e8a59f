"""Every test here runs a real Envoy, and is skipped where there is none, except in CI, which then fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from picker.simulation.envoy import EnvoyUnavailable, envoy_binary


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    try:
        envoy_binary()
    except EnvoyUnavailable as error:
        if os.environ.get("CI"):
            raise
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))
    for item in ours:
        item.add_marker(pytest.mark.e2e)
        # They wait for timers of real processes: `make test-slow`.
        item.add_marker(pytest.mark.slow)
