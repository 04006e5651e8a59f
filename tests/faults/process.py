"""Picker as a process of its own that can be signalled, killed and started again on the same ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_ports

# What must be zero when nothing is under way.
_GAUGES = (
    "picker_queue_requests",
    "picker_queue_tokens",
    "picker_endpoint_booked_requests",
    "picker_endpoint_booked_prefill_tokens",
    "picker_extproc_active_streams",
    "picker_bodies_held_bytes",
    "picker_tokenizing_prompts",
    "picker_open_requests",
)


class Failed(AssertionError):
    """Picker did not do what it was told; the message has the end of its log."""


@dataclass(slots=True)
class PickerChild:
    """`picker serve` with these settings. `log` may be a device; `preamble` is Python that runs first."""

    settings: dict[str, dict[str, Any]]
    directory: Path
    log: Path
    preamble: str = ""
    extproc_port: int = 0
    admin_port: int = 0
    process: asyncio.subprocess.Process | None = None
    _session: aiohttp.ClientSession = field(default_factory=aiohttp.ClientSession)

    async def start(self) -> None:
        """Start, and wait until it is ready. The ports are chosen the first time and kept."""
        if not self.extproc_port:
            self.extproc_port, self.admin_port = free_ports(2)
        config = self.directory / "picker.json"
        sections: dict[str, dict[str, Any]] = {
            "extproc": {"host": "127.0.0.1", "port": self.extproc_port, "health_port": 0},
            "admin": {"port": self.admin_port, "grpc_port": 0},
            "log": {"format": "json"},
        }
        for name, values in self.settings.items():
            sections.setdefault(name, {}).update(values)
        config.write_text(json.dumps(sections))
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", f"{self.preamble}\nfrom picker.cli import main\nmain()"),
                *("serve", "--config", str(config)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("PICKER_")},
            )
        await self._until_ready()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        async with asyncio.timeout(seconds):
            return await self.process.wait()

    async def close(self) -> None:
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()
        await self._session.close()

    async def ready(self) -> bool:
        try:
            async with self._session.get(f"http://127.0.0.1:{self.admin_port}/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def metrics(self) -> dict[str, float]:
        """Each metric's name -> the sum of its samples."""
        sums: dict[str, float] = defaultdict(float)
        async with self._session.get(f"http://127.0.0.1:{self.admin_port}/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return sums

    async def by_class(self, name: str) -> dict[str, float]:
        """A metric's value for each policy class."""
        return await self._by_label(name, "policy_class")

    async def by_endpoint(self, name: str) -> dict[str, float]:
        """A metric's value for each endpoint's address."""
        return await self._by_label(name, "address")

    async def by_reason(self, name: str) -> dict[str, float]:
        """A metric's value for each reason."""
        return await self._by_label(name, "reason")

    async def _by_label(self, name: str, label: str) -> dict[str, float]:
        async with self._session.get(f"http://127.0.0.1:{self.admin_port}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return {sample.labels[label]: sample.value for sample in samples}

    async def series(self) -> int:
        """How many samples /metrics has."""
        async with self._session.get(f"http://127.0.0.1:{self.admin_port}/metrics") as response:
            return sum(not line.startswith("#") for line in (await response.text()).splitlines())

    async def idle(self, seconds: float = 15.0) -> dict[str, float]:
        """Wait until nothing is held, booked or open; the metrics then. Fails when that does not come."""
        left: dict[str, float] = {}
        try:
            async with asyncio.timeout(seconds):
                while True:
                    metrics = await self.metrics()
                    left = {name: metrics[name] for name in _GAUGES if metrics[name]}
                    if not left:
                        return metrics
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise Failed(f"still under way after {seconds} s: {left}\n{self.log_tail()}") from None

    async def until(self, name: str, at_least: float, seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while (await self.metrics())[name] < at_least:
                await asyncio.sleep(0.02)

    def rss(self) -> int:
        """Resident bytes."""
        assert self.process is not None
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss(self) -> int:
        """The most resident bytes that it ever had."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def complaints(self) -> list[str]:
        """What it has logged above the level of information, and whatever is no log line at all. What there is to say
        of its settings at the start is meant so.
        """
        lines = self.log.read_text().splitlines()
        stray = [line for line in lines if not line.startswith("{")]
        return stray + [
            f"{line['level']} {line['logger']}: {line['message']} {line.get('exception', '')}"
            for line in self.log_lines()
            if line["level"] in ("warning", "error", "critical") and line["logger"] != "picker.settings"
        ]

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.is_file() else ""

    async def _until_ready(self) -> None:
        assert self.process is not None
        try:
            async with asyncio.timeout(90):
                while not await self.ready():
                    if self.process.returncode is not None:
                        raise Failed(f"exit {self.process.returncode}\n{self.log_tail()}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise Failed(f"not ready\n{self.log_tail()}") from None
