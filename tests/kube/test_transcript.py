"""The transcript in the chart's README is what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube.control_plane import ControlPlane
from tests.kube.transcript import README, record, renewed

pytestmark = [pytest.mark.kube, pytest.mark.e2e]


async def test_the_transcript_is_true(cluster: ControlPlane, tmp_path: Path) -> None:
    page = README.read_text()
    assert page == renewed(page, await record(cluster, tmp_path)), "run: python -m tests.kube.transcript"
