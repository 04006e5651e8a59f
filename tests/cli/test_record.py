"""`picker record` against an admin port: the file that it makes is simulated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from picker.admin.access import Access
from picker.admin.server import AdminServer
from picker.admin.views import Views
from picker.cli import app
from picker.policy import Policy
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.telemetry import Telemetry

TOKEN = "t0ken"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Telemetry, str, Path]]:
    """Telemetry behind an admin port, the port's address, and the file with its token."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    telemetry = Telemetry(clock=lambda: 0.0, version="0")
    server = AdminServer(
        telemetry, Views(telemetry, lambda: 0.0), Access("127.0.0.1", token_file), ready=lambda: None
    )
    port = await server.start("127.0.0.1", 0)
    yield telemetry, f"http://127.0.0.1:{port}", token_file
    await server.stop()


async def record(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["record", *arguments])


def send(telemetry: Telemetry, number: int) -> None:
    tokens = [7] * 640 + [number + 8] * 64
    demand = Demand(len(tokens), PromptKeys.of_tokens([tokens]))
    policy_class = Policy.default().profile("m").resolve(None, 0)
    work = Work(str(number), number / 4, demand, policy_class, tenant="someone")
    telemetry.recording.take(work, "dispatched", 5, 64)


async def listening(telemetry: Telemetry) -> None:
    async with asyncio.timeout(60):
        while not telemetry.recording.wanted:
            await asyncio.sleep(0.01)


async def test_what_is_recorded_can_be_simulated(served: tuple[Telemetry, str, Path], tmp_path: Path) -> None:
    telemetry, url, token_file = served
    out = tmp_path / "arrivals.jsonl"
    arguments = ["--admin", url, "--token-file", str(token_file), "--out", str(out), "--requests", "20"]
    recording = asyncio.create_task(record(*arguments))
    await listening(telemetry)
    for number in range(30):
        send(telemetry, number)
    result = await recording
    assert result.exit_code == 0, result.output
    assert "20 requests in" in result.output
    assert "someone" not in out.read_text()
    simulated = CliRunner().invoke(app, ["simulate", str(out), "--pods", "1", "--jobs", "1", "--json"])
    assert simulated.exit_code == 0, simulated.output
    (run,) = json.loads(simulated.stdout)["policies"]["picker"]["runs"]
    assert run["requests"] == 20
    assert run["hit_share"] == pytest.approx(19 * 640 / (20 * 704))


async def test_it_ends_when_its_time_is_over(served: tuple[Telemetry, str, Path], tmp_path: Path) -> None:
    _, url, token_file = served
    out = tmp_path / "arrivals.jsonl"
    result = await record(
        "--admin", url, "--token-file", str(token_file), "--out", str(out), "--seconds", "0.3"
    )
    assert result.exit_code == 0, result.output
    assert "0 requests in" in result.output


async def test_without_the_token_the_picker_says_no(
    served: tuple[Telemetry, str, Path], tmp_path: Path
) -> None:
    _, url, _ = served
    out = tmp_path / "arrivals.jsonl"
    result = await record("--admin", url, "--out", str(out))
    assert result.exit_code == 1
    assert "a valid bearer token is needed" in result.stderr
    assert not out.exists()


async def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    out = tmp_path / "arrivals.jsonl"
    out.write_text("mine")
    result = await record("--out", str(out))
    assert result.exit_code == 2
    assert out.read_text() == "mine"


async def test_where_nobody_listens_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "arrivals.jsonl"
    result = await record("--admin", "http://127.0.0.1:1", "--out", str(out))
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr
    assert not out.exists()


async def test_a_picker_that_goes_away_ends_the_recording(
    served: tuple[Telemetry, str, Path], tmp_path: Path
) -> None:
    telemetry, url, token_file = served
    out = tmp_path / "arrivals.jsonl"
    recording = asyncio.create_task(
        record("--admin", url, "--token-file", str(token_file), "--out", str(out))
    )
    await listening(telemetry)
    send(telemetry, 1)
    telemetry.recording.close()
    result = await recording
    assert result.exit_code == 1
    assert "it has ended the recording" in result.stderr
    assert len(out.read_text().splitlines()) == 1, "what was recorded is kept"
