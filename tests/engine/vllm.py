"""A vLLM server as a child process, with everything on that Picker looks at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.support.ports import free_ports

BLOCK = 32
"""Tokens in a block: the CPU backend takes multiples of 32 only."""

BLOCKS = 80
"""Of which the engine keeps one for itself."""

MODEL = "tiny"

_START_SECONDS = 600.0
_POLL_SECONDS = 0.5

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "PYTHONDONTWRITEBYTECODE": "",  # compiling gigabytes of modules at each start takes minutes
}


class CannotStart(Exception):
    """The engine did not come up; the text has the end of its log."""


@dataclass(slots=True)
class Vllm:
    """One server. `start` may be called again after `kill`: it comes back on the same ports."""

    python: Path
    model: Path
    log: Path
    ranks: int = 1
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def pool_entry(self) -> dict[str, Any]:
        """This engine in a pool file."""
        http, events, replay = self.ports
        return {
            "name": "vllm",
            "address": f"127.0.0.1:{http}",
            "kv_events": f"tcp://127.0.0.1:{events}",
            "kv_replay": f"tcp://127.0.0.1:{replay}",
            "ranks": self.ranks,
        }

    def start(self) -> None:
        """Start it and wait until it answers. Raises CannotStart."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.python), *self._arguments()],
                env={**os.environ, **_ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise CannotStart("\n".join(self.log.read_text(errors="replace").splitlines()[-30:]))
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """Kill the server and its workers, as a node that fails does."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _arguments(self) -> list[str]:
        http, events, replay = self.ports
        kv_events: Mapping[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": f"kv@127.0.0.1:{http}@{MODEL}",
        }
        options = {
            "model": self.model,
            "served-model-name": MODEL,
            "load-format": "dummy",
            "dtype": "bfloat16",
            "host": "127.0.0.1",
            "port": http,
            "max-model-len": 2048,
            "max-num-seqs": 8,
            "block-size": BLOCK,
            "num-gpu-blocks-override": BLOCKS,
            "scheduling-policy": "priority",
            "tool-call-parser": "hermes",
            "data-parallel-size": self.ranks,
            "kv-events-config": json.dumps(kv_events),
        }
        switches = [
            "enforce-eager",
            "enable-prefix-caching",
            "enable-prompt-tokens-details",
            "enable-request-id-headers",
            "enable-auto-tool-choice",
            "trust-request-chat-template",
        ]
        return [
            "-m",
            "vllm.entrypoints.openai.api_server",
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            *(f"--{name}" for name in switches),
        ]
