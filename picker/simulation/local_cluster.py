"""A whole serving stack on this machine: mock engines, Picker as a child process, and a real Envoy before it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from picker.simulation.envoy import EnvoyProcess
from picker.simulation.mock_engine import MockEngine, MockEngineSettings

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_SERVING = re.compile(rb"Addresses\(extproc=(\d+), health=(\d+), admin=(\d+), introspection=(\d+)\)")


class PickerFailed(RuntimeError):
    """Picker did not start. The message holds the end of its log."""


class PickerProcess:
    """`picker serve` with a settings file, on whatever ports that file says (0: free ones)."""

    def __init__(self, config: Path, log: Path) -> None:
        self.extproc_port = 0
        self.admin_port = 0
        self._config = config
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-m", "picker", "serve", "--config", str(self._config)]
        # In a session of its own: Ctrl-C is for whoever started it, who then stops it in order.
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        serving: asyncio.Future[re.Match[bytes]] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(process.stdout, serving))
        try:
            async with asyncio.timeout(_START_SECONDS):
                waits: list[asyncio.Future[Any]] = [serving, self._reader]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise PickerFailed(f"Picker ended at once (exit {await process.wait()}).{self._log_tail()}")
        except TimeoutError:
            await self._stop()
            raise PickerFailed(f"Picker did not start in {_START_SECONDS:.0f} s.{self._log_tail()}") from None
        except BaseException:
            await self._stop()
            raise
        match = serving.result()
        self.extproc_port, self.admin_port = int(match[1]), int(match[3])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def _read(self, output: asyncio.StreamReader, serving: asyncio.Future[re.Match[bytes]]) -> None:
        with self._log.open("wb") as log:
            async for line in output:
                log.write(line)
                log.flush()
                if not serving.done() and (match := _SERVING.search(line)):
                    serving.set_result(match)

    async def _stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return f" The end of its log:\n{text[-2000:]}"


class LocalCluster:
    """`async with LocalCluster(engines, policy) as cluster:` runs until the block ends.

    `policy` is the text of a policy file. `settings` is merged into Picker's settings file, group by group.
    All ports are free ones on the loopback address. Files are kept in `directory`, by default a temporary
    one. Raises `EnvoyUnavailable` or `PickerFailed` when a part does not start.
    """

    def __init__(
        self,
        engines: Sequence[MockEngineSettings],
        policy: str,
        *,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.engines = [MockEngine(engine) for engine in engines]
        self.url = ""
        self.admin_url = ""
        self._policy = policy
        self._settings = settings or {}
        self._directory = directory
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            directory = self._directory or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="picker-"))
            )
            for engine in self.engines:
                await stack.enter_async_context(engine)
            picker = PickerProcess(self._write_files(directory), directory / "picker.log")
            await stack.enter_async_context(picker)
            envoy = EnvoyProcess(await asyncio.to_thread(_envoy_config, picker.extproc_port))
            await stack.enter_async_context(envoy)
            self.url, self.admin_url = f"http://127.0.0.1:{envoy.port}", picker.admin_url
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    def _write_files(self, directory: Path) -> Path:
        """Pool, policy and settings; returns the path of the last."""
        settings: dict[str, dict[str, Any]] = {
            "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0},
            "admin": {"host": "127.0.0.1", "port": 0, "grpc_port": 0},
            "pool": {"file": "pool.yaml"},
            "policy": {"file": "policy.yaml"},
            "tokens": {
                "models": {engine.settings.model: str(engine.settings.tokenizer) for engine in self.engines}
            },
            "queue": {"drain_grace": 0.0},
            "log": {"format": "json"},
        }
        for group, values in self._settings.items():
            settings.setdefault(group, {}).update(values)
        endpoints = [_endpoint(engine, number) for number, engine in enumerate(self.engines)]
        (directory / "pool.yaml").write_text(yaml.safe_dump({"endpoints": endpoints}))
        (directory / "policy.yaml").write_text(self._policy)
        path = directory / "picker.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path


def _endpoint(engine: MockEngine, number: int) -> dict[str, Any]:
    """The engine's entry in the pool file."""
    addresses, settings = engine.addresses, engine.settings
    entry: dict[str, Any] = {
        "name": settings.name or f"engine-{number}",
        "address": addresses.http,
        "block_size": settings.block_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
    }
    if addresses.kv_events is not None:
        entry |= {"kv_events": addresses.kv_events, "kv_replay": addresses.kv_replay}
    return entry


def _envoy_config(extproc_port: int) -> str:
    # Here, because the types of Envoy's configuration take about two seconds to import.
    from picker.simulation.envoy_config import EnvoyOptions, bootstrap

    return bootstrap(EnvoyOptions(picker=("127.0.0.1", extproc_port))).to_json()
