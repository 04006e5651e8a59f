"""What goes wrong on the first day is told in a line, and who is told to stop leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.settings import load_settings
from tests.support.ports import ANY_PORTS
from tests.support.servers import eventually


def picker(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command by itself. `path` comes before all that is installed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PICKER_", "KUBE"))}
    env["COLUMNS"] = "300"
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "picker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)


def told(result: subprocess.CompletedProcess[str], code: int) -> str:
    """What it said, in words."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_tracing_without_what_it_needs(tmp_path: Path) -> None:
    # As xds-protos has it, which brings a part of that name only.
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    result = picker("serve", *ANY_PORTS, "--telemetry-tracing", path=tmp_path)
    assert "opentelemetry-sdk" in told(result, 2)


def test_a_port_of_the_introspection_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = picker("serve", *ANY_PORTS, "--admin-grpc-port", port)
    assert f"127.0.0.1:{port} (admin.grpc_port)" in told(result, 1)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00", b"[]"])
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, content: bytes | None) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    if content is not None:
        kubeconfig.write_bytes(content)
    pool = ("--pool-kubernetes-name", "x", "--pool-kubernetes-kubeconfig", str(kubeconfig))
    assert f"the kubeconfig {kubeconfig} cannot be used" in told(picker("serve", *ANY_PORTS, *pool), 1)


def test_no_cluster_at_all() -> None:
    result = picker("serve", *ANY_PORTS, "--pool-kubernetes-name", "x")
    assert "no kubeconfig is named" in told(result, 1)


def test_files_that_are_not_there_are_named_before_anybody_serves() -> None:
    result = picker(
        "check", "--admin-token-file", "/nowhere/token", "--pool-kubernetes-kubeconfig", "/nowhere/k"
    )
    assert "warning: admin.token_file: there is no file /nowhere/token\n" in result.stdout
    assert "warning: pool.kubernetes.kubeconfig: there is no file /nowhere/k\n" in result.stdout


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    report = tmp_path / "nowhere" / "report.html"
    result = picker("simulate", "shared-prefix:rate=5,duration=2", "--report", str(report))
    assert f"picker: {report}: No such file or directory" in told(result, 1)


@pytest.mark.parametrize("flag", ["--kv-port", "--replay-port"])
def test_a_port_that_is_none(flag: str) -> None:
    assert "65535" in told(picker("mock-engine", "--port", "0", flag, "70000"), 2)


@pytest.mark.parametrize("command", ["record", "replay"])
def test_an_address_without_its_scheme(tmp_path: Path, command: str) -> None:
    (tmp_path / "in").touch()
    arguments = {
        "record": ("--admin", "127.0.0.1:9090", "--out", str(tmp_path / "out")),
        "replay": (str(tmp_path / "in"), "--url", "127.0.0.1:8080", "--model", "m"),
    }
    assert "does not begin with http://" in told(picker(command, *arguments[command]), 2)


def test_a_recording_of_who_says_nothing_is_a_failure(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = picker("record", "--admin", admin, "--out", str(tmp_path / "out"), "--seconds", "1")
    assert "did not answer" in told(result, 1)
    assert not (tmp_path / "out").exists()


def test_paths_of_tokenizers_are_meant_from_where_the_settings_are(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("tokens: {models: {'*': models/llama, other: /models/other}}\n")
    models = load_settings(settings, {}, {}).tokens.models
    assert models == {"*": tmp_path / "models/llama", "other": Path("/models/other")}


async def test_a_recording_that_is_told_to_stop_is_whole(tmp_path: Path) -> None:
    async def recording(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b'{"lost": 0}\n' * 5)
        await asyncio.Event().wait()
        return answer

    app = web.Application()
    app.router.add_get("/recording", recording)
    out = tmp_path / "out"
    async with TestServer(app) as server:
        command = ("record", "--admin", str(server.make_url("")).rstrip("/"), "--out", str(out))
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "picker", *command)
        await eventually(lambda: out.exists() and out.read_text().count("\n") == 5)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"lost": 0}] * 5


def family(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from family(int(child))


@pytest.mark.e2e
async def test_a_demo_that_is_told_to_stop_takes_all_with_it(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker", "demo", "--duration", "60", "--json"),
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        # Picker, and Envoy.
        await eventually(lambda: len(list(family(process.pid))) >= 2)
        started = list(family(process.pid))
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
        assert os.listdir(tmp_path) == []
    finally:
        if process.returncode is None:
            process.kill()
