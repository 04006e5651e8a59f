"""`picker serve` as a process of its own: started, looked at, and told to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from picker.telemetry.catalogue import ROOM_METRICS
from tests.support.ports import ANY_PORTS

# Rooms that this run does not have.
ELSEWHERE = {"face", "faces", "kube", "kube_watch", "lease", "policy_file", "recording"}


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """The process and its ports by name."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PICKER_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "picker", "serve", *ANY_PORTS, "--log-format", "json", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield process, _ports(process)
    finally:
        process.kill()
        process.communicate()


def _ports(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stderr is not None
    for line in process.stderr:
        message = json.loads(line)["message"]
        if "serving" in message:
            return {name: int(port) for name, port in re.findall(r"(\w+)=(\d+)", message)}
    raise AssertionError("it ended without serving")


def picker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "picker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(
        "endpoints: [{name: pod-a, address: '127.0.0.1:9', metrics: false, taints: ['gpu=old:NoSchedule']}]\n"
    )
    return path


def test_serves_shows_itself_and_stops_on_sigterm(pool: Path) -> None:
    with serving("--pool-file", str(pool)) as (process, ports):
        admin = f"http://127.0.0.1:{ports['admin']}"
        assert httpx.get(f"{admin}/healthz").text == "ok\n"
        metrics = httpx.get(f"{admin}/metrics").text
        assert 'picker_queue_requests{policy_class="default"} 0.0' in metrics
        expected = {
            entry.metric.name
            for entry in ROOM_METRICS
            if entry.room not in ELSEWHERE and not entry.metric.labels
        }
        assert {name for name in expected if not re.search(rf"^{name}[ {{]", metrics, re.MULTILINE)} == set()

        address = f"127.0.0.1:{ports['introspection']}"
        shown = picker("status", "--address", address)
        assert shown.returncode == 0, shown.stderr
        assert "pod-a" in shown.stdout
        assert "default" in shown.stdout
        data = json.loads(picker("status", "--address", address, "--json").stdout)
        (endpoint,) = data["pool"]["endpoints"]
        assert (endpoint["name"], endpoint["taints"]) == ("pod-a", ["gpu=old:NoSchedule"])

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_says_at_start_what_will_surprise(pool: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "picker",
        "serve",
        *ANY_PORTS,
        "--pool-file",
        str(pool),
        "--log-format",
        "json",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(json.loads(line))
            if "serving" in lines[-1]["message"]:
                break
        process.kill()
    warnings = [line["message"] for line in lines if line["level"] == "warning"]
    assert any(message.startswith("there is no tokens.models") for message in warnings)


def faces_of(process: subprocess.Popen[str]) -> list[Path]:
    """The processes that it has started, as directories that are gone when they have ended."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path("/proc", child) for child in children]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_faces_end_with_the_core_however_it_ends(pool: Path, ending: signal.Signals) -> None:
    flags = ("--extproc-workers", "2", "--queue-drain-notice", "0")
    with serving("--pool-file", str(pool), *flags) as (process, ports):
        faces = faces_of(process)
        assert len(faces) == 2
        ready = httpx.get(f"http://127.0.0.1:{ports['admin']}/metrics").text
        assert re.search(r"^picker_faces 2.0$", ready, re.MULTILINE)
        process.send_signal(ending)
        assert process.wait(30) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
        wait_for(lambda: not any(face.exists() for face in faces))


def test_a_face_that_cannot_serve_is_a_failure_in_words(pool: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("no key")
    files = ("--extproc-tls-cert-file", str(key), "--extproc-tls-key-file", str(key))
    tls = ("--extproc-tls-mode", "files", *files, "--extproc-port", "0", "--extproc-health-port", "0")
    result = picker("serve", "--pool-file", str(pool), "--extproc-workers", "2", *tls)
    assert result.returncode == 1
    assert "a face does not come to serve; the log says why" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_taken_port_is_a_failure_in_words(workers: str) -> None:
    with serving() as (_, ports):
        flags = ("--extproc-port", str(ports["extproc"]), "--extproc-workers", workers)
        result = picker("serve", *flags, "--log-level", "error")
        assert result.returncode == 1
        assert f":{ports['extproc']}" in result.stderr
        assert "Traceback" not in result.stderr
